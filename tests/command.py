"""Runs command lines and scripts, in this process or in a new one. Nothing here waits longer than `LIMIT` seconds."""

import logging
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from click.testing import CliRunner, Result

from lce import cli

T = TypeVar("T")
LIMIT = 60.0
PROMPT = "the quick brown fox jumps over the lazy dog, and then over the moon"


def begun(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def within(call: Callable[[], T], seconds: float = LIMIT) -> T:
    """Make a call that may block, in a thread; `TimeoutError` if it takes longer."""
    return begun(call).result(seconds)


def together(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Make calls at once, each in a thread of its own; `TimeoutError` if one takes longer than `LIMIT`."""
    return [future.result(LIMIT) for future in [begun(call) for call in calls]]


def resident() -> int:
    """The bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def until(condition: Callable[[], object], seconds: float = LIMIT) -> None:
    """Wait until a condition holds; `TimeoutError` if it takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)


class Process(subprocess.Popen[str]):
    """A new process with pipes for its text. Waits end with an error at their limit; in a `with`, an error kills it."""

    def __init__(self, line: list[Any], **options: Any) -> None:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        super().__init__(line, text=True, **pipes | options)

    def line(self, pipe: str = "stdout") -> str:
        return within(getattr(self, pipe).readline)

    def wait(self, timeout: float | None = LIMIT) -> int:
        return super().wait(timeout)

    def communicate(self, input: str | None = None, timeout: float | None = LIMIT) -> tuple[str, str]:
        return super().communicate(input, timeout)

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


def run(*args: str | Path, stdin: bytes | str | None = None) -> Result:
    """A command line in this process, without what `--debug` changes there for good."""
    log = logging.getLogger("lce")
    level = log.level
    try:
        return CliRunner().invoke(cli.cli, [str(arg) for arg in args], input=stdin)
    finally:
        log.setLevel(level)


def ran(*args: str | Path, stdin: bytes | str | None = None) -> Result:
    result = run(*args, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return result


def start(code: str, *args: str | Path, **options: Any) -> Process:
    return Process([sys.executable, "-c", code, *args], **options)


def output(code: str, *args: str | Path, **options: Any) -> str:
    """What Python with this code writes to stdout in a new process.

    It must succeed. On stderr it may say that kernels are being compiled, and nothing else.
    """
    process = start(code, *args, **options)
    out, err = process.communicate()
    said = [line for line in err.splitlines() if not line.startswith("lce: compiling kernels")]
    assert (process.returncode, said) == (0, [])
    return out


def spawn(before: str, *args: str | Path, **options: Any) -> Process:
    """A command line in a new process, after the code `before`. Ctrl-C works there even if this process ignores it."""
    first = "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    run_it = f"\nfrom lce.cli import main\nsys.argv = ['lce', *{[str(arg) for arg in args]!r}]\nmain()\n"
    return start(first + before + run_it, **options)


def assert_error(result: Result, code: int, *words: str) -> None:
    """One line on stderr with these words, nothing on stdout, and this exit code."""
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("lce: error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
