"""Runs that a page asks for: checked, bounded, one at a time, and cancelled."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lce.errors import LceError
from lce.methods import LongHeads, available, find, make
from lce_lab.study.live import MOST_NEW, Busy, Live, knobs_of, requested
from tests.command import until

TEXT = "The old miller took the bread out of the oven. " * 3
ASKED: dict[str, Any] = {"prompt": TEXT, "method": "longheads", "knobs": {"chunk_size": 4}, "max_tokens": 2}


@pytest.fixture
def live(tiny_model: Path) -> Iterator[Live]:
    made = Live(tiny_model, 200)
    yield made
    made.close()


def finished(live: Live) -> dict[str, Any]:
    """The state when no run is under way."""
    until(lambda: live.state()["state"] != "running")
    return live.state()


def test_a_run_and_its_recording(live: Live) -> None:
    assert live.state() == {"state": "idle", "id": 0}
    assert live.start({**ASKED, "off": [[0, 1]], "marks": ["bread"]}) == 1
    state = finished(live)
    assert (state["state"], state["id"]) == ("done", 1)
    (run,), marks = state["recording"]["runs"], state["recording"]["marks"]
    assert (run["off"], len(run["generated"]), len(marks)) == ([[0, 1]], 2, 3)


def test_one_run_at_a_time_and_cancel(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    first = LongHeads.attend

    def slow(self: LongHeads, *args: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return first(self, *args)

    monkeypatch.setattr(LongHeads, "attend", slow)
    live.start(ASKED)
    assert begun.wait(30)
    with pytest.raises(Busy, match="a run is under way"):
        live.start(ASKED)
    assert live.cancel() == 1
    go_on.set()
    assert finished(live) == {"state": "cancelled", "id": 1}
    assert (live.start(ASKED), finished(live)["state"]) == (2, "done")


REFUSED: dict[str, list[Any]] = {
    "the prompt is missing or empty": [{"prompt": 7}],
    "did you mean 'longheads'": [{"method": "longhead"}],
    "expected the name of a method": [{"method": None}],
    "has no option 'chunksize'": [{"knobs": {"chunksize": 4}}],
    "expected an object": [[], None, {"knobs": [1]}],
    "chunk_size=[] is not": [{"knobs": {"chunk_size": []}}],
    "expected 1 or more": [{"knobs": {"chunk_size": size}} for size in (0, -5)],
    "has no": [{"knobs": {"preset": [1]}}],
    "is not a whole number": [{"knobs": {"chunk_size": "x" * 200}}],
    "cannot be set from a page": [{"method": "esa", "knobs": {"maps": "/etc/passwd"}}],
    "expected a whole number from 0 to 256": [{"max_tokens": n} for n in (257, True, 1e400)],
    "pairs of a layer and a head": [{"off": [[0]]}, {"off": {"0": 1}}],
    "layer 0 has no head 9": [{"off": [[0, 9]]}],
    "marks is": [{"marks": [3]}],
    "expected 200 or fewer": [{"prompt": "the dogs " * 400}],
    "half a surrogate pair": [{"prompt": "\ud800"}],
}


def test_what_cannot_be_asked(live: Live) -> None:
    for words, changes in REFUSED.items():
        for change in changes:
            with pytest.raises(LceError) as raised:
                live.start({**ASKED, **change} if isinstance(change, dict) else change)
            assert words in str(raised.value), change
            assert live.state()["state"] == "idle"


def test_about_names_every_method_and_its_knobs(live: Live) -> None:
    about = live.about()
    assert [each["name"] for each in about["methods"]] == available()
    assert about["model"] | {"name": ""} == {"name": "", "layers": 2, "heads": 4, "kv_heads": 2, "window": 64}
    assert about["max_tokens"] == MOST_NEW
    knobs = {knob["name"]: knob for knob in knobs_of(find("longheads"))}
    expected = {"name": "share", "help": "", "default": "group", "choices": ["head", "group", "layer"], "words": []}
    assert knobs["share"] | {"help": ""} == expected
    assert [knobs[name]["choices"] for name in ("chunk_size", "keep_first")] == [None, ["true", "false"]]
    (group,) = (knob for knob in knobs_of(find("self_extend")) if knob["name"] == "group")
    assert (group["choices"], group["words"], group["default"]) == (None, ["auto"], 8)
    (growth,) = (knob for knob in knobs_of(find("pages")) if knob["name"] == "budget.growth")
    assert (growth["choices"], growth["default"]) == (["sqrt", "linear"], None)
    auto = {"group": "auto"}
    assert requested({"prompt": "x", "method": "self_extend", "knobs": auto})[1] == make("self_extend", auto)
    assert "maps" not in {knob["name"] for knob in knobs_of(find("esa"))}
    for each in about["methods"]:
        plain = {knob["name"]: knob["default"] for knob in each["knobs"]}
        texts = {name: str(value) for name, value in plain.items() if value is not None}  # as the page sends knobs
        _, method = requested({"prompt": "x", "method": each["name"], "knobs": texts})
        assert method == make(each["name"])
