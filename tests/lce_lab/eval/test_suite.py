"""Suites: tasks with knobs, what a record calls their samples, and ceilings within the window."""

import json
from pathlib import Path

import pytest

import lce
from lce_lab.eval.record import Record
from lce_lab.eval.running import Asking, Shard
from lce_lab.eval.suite import MadeSuite, make_tasks
from lce_lab.eval.tasks import TASKS


def test_a_knob_is_for_all_tasks_or_for_one() -> None:
    several, values = make_tasks(["several_keys", "several_values"], {"keys": "3", "several_values.values": 2})
    assert (several, values) == (TASKS["several_keys"](keys=3), TASKS["several_values"](values=2))  # type: ignore[call-arg]
    assert len(make_tasks(["passkey", "all"])) == len(TASKS)
    for names, knobs, message in (
        (["varables"], {}, "did you mean 'variables'"),
        (["variables"], {"hop": "3"}, "no task has the knob 'hop'"),
        (["variables"], {"variables.hps": "3"}, "did you mean 'variables.hops'"),
        (["variables"], {"hops": "x"}, "expected a whole number above 0"),
        (["variables"], {"hops": "0"}, "hops is '0'"),
    ):
        with pytest.raises(lce.UsageError, match=message):
            make_tasks(names, knobs)


def test_what_is_as_usual_is_not_in_a_setting() -> None:
    """So a record stays valid when something new can be set."""
    usual = {"task": "passkey", "filler": "prose", "length": 100, "samples": 20, "seed": 0}
    assert MadeSuite().setting(TASKS["passkey"](), 100) == usual
    suite = MadeSuite(samples=2, filler="essays:/some/where", depths=(0.0, 1.0), asking=Asking("turns"))
    changed = {"task": "variables", "filler": "essays", "samples": 2, "questions": 4}
    changed |= {"task_knobs": {"hops": 3}, "depths": [0.0, 1.0]}
    assert suite.setting(make_tasks(["variables"], {"hops": "3"})[0], 100) == {**usual, **changed}
    assert MadeSuite(filler="noise").setting(TASKS["pairs"](), 100)["filler"] == "none"


@pytest.mark.parametrize("mode", ["single", "turns"])
def test_a_ceiling_stays_within_the_window(mode: str, tmp_path: Path) -> None:
    engine = lce.load("demo", window=300)
    suite, task = MadeSuite(samples=2, asking=Asking(mode), questions=2), TASKS["several_keys"]()
    own, length = suite.ceiling_lengths(engine, task, [4000, 100])
    assert (own, 230 < length < 300) == (100, True)
    record = Record(tmp_path / "record")
    suite.evaluate(engine, task, length, record=record, about={"ceiling": True})
    ends = []
    for line in map(json.loads, record.path.read_text().splitlines()):
        assert line["ceiling"] is True
        ends.append(line["prompt_tokens"] + len(engine.tokenizer.encode(line["answer"], bos=False)))
    assert max(ends) <= 300
    assert suite.ceiling_lengths(engine, task, [200, 220]) == [200, 220], "none larger than what is asked"


def test_what_cannot_be_a_suite_is_refused() -> None:
    for changed, message in (
        ({"depths": (1.5,)}, "from 0 to 1"),
        ({"asking": Asking(shard=Shard(2, 3)), "samples": 2}, "none for shard 2/3"),
    ):
        with pytest.raises(lce.UsageError, match=message):
            MadeSuite(**changed)  # type: ignore[arg-type]


def test_knobs_that_are_too_large_are_refused_and_do_not_hang(tiny_model: Path) -> None:
    engine = lce.load(tiny_model)
    large = {"several_keys": "keys", "nth_request": "same", "several_values": "values", "split_passkey": "parts"}
    for name, knob in large.items():
        with pytest.raises(lce.UsageError, match=r"cannot be made: .*; take smaller knobs"):
            MadeSuite(samples=2).make(engine, make_tasks([name], {knob: "9999"})[0], 9000)
    exponents = [("frequent_words", "exponent", value) for value in ("nan", "inf")]
    for name, knob, value in (("whereabouts", "events", "1" * 9), ("common_words", "ratio", "9" * 400), *exponents):
        with pytest.raises(lce.UsageError, match="above 0, and at most 10,000"):
            make_tasks([name], {knob: value})
    with pytest.raises(lce.UsageError, match="passkey take none"):
        make_tasks(["passkey"], {"keys": "3"})
