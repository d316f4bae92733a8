"""True mass and spans against the definition, and methods whose selection is replaced by true mass."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lce
from lce.attention import Attention
from lce.errors import UsageError
from lce.methods import LongHeads, Method, Rope, RopeConfig, Step, make
from lce_lab.analysis import distances
from lce_lab.analysis.mass import JUDGES, Judge, TrueMass
from lce_lab.analysis.oracle import cheating, selects
from tests import oracle
from tests.running import cut, run, vectors

WINDOW, N = 32, 120
METHODS = {
    "longheads": {"chunk_size": 4, "chunks": 5},
    "longheads by group": {"chunk_size": 4, "chunks": 5, "share": "group"},
    "longheads by layer": {"chunk_size": 4, "chunks": 5, "share": "layer", "placement": "true"},
    "quest": {"dense_layers": 0, "page": 4, "budget": 20},
    "infllm": {"block_size": 4, "sinks": 4, "top_k": 3},
    "esa": {"compress": "none", "sinks": 4, "top_k": 8},
    "pages": {"page": 4, "budget": 20, "share": "group"},
}


def mass_chosen(method: lce.Method, judge: Judge) -> float:
    """The true mass of all that the queries of a text chose."""
    q, k, v = vectors(3, 4, 2, N, 8)
    found: list[Tensor] = []
    run(method, q, k, v, [80, 40], window=WINDOW, note=lambda _, chosen: found.append(chosen))
    chosen = found[-1]  # by the last block's queries
    first, size = method.resolve(WINDOW).choices
    truth = oracle.true_mass(q, k, oracle.Setting(WINDOW), judge)[:, -40:]
    units = torch.nn.functional.pad(truth[..., first:], (0, -(N - first) % size)).unflatten(-1, (-1, size)).sum(-1)
    return float(units.gather(-1, chosen.clamp(min=0)).masked_fill(chosen < 0, 0).sum())


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize(("called", "knobs"), METHODS.items(), ids=METHODS)
def test_a_replaced_selection_attends_more_true_mass(called: str, knobs: dict[str, Any], judge: Judge) -> None:
    method = make(called.split()[0], knobs)
    ours = mass_chosen(cheating(method, judge), judge)
    assert ours > 1.05 * mass_chosen(method, judge)
    if called == "longheads":
        others = (replace(method, **{knob: value}) for knob, value in (("rank", "last"), ("rank", "random")))
        assert all(ours > mass_chosen(other, judge) for other in others)


def test_the_rest_of_the_method_stays() -> None:
    replaced = cheating(make("esa", {"compress": "none", "sinks": 4, "top_k": 8, "local": 6}), "true")
    assert (replaced.name, replaced.sinks, replaced.top_k, replaced.local) == ("esa", 4, 8, 6)  # type: ignore[attr-defined]
    everything = {"chunk_size": 4, "chunks": N // 4 + 1}  # what chooses everything is what it was
    q, k, v = vectors(3, 4, 2, N, 8)
    whole = make("longheads", everything)
    plain, ours = (run(each, q, k, v, [N], window=WINDOW) for each in (whole, cheating(whole)))
    assert torch.equal(plain, ours)


def test_a_selector_of_ones_own_is_replaced() -> None:
    @dataclass(frozen=True)
    class Keys(lce.SelectiveMethod):
        weight: float = 1.0

        def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Any) -> Tensor:
            return self.weight * k.mean(dim=2).repeat_interleave(len(q) // len(k), dim=0)

    method = Keys(chunk_size=4, chunks=5, weight=2.0)
    replaced = cheating(method)
    assert repr(replaced).startswith("OracleKeys(chunk_size=4, chunks=5")
    assert replaced.weight == 2.0  # type: ignore[attr-defined]
    assert mass_chosen(replaced, "constant") > mass_chosen(method, "constant")


def test_what_selects_nothing_is_refused() -> None:
    selecting = [name for name in lce.methods.available() if selects(make(name))]
    assert selecting == "esa infllm longheads oracle pages quest random reattention".split()
    with pytest.raises(UsageError, match="dca selects nothing"):
        cheating(make("dca"))


def test_an_oracle_takes_another_judge() -> None:
    assert cheating(make("oracle", {"chunk_size": 8}), "true") == make("oracle", {"chunk_size": 8, "judge": "true"})


# True mass

SHORT, LENGTH = 16, 45
# Keys at offsets, at their index, unrotated.
CACHED: list[tuple[str, dict[str, Any]]] = [
    ("longheads", {"chunk_size": 4}),
    ("full", {}),
    ("esa", {"compress": "none", "sinks": 2}),
]


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
    run(method, *vectors(5, 4, 2, LENGTH, 8), cut(LENGTH, 20), window=SHORT, **setting)
    return got


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize(("name", "knobs"), CACHED, ids=str)
def test_equals_the_definition(name: str, knobs: dict[str, Any], judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = vectors(5, 4, 2, LENGTH, 8)
    truth = oracle.true_mass(q, k, oracle.Setting(SHORT), judge)
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
    assert start == LENGTH


@pytest.mark.parametrize(("name", "knobs"), CACHED, ids=str)
def test_scaling_is_on_queries_and_keys_once(name: str, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """YaRN puts a factor on both; all ways of caching keys give the same."""
    scaling = RopeConfig(kind="yarn", factor=4.0)
    expected = found("full", {}, "constant", monkeypatch, scaling=scaling)
    monkeypatch.undo()
    for ours, theirs in zip(found(name, knobs, "constant", monkeypatch, scaling=scaling), expected, strict=True):
        assert (ours[0] - theirs[0]).abs().max() <= 1e-5


def test_spans_of_queries() -> None:
    def spans(method: Method, start: int, stop: int) -> list[list[list[int]]] | None:
        step = Step(
            start, stop, rope=Rope(RopeConfig(), 8, SHORT), attention=Attention.choose(), window=SHORT, n_kv_heads=2
        )
        return distances.spans_by_query(method, 0, step)

    assert spans(LongHeads(chunk_size=4, chunks=3), 5, 8) == [[[4, 6]], [[4, 7]], [[4, 8]]]
    streaming = make("streaming", {"sinks": 2, "local": 3})
    assert spans(streaming, 5, 8) == [[[0, 2], [3, 6]], [[0, 2], [4, 7]], [[0, 2], [5, 8]]]
    assert spans(streaming, 0, 2) == [[[0, 1]], [[0, 2]]], "no empty ones"
    assert spans(make("rerope", {"local": 3}), 5, 6) == [[[0, 6]]], "spans that touch are one"
    assert spans(make("lm_infinite", {"local": 4, "top_k": 2}), 5, 8) is None
