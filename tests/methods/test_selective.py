"""The base of selective methods: what a selector may leave out, and scores that are infinite or NaN."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lce.attention import Attention, runs_of_chunks
from lce.cache.kv import KVCache
from lce.cache.layout import Budgets
from lce.errors import UsageError
from lce.kernels.runtime import launching
from lce.methods import Budget, Driver, LongHeads, Pages, Quest, Rope, RopeConfig, SelectiveMethod, choosing, make
from lce.methods.choosing import plain_runs
from lce.methods.placement import ConstantDistance, TruePositions
from lce.methods.selective import ChunkMethod
from lce.methods.selectors import MeanKey
from lce.methods.step import DeviceStep, Step
from tests.pretended import Gpus
from tests.running import as_knobs, cut, layout_for, run, vectors

WINDOW, SIZE = 32, 4


@dataclass(frozen=True)
class ByMeanKey(SelectiveMethod):
    """Overrides only what to keep."""

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return k.mean(dim=2).repeat_interleave(len(q) // len(k), dim=0)


@dataclass(frozen=True)
class Constant(ByMeanKey):
    """Every chunk scores the same."""

    value: float = 0.0

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        return torch.full((len(q), q.shape[1], summary.shape[1]), self.value)


@dataclass(frozen=True)
class ByMeanKeyInFull(ByMeanKey):
    """The same with the default score written out."""

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        return (q[:, :, None] * summary[:, None]).sum(-1)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_a_summary_is_enough(heads: tuple[int, int]) -> None:
    n = 5 * WINDOW + 3
    q, k, v = vectors(7, *heads, n, 16)
    truth = run(ByMeanKeyInFull(chunk_size=SIZE), q, k, v, [n], window=WINDOW)
    for blocks in ([n], cut(n, 7)):
        assert (run(ByMeanKey(chunk_size=SIZE), q, k, v, blocks, window=WINDOW) - truth).abs().max() <= 1e-4


@dataclass(frozen=True)
class Fewest(ByMeanKey):
    """Takes the first chunk alone."""

    def select(self, scores: Tensor, step: Step) -> Tensor:
        found = super().select(scores, step)
        return found.masked_fill(torch.arange(found.shape[-1]) > 0, -1)


@pytest.mark.parametrize(
    "knobs",
    [
        *("longheads chunk_size=16", "longheads chunk_size=16 share=group", "longheads chunk_size=16 placement=true"),
        *("reattention", "pages page=16 budget=320", "pages page=16 budget=320 placement=true"),
    ],
)
def test_a_pass_that_sees_all_has_the_same_answer_and_choice(
    knobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense attention in place of attention to every chunk, with positions stretched by YaRN, and beyond the window."""
    method, window = make(knobs.split()[0], as_knobs(" ".join(knobs.split()[1:]))), 320
    (q, k, v), found = vectors(8, 4, 2, 3 * 128 + 100, 16), []
    yarn = RopeConfig(kind="yarn", factor=2.0)
    n_seeing_all = choosing.n_seeing_all
    for is_dense, budgets in ((True, None), (False, None), (True, Budgets(100 << 10, 0, tmp_path))):
        monkeypatch.setattr(choosing, "n_seeing_all", n_seeing_all if is_dense else lambda *_: 0)
        chosen: list[Tensor] = []
        blocks, note = [128, 128, 64, 64, 100], lambda _, x, chosen=chosen: chosen.append(x)
        out = run(method, q, k, v, blocks, window=window, scaling=yarn, note=note, budgets=budgets)
        found.append((out, chosen))
    (dense, choices), (routed, same), (tiered, _) = found
    assert all(torch.equal(a, b) for a, b in zip(choices, same, strict=True))
    assert (dense - tiered).abs().max() <= 1e-5
    assert (dense - routed).abs().max() <= 1e-5
    assert not torch.equal(dense[:, :320], routed[:, :320])  # it was another computation
    assert torch.equal(dense[:, 320:], routed[:, 320:])


def test_a_layer_that_chooses_nothing_notes_no_choice() -> None:
    """A dense layer of `quest` keeps no bounds, and a pass within its budget is dense, too."""
    q, k, v = vectors(8, 4, 2, 256, 16)
    noted, dense, quest = list[Tensor](), make("full"), make("quest", {"page": 16, "budget": 320})
    out = run(quest, q, k, v, [128, 128], window=512, note=lambda _, x: noted.append(x))
    assert not noted
    assert (out - run(dense, q, k, v, [128, 128], window=512)).abs().max() <= 1e-5


def test_a_selection_of_ones_own_is_not_taken_for_all_chunks() -> None:
    q, k, v = vectors(9, 4, 2, 256, 16)
    out = run(Fewest(chunk_size=16), q, k, v, [128, 128], window=512)
    assert (out - run(make("full"), q, k, v, [128, 128], window=512)).abs().max() > 1e-2


@pytest.mark.parametrize("value", [0.0, math.inf, -math.inf, math.nan])
def test_no_score_lets_a_query_see_ahead(value: float) -> None:
    q, k, v = vectors(1, 4, 2, 200, 8)
    other = v.clone()
    other[:, 150:] += 5
    method = Constant(chunk_size=SIZE, value=value)
    before, after = (run(method, q, k, values, [200], window=WINDOW) for values in (v, other))
    assert before.isfinite().all()
    assert torch.equal(before[:, :150], after[:, :150])
    assert not torch.equal(before, after)


@dataclass(frozen=True)
class KeepsTwice(ByMeanKey):
    """Keeps two vectors and declares one."""

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return super().summarise(q, k, v, step).repeat(1, 1, 2)

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        return q @ summary[..., : q.shape[-1]].mT


def test_more_than_was_declared_is_not_kept() -> None:
    q, k, v = vectors(1, 4, 2, 100, 8)
    with pytest.raises(UsageError, match="KeepsTwice: summarise keeps 256 bytes of a chunk; expected at most 128"):
        run(KeepsTwice(chunk_size=SIZE), q, k, v, [100], window=WINDOW)


PLAIN: dict[str, ChunkMethod] = {
    "mean key": ByMeanKey(chunk_size=SIZE, chunks=5, placement="true"),
    "head": LongHeads(chunk_size=SIZE, chunks=5),
    "group": LongHeads(chunk_size=SIZE, chunks=5, share="group", rank="last"),
    "layer": LongHeads(chunk_size=SIZE, chunks=5, share="layer", keep_first=False, placement="constant"),
    "quest": Quest(page=SIZE, budget=5 * SIZE, dense_layers=0),
    "pages": Pages(MeanKey(), TruePositions(), SIZE, Budget(5 * SIZE, sinks=0), share="group"),
    "near": Pages(MeanKey(), ConstantDistance(), SIZE, Budget(6 * SIZE, local=2 * SIZE)),
}
EVERY_DAY = ("group", "near")


@pytest.mark.parametrize(
    "name", [*EVERY_DAY, *(pytest.param(x, marks=pytest.mark.slow) for x in PLAIN if x not in EVERY_DAY)]
)
def test_plain_choices_become_runs_as_any_choices_do(name: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two launches on a GPU, at several indices with the same tensors."""
    pytest.importorskip("triton")
    method = PLAIN[name].resolve(WINDOW)
    q, k, v = (x.cuda() for x in vectors(7, 4, 2, 63, 16))
    rope, attention = Rope(RopeConfig(), 16, WINDOW), Attention.choose("torch")
    with torch.no_grad():
        cache = KVCache.empty(layout_for(method, len(q), k, 63, Budgets()), 63)
        Driver(method, attention, WINDOW, len(k)).attend(cache, rope, q, k, v)
        monkeypatch.setattr(launching, "installed", lambda: True)
        at, layer = torch.zeros(1, dtype=torch.int64, device="cuda"), cache.layers[0]
        for index in (5, 30, 62):
            at.fill_(index)
            step = DeviceStep(at, 63, rope=rope, attention=attention, window=WINDOW, n_kv_heads=len(k))
            query = q[:, index : index + 1]
            for own in (False,) if method.selection.n_near else (False, True):
                plain = plain_runs(method.selection, query, layer, step, own)
                chosen = method.choose(query, layer, step)
                first, count = runs_of_chunks(chosen, method.selection.size, at if own else None, query)
                assert (plain[0] * (plain[1] > 0)).tolist() == (first * (count > 0)).tolist(), index
                assert plain[1].tolist() == count.tolist(), index
                assert (count > 0).any() == (index // SIZE > method.selection.n_near)


class Own(LongHeads):
    def forced(self, chunk_ids: Tensor, own: Tensor) -> Tensor:
        return chunk_ids == own - 2


def test_choices_of_ones_own_are_not_plain(triton_gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ChunkMethod] = [ByMeanKeyInFull(chunk_size=SIZE, chunks=5), Own(chunk_size=SIZE, chunks=5)]
    made += [LongHeads(chunk_size=SIZE, chunks=5, **knobs) for knobs in ({"rank": "random"}, {"fix_head": True})]
    q, at = torch.zeros(4, 1, 16, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    rope = Rope(RopeConfig(), 16, WINDOW)
    step = DeviceStep(at, 64, rope=rope, attention=Attention.choose("torch"), window=WINDOW, n_kv_heads=2)
    for method in [each.resolve(WINDOW) for each in made]:
        layer = KVCache.empty(layout_for(method, 4, torch.zeros(2, 8, 16, device="cuda"), 8, Budgets())).layers[0]
        layer.state["summaries"].write(torch.zeros(4, 2, 16, device="cuda"), 0)  # type: ignore[attr-defined]
        assert plain_runs(method.selection, q, layer, step, own=True) is None
