"""How a command ends: exit codes, one line of error, and Ctrl-C at any time."""

import errno
import os
from pathlib import Path

import pytest

import lce
from lce.errors import LceError
from tests.command import PROMPT, assert_error, run, spawn


@pytest.mark.parametrize("position", ["before", "after"])
def test_debug_shows_the_traceback(position: str, tmp_path: Path) -> None:
    args = ["generate", "--model", "none", "-f", str(tmp_path)]
    result = run("--debug", *args) if position == "before" else run(*args, "--debug")
    assert result.exit_code == 3
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("lce: error: ")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (LceError("so\nand so"), 1, "so and so"),
        (MemoryError(), 4, "not enough memory"),
        (RuntimeError("[..] DefaultCPUAllocator: can't allocate memory\nframe #0"), 4, "can't allocate memory"),
        (OSError(errno.ENOSPC, "No space left on device"), 4, "No space left"),
        (PermissionError(errno.EACCES, "Permission denied", "weights"), 1, "Permission denied: weights"),
        (RuntimeError("shapes\nframe #0"), 1, "internal error: RuntimeError: shapes; run with --debug"),
    ],
)
def test_every_failure_has_its_exit_code(
    error: Exception, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(lce, "load", fail)
    assert_error(run("generate", "--model", "none", "--prompt", PROMPT), code, words)
    error.__context__ = KeyboardInterrupt()  # compiled modules that are interrupted raise an ImportError
    result = run("generate", "--model", "none", "--prompt", PROMPT)
    assert (result.exit_code, result.stderr) == (130, "\nlce: interrupted\n")


READING = """
import time
from lce.methods import Driver
def begin(*_): os.kill(os.getpid(), signal.SIGINT); time.sleep(0.01)
Driver.begin = begin
"""
WRITING = """
from lce.engine import answer
push, pushed = answer.StopWatch.push, []
def push_or_stop(self, text):
    if len(pushed) == 2: os.kill(os.getpid(), signal.SIGINT)
    pushed.append(text)
    return push(self, 'ab')
answer.StopWatch.push = push_or_stop
"""
IMPORTING = """
class Hook:
    def find_spec(self, name, *_):
        if name == 'torch': os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Hook())
"""
FINALISER = """
import lce, time
class Last:  # Python can only print an exception in __del__
    def __del__(self): os.kill(os.getpid(), signal.SIGINT); time.sleep(0.01)
def load(*_, **__): Last(); time.sleep(60)
lce.load = load
"""


@pytest.mark.parametrize(
    ("script", "written"),
    [(READING, ""), (WRITING, "abab\n"), (IMPORTING, ""), (FINALISER, "")],
    ids=["reading", "writing", "importing", "del"],
)
def test_ctrl_c_at_any_time_is_one_line(script: str, written: str, tiny_model: Path) -> None:
    process = spawn(script, "generate", "--model", tiny_model, "--prompt", PROMPT)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, written, "\nlce: interrupted\n")


def test_a_closed_pipe_is_no_error(tiny_model: Path) -> None:
    read_end, write_end = os.pipe()
    process = spawn("", "generate", "--model", tiny_model, "--prompt", PROMPT, stdout=write_end)
    os.close(write_end)
    os.close(read_end)
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")
