"""How a command ends: exit codes, one line of error, and Ctrl-C at any time."""

import errno
import os
from importlib.metadata import EntryPoint
from pathlib import Path
from unittest.mock import Mock

import click
import pytest

import lce
from lce.errors import LceError, UsageError
from lce.plugins import plugins
from lce.terminal.exits import GROUP, load
from tests.command import PROMPT, assert_error, run, spawn


@pytest.mark.parametrize("position", ["before", "after"])
def test_debug_shows_the_traceback(position: str, tmp_path: Path) -> None:
    args = ["generate", "--model", "none", "-f", str(tmp_path)]
    result = run("--debug", *args) if position == "before" else run(*args, "--debug")
    assert result.exit_code == 3
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("lce: error: ")


COMPUTING = """
from lce.models.layers import Layer
project = Layer.project
Layer.project = lambda self, name, x, **how: project(self, name, x + 0, **how)
"""


def test_debug_says_once_why_a_step_is_not_recorded(tiny_model: Path) -> None:
    process = spawn(COMPUTING, "generate", "--model", tiny_model, "--prompt", PROMPT, "-n", "4", "--debug")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert err.count("lce: steps are not recorded: aten.add.Tensor computes between kernels\n") == 1


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
def test_a_failure_has_its_exit_code(error: Exception, code: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lce, "load", Mock(side_effect=error))
    assert_error(run("generate", "--model", "none", "--prompt", PROMPT), code, words)
    error.__context__ = KeyboardInterrupt()  # compiled modules that are interrupted raise an ImportError
    result = run("generate", "--model", "none", "--prompt", PROMPT)
    assert (result.exit_code, result.stderr) == (130, "\nlce: interrupted\n")


READING = """
import time
from lce.methods import Driver
def begin(*_, **__): os.kill(os.getpid(), signal.SIGINT); time.sleep(0.01)
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
def load(*_, **__):
    Last()
    for _ in range(600): time.sleep(0.1)
lce.load = load
"""


@pytest.mark.parametrize(
    ("script", "written"),
    [
        pytest.param(READING, "", marks=pytest.mark.slow),
        (WRITING, "abab\n"),
        (IMPORTING, ""),
        pytest.param(FINALISER, "", marks=pytest.mark.slow),
    ],
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


NO_SPACE = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))"
NO_MEMORY = "from lce import system\nsystem.free_host_memory = lambda: 100 << 20"
NO_THREADS = """
import threading
from lce import system
def start(thread): raise RuntimeError("can't start new thread")
threading.Thread.start = start
system.usable_cores = lambda: 2
"""


@pytest.mark.parametrize(
    ("before", "args", "code", "words"),
    [
        ("os.environ['NUMBA_NUM_THREADS'] = '0'", (), 2, "NUMBA_NUM_THREADS is '0'; expected a number of threads"),
        ("os.environ['OMP_NUM_THREADS'] = '2,x'", (), 2, "OMP_NUM_THREADS is '2,x'; expected a number of threads"),
        (NO_SPACE, (), 4, "importing torch takes 1.5 GiB of address space or more, and the limit is 1.0 GiB"),
        (NO_MEMORY, (), 4, "importing torch takes 128.0 MiB of memory or more, and 100.0 MiB is available"),
        pytest.param(NO_THREADS, ("--threads", "2"), 4, "the system starts no more threads", marks=pytest.mark.slow),
    ],
)
def test_what_is_lacking_is_said(before: str, args: tuple[str, ...], code: int, words: str, tiny_model: Path) -> None:
    process = spawn(before, "generate", "--model", tiny_model, "--prompt", PROMPT, *args)
    out, err = process.communicate()
    assert (process.returncode, out, err.count("\n")) == (code, "", 1), err
    assert err.startswith(f"lce: error: {words}")


NO_COMPILER = "import atexit\natexit.register(lambda: 'torch._dynamo' in sys.modules and os._exit(99))"


@pytest.mark.slow
def test_one_thread_computes_where_no_other_can_be_started(tiny_model: Path) -> None:
    """And PyTorch's compiler is not imported, which would take longer than a short answer."""
    process = spawn(NO_THREADS + NO_COMPILER, "generate", "--model", tiny_model, "--prompt", PROMPT, "--threads", "1")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out


@pytest.mark.slow
def test_output_that_cannot_be_written(tiny_model: Path) -> None:
    """Where stderr is full, the text and the exit code are what they are; where stdout is full, the command failed."""
    args = ("generate", "--prompt", PROMPT, "--threads", "1", "--model")
    whole = run(*args, tiny_model).stdout
    with open("/dev/full", "w") as full:
        for model, code, written in ((tiny_model, 0, whole), ("none", 3, "")):
            process = spawn("", *args, model, stderr=full)
            assert (process.communicate()[0], process.returncode) == (written, code)
        process = spawn("", *args, tiny_model, stdout=full)
        assert "lce: error: No space left on device" in process.communicate()[1]
        assert process.returncode == 4


def test_what_cannot_be_saved_is_refused(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    save = ("--save", tmp_path / "answer.lce")
    assert_error(run("generate", "--model", tiny_model, "--prompt", PROMPT, *save), 4, "No space left on device")
    assert list(tmp_path.iterdir()) == []


# Commands of other packages: entry points of `lce.commands`, installed or in a source tree
def test_a_source_tree_names_its_commands(tmp_path: Path) -> None:
    text = "[options.entry_points]\nlce.commands =\n    hello = one.two:three\n    trace = mine:trace\n"
    (tmp_path / "setup.cfg").write_text(text)
    found = plugins(GROUP, tmp_path)
    assert (found["hello"].value, found["trace"].value) == ("one.two:three", "mine:trace")


def test_our_tree_has_the_commands_of_server_and_laboratory() -> None:
    names = "bench calibrate check eval explain inspect leaderboard recommend reproduce serve trace".split()
    found = plugins(GROUP)
    assert set(names) <= set(found)
    assert all(isinstance(found[name].load(), click.Command) for name in names)


def test_a_broken_command_says_why() -> None:
    said = {"not_there.at_all:run": "No module named 'not_there'", "json:dumps": "is a function, not a click.Command"}
    for value, reason in said.items():
        command = load(EntryPoint("hello", value, GROUP))
        assert reason in (command.help or "")
        with pytest.raises(UsageError, match=reason):
            command.main(["--any", "thing"], standalone_mode=False)
