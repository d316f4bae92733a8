"""The pictures of the docs: each is shown and has its command; one of choices shows what was chosen."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lce
from lce.cli import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "pictures" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = (DOCS / "methods.md").read_text(encoding="utf-8")
COMMANDS = load("draw").commands(PAGE)


def test_every_picture_has_its_command() -> None:
    drawn = [command[-1].removeprefix("docs/") for command in COMMANDS]
    assert drawn == re.findall(r"\]\((pictures/[\w.]+)\)", PAGE)
    assert {f"pictures/{path.name}" for path in (DOCS / "pictures").glob("*.png")} >= set(drawn)
    for program, *args in COMMANDS:
        assert program in {"lce", "python"}
        if program == "lce":
            with cli.commands[args[0]].make_context(args[0], args[1:]):  # its options are those of the command
                pass
        else:
            assert args[0] == "docs/pictures/choices.py"
            lce.methods.find(args[1])


def test_every_selecting_method_has_a_picture_of_a_models_choices() -> None:
    drawn = {command[2] for command in COMMANDS if command[0] == "python"}
    own = [name for name in lce.methods.available() if lce.methods.find(name).__module__.startswith("lce.")]
    assert drawn == {name for name in own if lce.methods.selects(lce.methods.make(name))}


def trace(chosen: list[list[int]], ranks: list[list[int]], chunk_size: int, first: int) -> lce.Trace:
    return lce.Trace(chunk_size, [torch.tensor([chosen])], first, [], [torch.tensor([ranks])])


def test_shares_are_of_the_tokens_chosen() -> None:
    choices = load("choices")
    found = choices.shares(trace([[-1, -1], [0, -1], [0, 2]], [], 2, 1), 0, n_tokens=7, size=4)
    assert found.tolist() == [[[0, 0], [0.5, 0], [0.5, 0.5]]]  # tokens 1, 2 and then 5, 6 too, in bins of 4


def test_the_best_head_is_the_one_that_ranks_the_fact_highest() -> None:
    choices = load("choices")
    one = trace([[-1, -1], [0, 3]], [[-1, -1], [1, 0]], 4, 2)  # the last query chose tokens 2..5 and 14..17
    assert choices.best_head(one, range(13, 15)) == (0, 0, 0)
    assert choices.best_head(one, range(5, 9)) == (0, 0, 1)
    assert choices.best_head(one, range(6, 14)) is None


def test_draws_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "x.png"
    argv = ["choices.py", "longheads", "--length", "300", "-o", "chunk_size=16", "-o", "chunks=4", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    load("choices").main()
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "LongHeads(chunk_size=16, chunks=4" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["choices.py", "full", "--length", "60", "--out", str(out)])
    with pytest.raises(SystemExit):
        load("choices").main()
    assert "full chooses nothing" in capsys.readouterr().err
