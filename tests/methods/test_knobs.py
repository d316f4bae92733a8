"""Knobs that are values with knobs of their own, and knobs that had other names before."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lce
from lce.engine.identity import Identity, knobs_of
from lce.errors import DataError, UsageError
from lce.methods import Budget, Pages, Step, make, renewed, settings
from lce.methods.lowdim_pages import LowDim
from lce.methods.placement import DualPositions
from lce.methods.registry import RENAMED, as_method
from lce.methods.selection import Selection, Selector, Sizes
from lce.methods.selectors import SummarySelector
from lce.models.config import RopeConfig
from tests.methods.test_matrix import CASES, WINDOW
from tests.running import run, vectors

# What the manifest of a context file says of `pages` in the version before: resolved, in a window of 512.
UNSAID = dict.fromkeys("repr_tokens compress low_dim maps judge seed group growth grows_from grows_to top_p".split())
BEFORE = {"select": "bounds", "place": "dual", "page": 16, "budget": 256, "sinks": 16, "local": 16, "share": "head"}
BEFORE |= {"queries": "alone", "chunk_size": 384, "far": 511, **UNSAID}


def test_knobs_of_values_are_spelled_with_a_dot() -> None:
    spelled = {"select": "lowdim", "select.low_dim": "64", "placement": "dual", "placement.far": "4096"}
    spelled |= {"budget": "2048", "budget.growth": "sqrt"}
    made = make("pages", spelled)
    assert made == Pages(LowDim(low_dim=64), DualPositions(far=4096), budget=Budget(2048, growth="sqrt"))
    assert made == make("pages", {**spelled, "budget.tokens": 2048} | {"budget": 2048})
    assert eval(repr(made), vars(lce.methods) | {"LowDim": LowDim, "DualPositions": DualPositions}) == made


@pytest.mark.parametrize(("name", "knobs"), CASES, ids=str)
def test_settings_make_the_same_method(name: str, knobs: dict[str, Any]) -> None:
    for method in (make(name, knobs), make(name, knobs).resolve(WINDOW)):
        assert make(name, settings(method)) == method


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"select": "bound"}, "select=bound is not one of summary, .*; default select=bounds"),
        ({"select.size": 3}, "no option 'select.size'; select has none"),
        ({"budget.tokens": "many"}, "budget=many is not a whole number; default budget=none"),
        ({"page.size": 3}, "no option 'page.size'; valid, with defaults: select=bounds, select.of=values, "),
        *(
            ({old: 1}, f"no option '{old}'; it is called {now} now: give -o {now}=VALUE")
            for old, now in RENAMED["pages"].items()
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_with_the_present_name(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make("pages", knobs)
    for old in knobs.keys() & RENAMED["pages"].keys():
        with pytest.raises(UsageError, match=words):
            Pages(**{old: 1})


def test_values_are_no_text_in_python() -> None:
    with pytest.raises(UsageError, match=r"pages: select is 'bounds'; expected a Selector; text is for lce.methods"):
        as_method(Pages(select="bounds"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"pages: budget.tokens is the text .9.; expected int"):
        as_method(Pages(budget=Budget("9")))  # type: ignore[arg-type]


def test_a_context_file_of_before_has_the_same_method() -> None:
    method = make("pages", {"placement": "dual"}).resolve(512)
    identity = Identity(lambda: "abc", method, 512, RopeConfig(), torch.float32, 300)
    before = {**identity.facts, "knobs": BEFORE}
    identity.check(Path("old.lce"), before)
    assert make("pages", knobs_of(before)) == method
    with pytest.raises(DataError, match=r"pages placement.far=500; this engine has placement.far=511"):
        identity.check(Path("old.lce"), {**before, "knobs": {**BEFORE, "far": 500}})
    for kept, local in ((True, 8), (False, 0)):
        assert renewed("longheads", {"chunk_size": 8, "keep_last": kept}) == {"chunk_size": 8, "local": local}
    assert all(renewed(name, knobs) == knobs for name, knobs in CASES if name != "pages")


@dataclass(frozen=True)
class Loudest(SummarySelector, name="test: loudest"):
    """Chunks scored by the sums of their values' sizes, whatever the query."""

    def shape(self, sizes: Sizes, selection: Selection) -> tuple[int, ...]:
        return sizes.n_kv_heads, 1

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return v.norm(dim=-1).sum(-1, keepdim=True)

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        return summary.repeat_interleave(len(q) // len(summary), 0).mT.expand(-1, q.shape[1], -1).contiguous()


def test_a_selector_of_ones_own_is_a_kind() -> None:
    try:
        method = make("pages", {"select": "test: loudest", "page": 4, "budget": 20, "share": "group"})
        q, k, v = vectors(1, 4, 2, 120, 8)
        chosen: list[Tensor] = []
        run(method, q, k, v, [119, 1], window=WINDOW, note=lambda _, some: chosen.append(some))
        norms = v.norm(dim=-1).unflatten(1, (-1, 4)).sum(-1)
        best = norms[:, 1:28].topk(2).indices.sort().values + 1  # besides the first page and the last one
        assert chosen[-1][::2, 0, 1:3].tolist() == best.tolist()
    finally:
        del Selector.kinds["test: loudest"]
