"""True mass against the definition, however keys are cached; and the outputs of the attention that it belongs to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lce.attention import Attention
from lce.methods import LongHeads, Rope, Step, distances, make
from lce.methods.base import Method
from lce.methods.mass import JUDGES, Judge, TrueMass
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


def test_spans_of_queries() -> None:
    def spans(method: Method, start: int, stop: int) -> list[list[list[int]]] | None:
        step = Step(start, stop, Rope(RopeConfig(), 8, WINDOW), Attention.choose(), WINDOW, 2)
        return distances.spans_by_query(method, 0, step)

    assert spans(LongHeads(chunk_size=4, chunks=3), 5, 8) == [[[4, 6]], [[4, 7]], [[4, 8]]]
    streaming = make("streaming", {"sinks": 2, "local": 3})
    assert spans(streaming, 5, 8) == [[[0, 2], [3, 6]], [[0, 2], [4, 7]], [[0, 2], [5, 8]]]
    assert spans(streaming, 0, 2) == [[[0, 1]], [[0, 2]]], "no empty ones"
    assert spans(make("rerope", {"local": 3}), 5, 6) == [[[0, 6]]], "spans that touch are one"
    assert spans(make("lm_infinite", {"local": 4, "top_k": 2}), 5, 8) is None
