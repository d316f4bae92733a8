"""The standard questions, and the folder of a leaderboard."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lce
from lce.errors import LceError
from lce_lab.board.questions import TASK, StandardSuite, record_of, records, rounds
from tests.lce_lab.eval.test_report import file, line

PRINT = "0123456789abcdef"


def test_a_record_has_a_safe_name_of_its_own(tmp_path: Path) -> None:
    safe = {"demo": "demo", "ORG/NAME@rev:FILE.gguf": "NAME-rev-FILE.gguf", "x/.hidden": "hidden", "n" * 300: "n" * 80}
    odd = dict.fromkeys(("a/../..", "/", "é" * 300), "model") | {"x/-rf \n$(y)": "rf-y"}
    for model, name in (safe | odd).items():
        assert record_of(tmp_path / "new", model, PRINT) == tmp_path / "new" / f"{name}-01234567.jsonl"
    file(tmp_path / "new" / "first-01234567.jsonl", line(0))
    assert record_of(tmp_path / "new", "other/path", PRINT).name == "first-01234567.jsonl", "the same model"


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    assert records(tmp_path / "made") == []
    (tmp_path / "made" / ".hidden").touch()
    assert records(tmp_path / "made") == []
    (tmp_path / "made" / "thesis.tex").touch()
    with pytest.raises(LceError, match=r"holds thesis.tex and no record, \*.jsonl; name a new folder"):
        records(tmp_path / "made")
    good = file(tmp_path / "made" / "good.jsonl", line(0))
    assert records(tmp_path / "made") == [good], "a page may stand beside records"
    (tmp_path / "made" / "bad.jsonl").write_text("[]\n")
    with pytest.raises(LceError, match=r"bad\.jsonl is no record"):
        records(tmp_path / "made")
    with pytest.raises(LceError, match="is no folder for records"):
        records(good)


def test_the_usual_lengths_leave_out_one_that_is_too_short() -> None:
    engine, suite = lce.load("demo"), StandardSuite()
    assert suite.usual_lengths(engine) == [480, 1024, 2048]
    assert (suite.ceiling_lengths(engine, TASK, [100, 9999]), suite.setting(TASK, 480)["questions"]) == ([480], 40)


def test_scaling_without_a_factor_fits_each_length_beyond_the_window() -> None:
    engine: Any = SimpleNamespace(window=512, setup=SimpleNamespace(rope=SimpleNamespace(kind="none")))
    how = {"rope": "yarn", "rope_factor": None, "dtype": "float32"}
    assert rounds(engine, how, [480, 1024, 2048]) == [
        ({**how, "rope_factor": 2.0}, [1024]),
        ({**how, "rope_factor": 4.0}, [2048]),
    ]
    for same in ({**how, "rope_factor": 3.0}, {**how, "rope": None}, {**how, "rope": "none"}):
        assert rounds(engine, same, [480, 1024]) == [(same, [480, 1024])]
    with pytest.raises(LceError, match=r"--rope yarn stretches the window, 512 tokens, and no length is beyond it"):
        rounds(engine, how, [480, 512])
