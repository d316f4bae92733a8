"""The pictures of the docs: each is shown and has its command; one of choices shows what was chosen."""

import re
import sys
from pathlib import Path

import click
import pytest

import lce
from lce.cli import cli
from lce_lab.analysis.oracle import selects
from tests.docs.scripts import DOCS, load

PAGE = (DOCS / "methods.md").read_text(encoding="utf-8")
COMMANDS = load("pictures/draw.py").commands(PAGE)


def test_every_picture_has_its_command() -> None:
    drawn = [command[-1].removeprefix("docs/") for command in COMMANDS]
    assert drawn == re.findall(r"\]\((pictures/[\w.]+)\)", PAGE)
    assert {f"pictures/{path.name}" for path in (DOCS / "pictures").glob("*.png")} >= set(drawn)
    for program, *args in COMMANDS:
        assert program in {"lce", "python"}
        if program == "lce":
            command = cli.get_command(click.Context(cli), args[0])
            assert command is not None
            with command.make_context(args[0], args[1:]):  # its options are those of the command
                pass
        else:
            assert args[0] == "docs/pictures/choices.py"
            lce.methods.find(args[1])


def test_every_selecting_method_has_a_picture_of_a_models_choices() -> None:
    drawn = {command[2] for command in COMMANDS if command[0] == "python"}
    own = [name for name in lce.methods.available() if lce.methods.find(name).__module__.startswith("lce")]
    assert drawn == {name for name in own if selects(lce.methods.make(name))}


def test_draws_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "x.png"
    argv = ["choices.py", "longheads", "--length", "300", "-o", "chunk_size=16", "-o", "chunks=4", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    load("pictures/choices.py").main()
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "LongHeads(chunk_size=16, chunks=4" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["choices.py", "full", "--length", "60", "--out", str(out)])
    with pytest.raises(SystemExit):
        load("pictures/choices.py").main()
    assert "full chooses nothing" in capsys.readouterr().err
