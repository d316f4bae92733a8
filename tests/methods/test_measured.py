"""Kept measurements: what is told apart, what `auto` makes of them, and files that are damaged."""

import json
from pathlib import Path

import pytest

import lce
from lce.methods import measured
from lce.methods.auto import choice_for
from lce.methods.choices import Choice
from lce.methods.measured import MOST_BYTES, MOST_KEPT, Measurement, Trial, keep, measurements, told_apart
from lce.weights.checkpoint import Checkpoint
from tests.advising import advised, asked

W = 64
DCA, REROPE = Choice("dca"), Choice("rerope")
YARN, SMALLER = Choice("full", rope="yarn"), Choice("self_extend", window=48)


@pytest.fixture(autouse=True)
def _kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "cache_home", lambda: tmp_path / "cache")


def trial(choice: Choice, right: int, of: int = 16, read_bytes: float = 100.0) -> Trial:
    return Trial(choice, [1.0] * right + [0.0] * (of - right), read_bytes)


def kept(model: Path, *trials: Trial, length: int = 2 * W, window: int = W, day: str = "2026-01-31") -> Path:
    """Keep a measurement of a model; return the file."""
    fingerprint = lce.info(model).fingerprint  # type: ignore[union-attr]
    path = keep(str(fingerprint), Measurement(length, window, day, {"task": "several_facts"}, trials))
    assert path is not None
    return path


def test_what_is_told_apart() -> None:
    """By a sign test: of six questions that only one of two methods finds, all six must be one method's."""
    assert told_apart([1.0] * 6 + [0.0] * 9, [0.0] * 15)
    assert not told_apart([1.0] * 5 + [0.0] * 9, [0.0] * 14)
    assert not told_apart([1.0] * 6 + [0.0], [0.0] * 6 + [1.0])
    assert not told_apart([1.0, 0.0], [1.0, 0.0])


def test_what_was_kept_is_read(tiny_model: Path) -> None:
    file = kept(tiny_model, trial(DCA, 9), trial(YARN, 7), trial(SMALLER, 5))
    (found,) = measurements(lambda: file.stem)
    assert found == Measurement(128, W, "2026-01-31", {"task": "several_facts"}, found.trials)
    assert list(found.trials) == [trial(DCA, 9), trial(YARN, 7), trial(SMALLER, 5)]
    kept(tiny_model, trial(DCA, 3))
    assert [each.trials for each in measurements(lambda: file.stem)] == [[trial(DCA, 3)]], (
        "the same length, measured again"
    )
    for length in range(200, 220):
        kept(tiny_model, trial(DCA, 3), length=length)
    assert [each.length for each in measurements(lambda: file.stem)] == [*range(220 - MOST_KEPT, 220)]


def test_auto_takes_what_was_measured_better(tiny_model: Path) -> None:
    assert advised(2 * W, tiny_model).method == "self_extend"
    kept(tiny_model, trial(YARN, 16), trial(DCA, 15, read_bytes=50.0), trial(Choice("self_extend"), 1))
    found = advised(2 * W, tiny_model)
    assert found == DCA, "of those alike, what reads least"
    assert found.reason == "measured on this model on 2026-01-31, where it found 15 of 16 facts in 128 tokens"
    assert advised(W, tiny_model).method == "full", "within the window nothing was measured"
    assert advised(3 * W, tiny_model) == DCA
    assert lce.load(tiny_model, "auto", length=2 * W).method.name == "dca"
    plan = lce.plan(tiny_model, tokens=2 * W)
    assert plan.auto == DCA
    assert "which takes dca for this length" in str(plan.warning)


def test_far_from_what_was_measured_only_the_worse_is_left(tiny_model: Path) -> None:
    """At four windows `auto` would be `self_extend`, which is worse at two; beyond six it is `pages`."""

    def names() -> list[str]:
        return [advised(length, tiny_model).method for length in (90, 2 * W, 4 * W, 7 * W)]

    kept(tiny_model, trial(DCA, 16), trial(Choice("self_extend"), 1))
    assert names() == ["dca", "dca", "dca", "pages"]
    assert "in 128 tokens" in advised(4 * W, tiny_model).reason
    kept(tiny_model, trial(DCA, 16), trial(REROPE, 15), trial(Choice("self_extend"), 14), trial(Choice("pages"), 13))
    assert names() == ["rerope", "self_extend", "self_extend", "pages"]
    kept(tiny_model, trial(REROPE, 16), trial(Choice("pages"), 1))
    assert names() == ["rerope", "rerope", "self_extend", "rerope"]
    kept(tiny_model, trial(Choice("self_extend"), 16), trial(Choice("pages"), 1))
    assert advised(395, tiny_model).method == "self_extend", "just beyond six windows"
    assert advised(20 * W, tiny_model).method == "pages", "which self_extend does not read"


def test_what_a_user_named_rules_out(tiny_model: Path) -> None:
    kept(tiny_model, trial(YARN, 16), trial(SMALLER, 16, read_bytes=10.0), trial(Choice("self_extend"), 1))
    assert advised(2 * W, tiny_model) == SMALLER
    engine = lce.load(tiny_model, "auto", length=2 * W)
    assert (engine.method.name, engine.window, engine.setup.choice(2 * W)) == ("self_extend", 48, SMALLER)
    assert advised(2 * W, tiny_model, window=50) == Choice("self_extend"), "it was measured with another window"
    assert advised(200, tiny_model, rope="linear", rope_factor=2).method == "self_extend"
    assert advised(2 * W, tiny_model, window=W) == YARN


DAMAGED = {
    "no JSON": "{",
    "a list": "[]",
    "no measurements": "{}",
    "a number": '{"measurements": 5}',
    "texts": '{"measurements": ["x"]}',
    "too large": " " * (MOST_BYTES + 1),
}
METHOD = {"method": "dca", "knobs": {}, "rope": None, "window": None}
VALID = {"choice": METHOD, "values": [1.0, 0.0], "read_bytes": 9.0}
WRONG: tuple[dict[str, object], ...] = (
    *({"choice": METHOD | each} for each in (
        {"method": "rm"}, {"method": 5}, {"method": []}, {"knobs": []}, {"knobs": {"x": 1}}, {"rope": "x"},
        {"window": -1}, {"window": 0}, {"window": "x"}, {"window": 10**400},
    )),
    {"choice": 5}, {"values": []}, {"values": [2.0]}, {"values": ["x"]}, {"values": None}, {"values": [10**400]},
    {"read_bytes": float("nan")}, {"read_bytes": -1}, {"read_bytes": 10**400},
)  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_ignored_and_said(tiny_model: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    file = kept(tiny_model, trial(DCA, 16), trial(Choice("self_extend"), 1))
    file.write_text(text)
    assert advised(2 * W, tiny_model).method == "self_extend"
    said = capsys.readouterr().err
    assert said == f"lce: {file} is damaged, and ignored: `lce recommend` writes it anew\n"
    advised(2 * W, tiny_model)
    assert capsys.readouterr().err == "", "once"
    kept(tiny_model, trial(DCA, 16), trial(Choice("self_extend"), 1))
    assert advised(2 * W, tiny_model) == DCA


@pytest.mark.parametrize(
    "wrong", [*WRONG, *({"top": each} for each in ("length", "window", "day", "settings"))], ids=str
)
def test_values_are_checked(tiny_model: Path, capsys: pytest.CaptureFixture[str], wrong: dict[str, object]) -> None:
    file = kept(tiny_model, trial(DCA, 16))
    content = json.loads(file.read_text())
    (one,) = content["measurements"]
    if "top" in wrong:
        one[str(wrong["top"])] = "x"
    else:
        one["trials"] = [{**VALID, **wrong}]
    file.write_text(json.dumps(content))
    assert measurements(lambda: file.stem) == ()
    assert "is damaged" in capsys.readouterr().err


def test_without_measurements_no_weights_are_read(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = asked(tiny_model)
    monkeypatch.setattr(Checkpoint, "fingerprint", None)
    assert choice_for(2 * W, model).method == "self_extend"
