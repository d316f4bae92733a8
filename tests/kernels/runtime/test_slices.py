"""Kernels that run in slices: every item once, the bits of a whole run, and other passes between two slices."""

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lce
from lce.engine.running import append
from lce.kernels.runtime import kernel
from lce.kernels.runtime.kernel import Slices
from tests.checkpoints import save_tiny, tokens
from tests.command import within

SLOW = pytest.mark.slow
KNOBS: dict[str, dict[str, Any]] = {"esa": {"compress": "pca", "low_dim": 4}, "longheads": {"chunk_size": 8}}
PACKED = [{"weights": "int8"}, {"weights": "int4"}, {"dtype": "bfloat16", "weights": "int4"}]
DEEPER = [{"dtype": "bfloat16"}, {"kv_dtype": "int8-device"}, *PACKED]


def read(engine: lce.Engine, context: lce.Context, ids: Sequence[int], slices: Slices | None) -> list[Tensor]:
    """The states after each block of a text, and after four tokens behind it."""
    found: list[Tensor] = []
    with torch.inference_mode():
        for first in range(0, len(ids), engine.setup.block):
            block = ids[first : first + engine.setup.block]
            context.token_ids.extend(block)
            lane = append(engine.setup, context, [block], slices=slices)
            assert lane.hidden is not None
            found.append(lane.hidden.clone())
        for token_id in (5, 6, 7, 8):
            context.token_ids.append(token_id)
            found.append(append(engine.setup, context, [[token_id]], decoding=True).logits)  # type: ignore[arg-type]
    return found


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.timeout(600)  # it may compile the kernels of every method
@pytest.mark.parametrize("n_threads", [2, pytest.param(1, marks=SLOW)])
@pytest.mark.parametrize("options", [{}, *(pytest.param(each, marks=SLOW) for each in DEEPER)], ids=str)
def test_every_method_reads_the_same_in_slices(options: dict[str, Any], n_threads: int, tmp_path: Path) -> None:
    """As small as slices can be, and with decode of another context between them, in this thread and in another."""
    torch.set_num_threads(n_threads)
    save_tiny(tmp_path, hidden_size=96, intermediate_size=272, num_hidden_layers=2)
    first: lce.Engine | None = None
    for name in lce.methods.available():
        engine = lce.load(tmp_path, lce.methods.make(name, KNOBS.get(name)), block=48, sharing=first, **options)
        first = first or engine
        check_reading(engine)


@torch.inference_mode()
def step(engine: lce.Engine, context: lce.Context) -> Tensor:
    """Decode one token; return the logits after it."""
    context.token_ids.append(9)
    logits = append(engine.setup, context, [[9]], decoding=True).logits
    assert logits is not None
    return logits


def check_reading(engine: lce.Engine) -> None:
    whole = read(engine, engine.new_context(400), tokens(150), None)
    other, alone = engine.prefill(tokens(70, seed=1)), engine.prefill(tokens(70, seed=1))
    said: list[Tensor] = []
    n_pauses = 0

    def pause() -> float:
        nonlocal n_pauses
        n_pauses += 1
        if n_pauses % 40 == 1:
            said.append(decoder.submit(step, engine, other).result(60))
        if n_pauses % 40 == 21:
            said.append(step(engine, other))
        return 0.0

    with ThreadPoolExecutor(1) as decoder:
        assert_same(read(engine, engine.new_context(400), tokens(150), Slices(pause)), whole)
    assert n_pauses > 30
    assert_same(said, [step(engine, alone) for _ in said])


def test_a_pause_that_raises_ends_the_pass_and_leaves_the_cache(tmp_path: Path) -> None:
    engine = lce.load(save_tiny(tmp_path), block=48)
    context, calls = engine.new_context(400), itertools.count(1)

    def pause() -> float:
        if next(calls) == 25:
            raise KeyError("mine")
        return 0.0

    slices = Slices(pause)
    context.token_ids.extend(tokens(48))
    with pytest.raises(KeyError, match="mine"):
        append(engine.setup, context, [tokens(48)], slices=slices)
    assert context.cache.length == 0
    ours = append(engine.setup, context, [tokens(48)], slices=slices).logits
    assert torch.equal(ours, engine.prefill(tokens(48)).logits)  # type: ignore[arg-type]
    assert kernel._thread.slices is None


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The slices of items that run, on one thread."""
    found: list[tuple[int, int]] = []

    monkeypatch.setattr(kernel.threads, "run_slice", lambda job, first, stop: found.append((first, stop)))
    return found


@pytest.mark.parametrize("seconds", [0.0, 1e-7, 1e-5, 1e-3, 1.0, -1.0])
@pytest.mark.parametrize("least", [1, 7, 1000])
@pytest.mark.parametrize("n", [0, 1, 2, 63, 64, 65, 1000, 12_345])
def test_every_item_runs_once(n: int, least: int, seconds: float, runs: list[tuple[int, int]]) -> None:
    slices = Slices(lambda: seconds)
    for _ in range(3):
        runs.clear()
        slices.run(0, n, (), least, 0)
        ends = [0, *(stop for _, stop in runs)]
        assert ([first for first, _ in runs], ends[-1]) == (ends[:-1], n)
        assert all(stop - first >= min(least, n) for first, stop in runs)


def test_no_pause_before_its_time(runs: list[tuple[int, int]]) -> None:
    pauses: list[None] = []
    slices = Slices(lambda: pauses.append(None) or 1000.0)
    for _ in range(20):
        slices.run(0, 5000, (), 1, 0)
    assert len(pauses) == 1
    assert len(runs) <= 40


def test_threads_have_slices_of_their_own(tmp_path: Path) -> None:
    with kernel.sliced(Slices(lambda: 0.0)):
        assert within(lambda: kernel._thread.slices) is None
