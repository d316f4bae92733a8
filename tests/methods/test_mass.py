"""True mass against the definition, however keys are cached; and the outputs of the attention that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lce.methods import LayerCache, LongHeads, Step, make
from lce.methods.base import Method
from lce.methods.mass import JUDGES, Judge, TrueMass, spans_by_query
from lce.models.config import RopeConfig
from tests import oracle
from tests.running import cut, run, vectors

WINDOW, N = 16, 45
# Keys at offsets, at their index, unrotated.
CACHED: list[tuple[str, dict[str, Any]]] = [
    ("longheads", {"chunk_size": 4}), ("full", {}), ("esa", {"compress": "none", "sinks": 2}),
]  # fmt: skip


def found(name: str, knobs: dict[str, Any], judge: Judge, monkeypatch: pytest.MonkeyPatch, **setting: Any) -> list[Any]:
    """What each block's queries give each token, each chunk of 4, and their outputs."""
    method, got = make(name, knobs), []
    cls: type[Method] = type(method)
    attend = cls.attend

    def watched(self: Method, q: Tensor, cache: Any, step: Any) -> Tensor:
        mass, at = TrueMass(self, cache, step, judge), step.positions(q.device)
        got.append(
            (mass.weights(q, at), mass.of_chunks(q, at, 4, step.stop // 4), mass.attend(q), mass.of_tokens(q, at))
        )
        return attend(self, q, cache, step)

    monkeypatch.setattr(cls, "attend", watched)
    run(method, *vectors(5, 4, 2, N, 8), cut(N, 20), window=WINDOW, **setting)
    return got


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize(("name", "knobs"), CACHED, ids=str)
def test_equals_the_definition(name: str, knobs: dict[str, Any], judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = vectors(5, 4, 2, N, 8)
    truth = oracle.true_mass(q, k, oracle.Setting(WINDOW), judge)
    out = truth @ v.double().repeat_interleave(2, 0)
    start = 0
    for weights, chunks, outs, tokens in found(name, knobs, judge, monkeypatch):
        stop = start + weights.shape[1]
        expected = truth[:, start:stop, :stop]
        assert (weights - expected).abs().max() <= 1e-5
        whole = expected[..., : stop // 4 * 4].unflatten(-1, (-1, 4)).sum(-1)
        assert (chunks.exp() - whole).abs().max() <= 1e-5
        assert (outs - out[:, start:stop]).abs().max() <= 1e-4
        assert (tokens - expected.sum((0, 1))).abs().max() <= 1e-4
        start = stop
    assert start == N


@pytest.mark.parametrize(("name", "knobs"), CACHED, ids=str)
def test_scaling_is_on_queries_and_keys_once(name: str, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """YaRN puts a factor on both; all ways of caching keys give the same."""
    scaling = RopeConfig(kind="yarn", factor=4.0)
    expected = found("full", {}, "constant", monkeypatch, scaling=scaling)
    monkeypatch.undo()
    for ours, theirs in zip(found(name, knobs, "constant", monkeypatch, scaling=scaling), expected, strict=True):
        assert (ours[0] - theirs[0]).abs().max() <= 1e-5


def test_judges_agree_within_half_of_the_window() -> None:
    q, k, _ = vectors(5, 4, 2, WINDOW // 2 + 1, 8)
    near, far = (oracle.true_mass(q, k, oracle.Setting(WINDOW), judge) for judge in JUDGES)
    assert torch.equal(near, far)


@dataclass(frozen=True)
class WithAMask(LongHeads):
    """A method that says by a mask what it always attends: the spans that it inherits no longer hold."""

    def always(self, cache: LayerCache, step: Step) -> Tensor | None:
        return torch.tensor([[True, True, False, True], [False] * 4, [False, True, True, True]])[:, : step.stop]


def test_spans_of_queries() -> None:
    step = cast(Step, SimpleNamespace(start=5, stop=8, positions=lambda device: torch.arange(5, 8)))
    cache = cast(LayerCache, SimpleNamespace(index=0, buffer=SimpleNamespace(k=torch.zeros(1))))
    assert spans_by_query(LongHeads(chunk_size=4), cache, step) == [[[4, 6]], [[4, 7]], [[4, 8]]]
    streaming = make("streaming", {"sinks": 2, "local": 3})
    assert spans_by_query(streaming, cache, step) == [[[0, 2], [3, 6]], [[0, 2], [4, 7]], [[0, 2], [5, 8]]]
    start = cast(Step, SimpleNamespace(start=0, stop=2, positions=lambda device: torch.arange(2)))
    assert spans_by_query(streaming, cache, start) == [[[0, 1]], [[0, 2]]], "no empty ones"
    masked = cast(Step, SimpleNamespace(start=1, stop=4))
    assert spans_by_query(WithAMask(chunk_size=4), cache, masked) == [[[0, 2], [3, 4]], [], [[1, 4]]]
    assert spans_by_query(make("lm_infinite", {"local": 4, "top_k": 2}), cache, step) is None
