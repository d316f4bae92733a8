"""Decode steps whose index only the device knows equal those of which the host knows it, with the same tensors."""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from lce.cache.kv import KVCache
from lce.cache.layout import Budgets
from lce.methods import Driver, Method, Rope, RopeConfig, available, make
from lce.methods.decoding import bound_for, completes
from lce.methods.longheads import LongHeads
from lce.methods.selective import SelectiveMethod
from lce.methods.step import Step
from tests.engine.test_graph import PlainRuns
from tests.methods.test_matrix import CASES, NEEDS, WINDOW
from tests.running import layout_for, vectors

# Methods, selectors and knobs whose steps run one by one.
ONE_BY_ONE = "infllm|oracle|random|reattention|lowdim|best_key|lm_infinite.*top_k|'heads'|top_p|growth|auto"
RECORDED = [case for case in CASES if not re.search(ONE_BY_ONE, str(case))]


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """What is read before it is written shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def differences(
    method: Method,
    n_prefilled: int,
    n: int,
    *,
    sliding_window: int | None = None,
    scaling: RopeConfig | None = None,
    heads: tuple[int, int] = (4, 2),
) -> tuple[list[float], list[int]]:
    """The largest difference of each decode step from the same step as it is run one by one; the steps recorded."""
    method = method.resolve(WINDOW)
    q, k, v = vectors(7, *heads, n, 16)
    rope = Rope(scaling or RopeConfig(), 16, WINDOW, n)
    driver = Driver(method, PlainRuns(), WINDOW, heads[1], sliding_window)
    plain, cache = (KVCache.empty(layout_for(method, len(q), k, n_prefilled, Budgets()), n) for _ in range(2))
    for each in (plain, cache):
        driver.attend(each, rope, *(x[:, :n_prefilled] for x in (q, k, v)))
    at = torch.zeros(1, dtype=torch.int64)  # one tensor for all steps
    found, recorded = [], []
    for i in range(n_prefilled, n):
        token = [x[:, i : i + 1] for x in (q, k, v)]
        truth = driver.attend(plain, rope, *token)
        bound = method.bound(i + 1)
        cache.make_space(i + 1)
        if bound is None or not cache.has_space(i + 1):
            out = driver.attend(cache, rope, *token)
        else:
            at.fill_(i)
            cache.begin()
            out = driver.recorded(cache.layers, rope, at, bound, completes(cache, i))(0, *token)
            cache.appended(i + 1)
            cache.commit()
            recorded.append(i)
        found.append(float((out - truth).abs().max()))
    assert cache.length == plain.length == n
    for name, kept in plain.tensors().items():
        assert torch.allclose(kept, cache.tensors()[name], atol=1e-4), name
    return found, recorded


@pytest.mark.parametrize(("name", "knobs"), RECORDED, ids=str)
@pytest.mark.covering("name")
def test_equals_the_ordinary_step(name: str, knobs: dict[str, object]) -> None:
    with nan_in_new_memory():
        found, recorded = differences(make(name, knobs), 5 * WINDOW - 7, 6 * WINDOW)
    assert max(found) <= 1e-4
    assert len(recorded) >= 10 or make(name, knobs).resolve(WINDOW).choices[1] == 1, "chunks are of one token"


def test_begins_with_a_text_within_the_window() -> None:
    for name in ("full", "streaming", "dca", "rerope", "self_extend", "lm_infinite", "longheads", "quest"):
        found, recorded = differences(make(name, {"dense_layers": 0} if name == "quest" else {}), 3, 2 * WINDOW)
        assert max(found) <= 1e-4, name
        assert recorded or name == "longheads", name  # whose chunks are of one token here


@pytest.mark.parametrize("name", ["full", "dca", "longheads", "rerope"])
def test_with_a_sliding_window_yarn_and_as_many_key_heads(name: str) -> None:
    knobs = {"chunk_size": 4} if name == "longheads" else {}
    found, _ = differences(
        make(name, knobs), 60, 90, sliding_window=20, scaling=RopeConfig(kind="yarn", factor=4.0), heads=(4, 4)
    )
    assert max(found) <= 1e-4


@dataclasses.dataclass(frozen=True)
class Relative(SelectiveMethod):
    """A method of one's own whose scores depend on all chunks that there are."""

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return k.mean(2).repeat_interleave(len(q) // len(k), dim=0)

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        return (q @ summary.mT).softmax(-1) - torch.arange(summary.shape[1]).flip(0) * 0.01


class Newest(LongHeads):
    def forced(self, chunk_ids: Tensor, own: Tensor) -> Tensor:
        return chunk_ids >= chunk_ids.max() - 1


@pytest.mark.parametrize("kind", [Relative, Newest])
def test_a_method_of_ones_own_sees_the_complete_chunks_alone(kind: type[SelectiveMethod]) -> None:
    with nan_in_new_memory():
        found, recorded = differences(kind(chunk_size=8, chunks=4), 100, 124)
    assert max(found) <= 1e-4
    assert len(recorded) > 10


class HostScores(LongHeads):
    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        return super().score(q, summary, step, layer) * (step.start + 1)


class OwnAttend(LongHeads):
    def attend(self, q: Tensor, cache: object, step: Step) -> Tensor:
        return super().attend(q, cache, step) * 2  # type: ignore[arg-type]


def test_who_decodes() -> None:
    decoding = {name for name in available() if make(name, NEEDS.get(name, {})).resolve(WINDOW).promised("recorded")}
    assert decoding == {case[0] for case in RECORDED}
    assert Relative().promised("recorded")
    assert not OwnAttend().promised("recorded"), "it does something else"
    with pytest.raises(AttributeError, match="start"):
        differences(HostScores(chunk_size=8, chunks=4), 100, 104)


def test_a_bound_holds_its_text_and_at_most_a_quarter_more() -> None:
    assert bound_for(1) == bound_for(1024) == 1024
    for n in (1025, 2048, 2049, 5000, 33_000, 131_072, 131_073):
        assert n <= bound_for(n) <= 1.25 * n
    assert len({bound_for(n) for n in range(1024, 131_073, 64)}) == 29
