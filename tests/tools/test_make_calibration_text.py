"""The calibration text: facts with their answers, of about the asked length."""

import sys
from pathlib import Path

import pytest

import lce
from tools import make_calibration_text


def test_a_text_of_about_so_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for name in ("one", "two"):
        monkeypatch.setattr(sys, "argv", ["tool", "--out", str(tmp_path / name), "--tokens", "1500"])
        make_calibration_text.main()
        made.append((tmp_path / name).read_text(encoding="utf-8"))
    assert made[0] == made[1]
    assert 1500 <= len(lce.load("demo").tokenizer.encode(made[0])) < 2100
    assert all(line.endswith(".") for line in made[0].splitlines())
