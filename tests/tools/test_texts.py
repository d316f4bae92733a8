"""The texts that tools write: the example's haystack, and facts with their answers to calibrate on."""

import sys
from pathlib import Path

import pytest

import lce
from tools import make_calibration_text, make_haystack

HAYSTACK = (Path(__file__).parents[2] / "examples" / "haystack.txt").read_text(encoding="utf-8")


def test_a_text_of_about_so_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for name in ("one", "two"):
        monkeypatch.setattr(sys, "argv", ["tool", "--out", str(tmp_path / name), "--tokens", "1500"])
        make_calibration_text.main()
        made.append((tmp_path / name).read_text(encoding="utf-8"))
    assert made[0] == made[1]
    assert 1500 <= len(lce.load("demo").tokenizer.encode(made[0])) < 2100
    assert all(line.endswith(".") for line in made[0].splitlines())


def test_the_shipped_haystack_is_the_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    make_haystack.main()
    assert (tmp_path / "examples" / "haystack.txt").read_text(encoding="utf-8") == HAYSTACK
    n_tokens, key = (int(word) for word in capsys.readouterr().out.replace(";", "").split() if word.isdecimal())
    assert 31_000 < n_tokens <= 32_000
    assert str(key) in HAYSTACK
