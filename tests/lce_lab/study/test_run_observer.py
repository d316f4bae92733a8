"""Watching changes nothing and keeps every choice; heads that are off are columns of zeros in the output projection."""

import shutil
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lce
from lce.methods import Observed, make
from lce_lab.study.run_observer import RunObserver, _cuts
from tests import oracle
from tests.lce_lab.study.recorded import BLOCKS, CASES, PLAIN, WINDOW, N, tensors, watched
from tests.running import run


@pytest.mark.parametrize(("name", "knobs"), [*CASES, *PLAIN], ids=str)
def test_keeps_what_every_query_chose_and_changes_nothing(name: str, knobs: dict[str, Any]) -> None:
    noted: list[torch.Tensor] = []
    out = run(make(name, knobs), *tensors(), BLOCKS, window=WINDOW, note=lambda _, chosen: noted.append(chosen))
    watch, same = watched(name, knobs, looked=[5, 90, N - 1])
    assert torch.equal(out, same)
    blocks = [block.choices[0] for block in watch.choices.blocks if 0 in block.choices]
    assert len(blocks) == len([x for x in noted if x.shape[-1]])
    for packed, chosen in zip(blocks, (x for x in noted if x.shape[-1]), strict=True):
        none = int(torch.iinfo(torch.uint16).max)
        kept = torch.from_numpy(packed.astype("int64")).transpose(0, 1)
        kept = kept.masked_fill(kept == none, -1).repeat_interleave(len(chosen) // len(kept), 0)
        assert torch.equal(kept.expand(chosen.shape), chosen)
    (always,) = watch.choices.always()
    mask = torch.zeros(N, N, dtype=torch.bool)
    for q0, q1, moving in always["runs"]:
        for query in range(q0, q1):
            for a, da, b, db in moving:
                mask[query, a + da * (query - q0) : b + db * (query - q0)] = True
    attended = oracle.DEFINITIONS[name](*tensors(), oracle.Setting(WINDOW, BLOCKS), **knobs).mask
    assert not (mask & ~attended).any()
    assert noted or torch.equal(mask.expand_as(attended), attended), "all that a method without choices attends"


def test_pieces_of_distances() -> None:
    for pieces in ("543 98 88", "7", "444", "0 9 32", "66 54"):
        lengths = [*accumulate(map(len, pieces.split()), initial=0)]
        assert _cuts(torch.tensor([int(d) for d in pieces.replace(" ", "")])) == [*pairwise(lengths)]
    assert len(_cuts(torch.arange(5000) * 2 % 997)) <= 128


def test_heads_that_are_off(tiny_model: Path, tmp_path: Path) -> None:
    """Equal to the model whose output projection has zeros in the columns of those heads."""
    zeroed, dim = ((0, 1), (1, 0), (1, 3)), 16
    folder = tmp_path / "zeroed"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    for layer, head in zeroed:
        weights[f"model.layers.{layer}.self_attn.o_proj.weight"][:, head * dim : (head + 1) * dim] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    ids = torch.randint(2, 300, (90,)).tolist()
    for name in ("full", "longheads"):
        for off, model in ((zeroed, folder), ((), tiny_model)):
            engine = lce.load(tiny_model, Observed(make(name), RunObserver(len(ids), off=off)))
            assert torch.equal(engine.logits(ids), lce.load(model, name).logits(ids))


def test_a_check_ends_the_run(tiny_model: Path) -> None:
    calls = ["first", "second", "third"]
    check = lambda: calls.remove(calls[0])  # noqa: E731  the fourth call fails
    engine = lce.load(tiny_model, Observed(make("full"), RunObserver(40, check=check)), block=8)
    with pytest.raises(IndexError):
        engine.prefill(list(range(2, 42)))
    assert calls == []
