"""A record of answers: what is asked once is not asked again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lce
from lce.errors import DataError
from lce.eval.passkey import evaluate
from lce.eval.record import Record
from tests.command import assert_error, run


def test_an_interrupted_evaluation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, file = lce.load("demo"), tmp_path / "answers"
    whole = evaluate(engine, length=200, n=6)

    def interrupt(done: int, n: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(engine, length=200, n=6, record=Record(file), progress=interrupt)
    file.write_bytes(file.read_bytes()[:-9])  # the fourth answer was cut short
    asked = []
    generate = type(engine).generate
    monkeypatch.setattr(
        type(engine), "generate", lambda self, prompt, **kw: asked.append(prompt) or generate(self, prompt, **kw)
    )
    assert evaluate(engine, length=200, n=6, record=Record(file)) == whole
    assert len(asked) == 3
    assert evaluate(engine, length=200, n=6, record=Record(file)) == whole
    assert len(asked) == 3
    assert len(file.read_text().splitlines()) == 6
    for other in ({"seed": 1}, {"n": 5}, {"length": 201}, {"filler": "noise"}):
        evaluate(engine, **{"length": 200, "n": 6, "record": Record(file)} | other)
    assert len(asked) == 3 + 6 + 5 + 6 + 6
    evaluate(lce.load("demo", method="streaming"), length=200, n=6, record=Record(file))
    assert len(asked) == 3 + 6 + 5 + 6 + 6 + 6


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    file.write_text("some text\n")
    with pytest.raises(
        DataError, match="no record of answers: line 1 is 'some text'; correct the line, or name another"
    ):
        Record(file)
    file.write_text(json.dumps({"right": "yes"}) + "\n")
    with pytest.raises(DataError, match="no record"):
        Record(file)
    with pytest.raises(DataError, match="cannot read"):
        Record(tmp_path)
    with pytest.raises(DataError, match="cannot write"):
        Record(tmp_path / "none" / "answers").add({}, True)


def test_the_command_takes_one(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    args = ("eval", "passkey", "--model", "demo", "--lengths", "100", "--samples", "2", "--record", file)
    first, second = run(*args), run(*args)
    assert (first.exit_code, first.stdout) == (0, second.stdout)
    assert len(file.read_text().splitlines()) == 2
    file.write_text("{}\n")
    assert_error(run(*args, "--json"), 3, "no record of answers")
