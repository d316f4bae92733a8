"""Progress bars: drawn on a terminal, silent elsewhere, and never left behind."""

from __future__ import annotations

import io
import sys
import time

import pytest

from lce.terminal.progress import bar, bars


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
    with bar("prefill", " tok") as advance:
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
        with bar("prefill", " tok") as advance:
            advance(1, 100)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert screen.getvalue().endswith("\r")


def test_one_bar_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    with bars() as advance_stage:
        advance_stage("read", 1, 2)
        advance_stage("read", 2, 2)
        advance_stage("learn", 1, 3)
    assert screen.getvalue().index("read") < screen.getvalue().index("learn")
    assert screen.getvalue().endswith("\r")


def test_a_hidden_bar_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_screen(monkeypatch)
    with bar("prefill", " tok", shown=False) as advance, bars(shown=False) as advance_stage:
        advance(5, 10)
        advance_stage("read", 5, 10)
    assert screen.getvalue() == ""


def test_nothing_is_written_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("prefill", " tok") as advance, bars() as advance_stage:
        advance(5, 10)
        advance_stage("read", 5, 10)
    assert capsys.readouterr().err == ""
