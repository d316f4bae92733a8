"""Causes of misses, on a hand-made model whose misses have known causes (tests/lookup.py)."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lce
from lce.errors import UsageError
from lce.methods import make
from lce_lab.eval.record import Record
from lce_lab.eval.running import Asking
from lce_lab.eval.sample import Sample
from lce_lab.eval.why import CAUSES, explain, rungs
from tests.lookup import WINDOW, save_lookup, text

pytestmark = pytest.mark.filterwarnings("ignore::lce.WindowWarning")
SIX, TRUE = {"chunk_size": 8, "chunks": 6}, "true mass (constant)"
FAR = text(50, "7", 150)  # 150 positions away: beyond the window, and not in the first chunk or the last ones


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_lookup(tmp_path_factory.mktemp("lookup")))


def asked(document: str, answer: str = "7") -> Callable[[object], Iterable[Sample]]:
    return lambda engine: [Sample(document, "?", (answer,), answer=answer, facts=(answer,))]


@pytest.mark.parametrize(
    ("name", "knobs", "document", "answer", "cause", "by"),
    [
        ("longheads", {"chunk_size": 8, "chunks": 8, "rank": "last"}, text(2, "7", 190), "7", "answered", "itself"),
        ("longheads", {"chunk_size": 8, "chunks": 8, "rank": "last"}, FAR, "7", "selection", TRUE),
        ("quest", {"dense_layers": 0, "page": 8, "budget": 16}, text(250, "7", 60), "7", "answered", "itself"),
        # The first chunk, the last and its own are three: none is free, whoever selects.
        ("longheads", {"chunk_size": 8, "chunks": 3}, FAR, "7", "budget", f"2 times the budget, {TRUE}"),
        ("longheads", SIX | {"placement": "true"}, FAR, "7", "placement", f"placed side_by_side, {TRUE}"),
        # At true distances no budget helps, and three chunks do not help in any placement.
        ("longheads", {"chunk_size": 8, "chunks": 3, "placement": "true"}, FAR, "7", "both", "everything (rerope)"),
        ("streaming", {}, FAR, "7", "both", "everything (rerope)"),
        ("longheads", {"chunk_size": 8, "chunks": 3}, FAR, "4", "model", None),
        ("infllm", {"block_size": 8, "top_k": 1, "sinks": 4, "local": 8}, FAR + "5", "7", "model", None),
        # To a filler's query all tokens are alike, so each of them has the best score of the block.
        ("esa", {"compress": "none", "sinks": 4, "local": 8, "top_k": 4}, FAR, "7", "selection", TRUE),
    ],
    ids=range(10),
)
def test_known_causes(model: str, name: str, knobs: Any, document: str, answer: str, cause: str, by: Any) -> None:
    found = explain(model, make(name, knobs), asked(document, answer), length=len(document) + 2)
    verdict = found.verdicts[0]
    assert (verdict.cause, verdict.by) == (cause, by), verdict.answers
    assert (found.counts, next(iter(verdict.answers))) == ({each: int(each == cause) for each in CAUSES}, "itself")


def test_answers_are_not_asked_again(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, method = tmp_path / "answers", make("longheads", {"chunk_size": 8, "chunks": 3})
    both = [*asked(text(2, "7", 190))(None), *asked(FAR)(None)]
    told: list[tuple[str, int, int]] = []
    first = explain(model, method, lambda _: both, length=202, record=Record(path), progress=lambda *t: told.append(t))
    assert told[:3] == [("longheads, itself:", done, 2) for done in (0, 1, 2)]
    assert {total for _, _, total in told[3:]} == {1}, "only the second is asked again"
    assert [verdict.cause for verdict in first.verdicts] == ["answered", "budget"]
    counts = [path.read_bytes().count(each) for each in (b"\n", b'"checkpoint": ')]
    assert counts == [2 + 2] * 2, "a selection and a budget for the one that is missed"
    monkeypatch.setattr(lce.Batch, "stream", None)  # nothing is asked again
    assert explain(model, method, lambda _: both, length=202, record=Record(path)) == first


def test_a_shared_document_is_read_once(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two questions of one document, one of which is of another kind."""
    made = [Sample(FAR, "?", (answer,), answer=answer, kind=kind) for answer, kind in (("7", "keys"), ("4", "pairs"))]
    method, read = make("longheads", {"chunk_size": 8, "chunks": 3}), list[int]()
    alone, prefill = explain(model, method, lambda _: made, length=202), lce.Engine.prefill
    monkeypatch.setattr(lce.Engine, "prefill", lambda self, ids, **how: read.append(1) or prefill(self, ids, **how))
    how: dict[str, Any] = {"length": 202, "asking": Asking("shared"), "record": Record(tmp_path / "answers")}
    shared = explain(model, method, lambda _: made, **how)
    causes = [[verdict.cause for verdict in found.verdicts] for found in (shared, alone)]
    assert causes == [["budget", "model"]] * 2
    assert len(read) == len(shared.verdicts[1].answers), "each change reads the document once"
    (only,) = explain(model, method, lambda _: made, kind="keys", **how).verdicts
    assert (only.index, only.cause) == (0, "budget")
    with pytest.raises(UsageError, match="no sample is of the kind 'pears'; did you mean 'pairs'"):
        explain(model, method, lambda _: made, kind="pears", **{**how, "record": (empty := Record())})
    assert not list(empty.items()), "the error comes before any question"
    with pytest.raises(UsageError, match="mode is turns"):
        explain(model, method, lambda _: made, length=202, asking=Asking("turns"))


def test_a_method_is_asked_in_a_smaller_window_and_the_others_in_the_whole_one(model: str, tmp_path: Path) -> None:
    path = tmp_path / "answers"
    (verdict,) = explain(model, make("dca"), asked(FAR, "4"), length=202, record=Record(path)).verdicts
    assert list(verdict.answers) == ["itself", "in a window of 48", "everything (rerope)", "everything (dca)"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["window"] for line in lines] == [WINDOW, 48, WINDOW, WINDOW]


@pytest.mark.slow
def test_maps_that_lie_beside_a_model_serve_the_changes_but_a_smaller_window() -> None:
    sample = Sample("A stone lies here. " * 40, "Who?", ("nobody at all",), answer="nobody at all")
    (verdict,) = explain("demo", make("esa"), lambda _: [sample], length=300).verdicts
    assert (verdict.cause, "true mass (true)" in verdict.answers) == ("model", True)
    assert not any("window" in change for change in verdict.answers)


@pytest.mark.parametrize(
    ("name", "knobs", "expected"),  # how many changes of each cause: selection, budget, placement, window
    [
        ("longheads", {}, (1, 1, 1, 1)),  # half of the window is in use side by side
        ("longheads", {"top_p": 0.5}, (1, 2, 1, 1)),
        ("longheads", {"placement": "constant", "chunks": 16}, (1, 3, 1, 1)),
        ("esa", {"compress": "none"}, (1, 4, 2, 1)),
        ("quest", {}, (1, 3, 2, 0)),
        ("pages", {"placement": "true"}, (1, 3, 4, 1)),
        ("pages", {"budget": WINDOW, "select": "lowdim", "select.compress": "pca"}, (1, 0, 3, 1)),
        ("longheads", {"chunk_size": 8, "chunks": 8}, (1, 0, 1, 0)),  # 64 tokens
        ("reattention", {}, (1, 0, 1, 1)),  # it fills the window
        ("reattention", {"top_k": 2}, (1, 1, 1, 1)),
        ("dca", {}, (0, 0, 0, 1)),
        ("full", {}, (0, 0, 0, 0)),
    ],
    ids=str,
)
def test_what_is_tried(name: str, knobs: dict[str, Any], expected: tuple[int, ...]) -> None:
    given = make(name, knobs)
    tried = list(rungs(given.resolve(WINDOW), WINDOW, 200, given))
    assert [rung.cause for rung in tried] == [*np.repeat(CAUSES[1:6], (*expected, 2))], "in this order"
    for rung in tried:
        rung.method.resolve(rung.window or WINDOW)
    assert len({rung.label for rung in tried}) == len(tried)
    assert {getattr(rung.method, "top_p", None) for rung in tried if rung.cause == "budget"} <= {None}


@pytest.mark.parametrize(
    ("name", "knobs", "attended"),
    [
        ("infllm", {"sinks": 128, "local": 4096, "block_size": 16, "top_k": 128}, 128 + 4096 + 16 * 128),
        ("quest", {"budget": 2048}, 2048),
        *(("reattention", {"span": 32, "sinks": 32, "local": 4096, "top_k": n}, 4128 + 32 * n) for n in (127, 16)),
    ],
    ids=str,
)
def test_other_placements_attend_as_many_tokens(name: str, knobs: dict[str, Any], attended: int) -> None:
    method = make(name, knobs).resolve(8192)
    moved = [rung.method for rung in rungs(method, 8192, 16384, method) if rung.cause == "placement"]
    assert {each.resolve(8192).chunks * each.choices[1] for each in moved} == {attended}
