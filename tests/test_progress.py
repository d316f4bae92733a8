"""Progress: a callback as it is, or a bar on stderr."""

import fcntl
import logging
import os
import re
import select
import struct
import sys
import termios
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lce
from lce.errors import UsageError, WindowWarning
from lce.progress import StepNotices, check_progress, notice, reported, silenced
from lce.terminal.output import Output
from tests.checkpoints import tokens
from tests.command import run


@pytest.mark.parametrize("call", ["generate", "stream", "prefill", "prefill_file"])
def test_true_draws_a_bar(tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], call: str) -> None:
    engine = lce.load(tiny_model, "longheads", block=32)
    path = (tmp_path / "c.lce",) if call == "prefill_file" else ()
    made: Any = getattr(engine, call)(tokens(100), *path, progress=True)
    if call == "stream":
        made.finish()
    out, err = capfd.readouterr()
    assert out == ""
    assert "prefill" in err
    assert "100" in err
    getattr(engine, call)(tokens(100), *[tmp_path / "d.lce" for _ in path], progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_callback_is_called_as_it_is() -> None:
    told: list[tuple[int, int]] = []
    with reported(lambda done, total: told.append((done, total)), "x") as progress:
        progress(1, 2)
    for nothing in (None, False):
        with reported(nothing, "x") as progress:
            progress(2, 2)
    assert told == [(1, 2)]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Callable[[int], None], Callable[[], str]]]:
    """Make stderr a terminal. Yield a function that sets its width, and one that returns what was written since.

    No fixture: pytest sets stderr after those.
    """
    ours, theirs = os.openpty()

    def resize(columns: int) -> None:
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read() -> str:
        data = b""
        while select.select([ours], [], [], 0.1)[0]:
            data += os.read(ours, 1 << 16)
        return data.decode()

    with open(theirs, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        patch.setenv("TERM", "xterm")
        resize(80)
        yield resize, read
    os.close(ours)


def test_a_bar_is_one_line_after_a_resize(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each drawing begins and ends at the line's beginning, erases what is below, and fits the width."""
    with terminal(monkeypatch) as (resize, written), reported(True, "prefill") as progress:
        for step, columns in enumerate((80, 30, 100, 50)):
            resize(columns)
            progress(step + 1, 10)
            drawn = written().split("\r\x1b[J")
            assert drawn[0] == ""
            for each in drawn[2 if step == 0 else 1 :]:
                assert each.endswith("\r")
                assert len(each.rstrip("\r")) <= columns
                assert f"{step + 1}/10" in each


@pytest.mark.parametrize("say", [notice, Output().figures, lambda text: warnings.warn(text, WindowWarning, 2)])
def test_what_is_said_beside_a_bar_has_a_line(monkeypatch: pytest.MonkeyPatch, say: Callable[[str], None]) -> None:
    with terminal(monkeypatch) as (_, written), reported(True, "prefill"), Output().noting():
        say("compiling")
        line, below = written().split("\n")
    assert re.search("\\r\x1b\\[J\\r*(lce: |lce: note: )?compiling\r$", line), "the bar was cleared first"
    assert below.startswith("\r\x1b[Jprefill: 0 tok"), "and is drawn again"


def test_long_steps_say_so_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("lce.progress.STEPS_S", 1.0)
    steps = StepNotices("compiling kernels")
    for seconds in (0.6, 0.6, 0.0):
        steps.begin("compiling")
        time.sleep(seconds)
        steps.end()
    assert re.fullmatch("lce: compiling\nlce: compiling kernels: 2 done in [1-9] s\n", capsys.readouterr().err)


@pytest.mark.parametrize("value", [3, "x", [], int, object()])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"progress is .*; expected True, or a function"):
        check_progress(value)


def test_notices_are_silenced(capsys: pytest.CaptureFixture[str]) -> None:
    with silenced():
        with silenced():
            notice("twice")
        notice("once")
    notice("told")
    assert capsys.readouterr().err == "lce: told\n"


def test_a_quiet_command_silences_no_notice_after_it(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ("generate", "--model", tiny_model, "--method", "auto", "-n", "2")
    assert "method auto" in run(*line, "Hello").stderr
    for text in ("Hello", ""):  # an answer, and an error
        assert "method auto" not in run(*line, "--quiet", "--prompt", text).stderr
    assert "method auto" in run(*line, "Hello").stderr
    lce.load(tiny_model, "auto")
    assert "method auto" in capsys.readouterr().err


def test_notices_go_to_a_programs_own_logging(capfd: pytest.CaptureFixture[str]) -> None:
    log, lines = logging.getLogger("lce"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        notice("one")  # nothing is logged below warnings unless a program says so
        log.setLevel(logging.INFO)
        notice("two")
        log.setLevel(logging.WARNING)
        notice("three")
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    assert (lines, capfd.readouterr().err) == (["two"], "lce: one\n")
