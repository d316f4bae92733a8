"""What --json and --quiet let through; progress bars: drawn on a terminal, silent elsewhere, and never left behind."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator

import pytest

from lce.engine.decode import Generation, Piece
from lce.engine.stream import Stream
from lce.terminal.output import Output


def pieces(n: int, *, broken: bool = False) -> Stream:
    def drawn() -> Iterator[Piece]:
        for number in range(n):
            yield Piece(f"{number} ")
        if broken:
            raise KeyboardInterrupt

    return Stream(drawn(), Generation())


@pytest.mark.parametrize(
    ("output", "out", "err"),
    [
        (Output(), "a\nb\n0 1 \n", "figures\n"),
        (Output(quiet=True), "a\nb\n0 1 \n", ""),
        (Output(json=True), '{"a": 1}\n', "figures\n"),
        (Output(json=True, quiet=True), '{"a": 1}\n', ""),
    ],
)
def test_what_goes_where(output: Output, out: str, err: str, capsys: pytest.CaptureFixture[str]) -> None:
    output.object({"a": 1})
    output.text("a", "b")
    output.text()
    output.generation(pieces(2))
    output.figures("figures")
    assert capsys.readouterr() == (out, err)


def test_json_is_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    content = {"text": "é\n😀", "none": None, "list": [1, 2.5]}
    Output(json=True).object(content)
    assert json.loads(capsys.readouterr().out) == content


def test_an_interrupted_text_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        Output().generation(pieces(2, broken=True))
    assert capsys.readouterr().out == "0 1 \n"
    with pytest.raises(KeyboardInterrupt):
        Output().generation(pieces(0, broken=True))
    assert capsys.readouterr().out == ""


def test_json_runs_the_generation_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    stream = pieces(3)
    Output(json=True).generation(stream)
    assert list(stream) == []
    assert capsys.readouterr().out == ""


class Screen(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def on_screen(patch: pytest.MonkeyPatch) -> Screen:
    """Called in a test and not as a fixture: pytest sets stderr again after its fixtures."""
    screen = Screen()
    patch.setattr(sys, "stderr", screen)
    return screen


def test_a_bar_shows_what_is_done_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    with Output().bar("prefill", " tok") as advance:
        advance(0, 100)
        time.sleep(0.15)  # a bar is drawn ten times a second at most
        advance(60, 100)
        advance(100, 100)
    assert "prefill:  60%" in screen.getvalue()
    assert "60/100" in screen.getvalue()
    assert screen.getvalue().rpartition("\r")[2].strip() == ""


def test_a_bar_goes_away_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)

    def interrupted() -> None:
        with Output().bar("prefill", " tok") as advance:
            advance(1, 100)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert screen.getvalue().endswith("\r")


def test_one_bar_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    with Output().bars() as advance_stage:
        advance_stage("read", 1, 2)
        advance_stage("read", 2, 2)
        advance_stage("learn", 1, 3)
    assert screen.getvalue().index("read") < screen.getvalue().index("learn")
    assert screen.getvalue().endswith("\r")


def test_a_hidden_bar_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    output = Output(quiet=True)
    with output.bar("prefill", " tok") as advance, output.bars() as advance_stage:
        advance(5, 10)
        advance_stage("read", 5, 10)
    assert screen.getvalue() == ""


def test_nothing_is_written_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Output().bar("prefill", " tok") as advance, Output().bars() as advance_stage:
        advance(5, 10)
        advance_stage("read", 5, 10)
    assert capsys.readouterr().err == ""
