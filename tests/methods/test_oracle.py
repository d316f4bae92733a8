"""The oracle's knobs, and methods whose selection is replaced: they attend no less true mass than any other choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lce
from lce.errors import UsageError
from lce.methods import cheating, make, selects
from lce.methods.mass import JUDGES, Judge
from tests import oracle
from tests.running import run, vectors

WINDOW, N = 32, 120
METHODS = {
    "longheads": {"chunk_size": 4, "chunks": 5}, "longheads by group": {"chunk_size": 4, "chunks": 5, "share": "group"},
    "longheads by layer": {"chunk_size": 4, "chunks": 5, "share": "layer", "placement": "true"},
    "quest": {"dense_layers": 0, "page": 4, "budget": 20}, "infllm": {"block_size": 4, "sinks": 4, "top_k": 3},
    "esa": {"compress": "none", "sinks": 4, "top_k": 8},
}  # fmt: skip


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
    method = make("esa", {"compress": "none", "sinks": 4, "top_k": 8, "local": 6})
    replaced = cheating(method, "true")
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
    assert [name for name in lce.methods.available() if selects(make(name))] == [
        "esa", "infllm", "longheads", "oracle", "quest", "random"
    ]  # fmt: skip
    with pytest.raises(UsageError, match="dca selects nothing"):
        cheating(make("dca"))


def test_an_oracle_takes_another_judge() -> None:
    assert cheating(make("oracle", {"chunk_size": 8}), "true") == make("oracle", {"chunk_size": 8, "judge": "true"})
