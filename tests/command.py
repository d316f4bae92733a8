"""Runs command lines, in this process or in a new one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from lce import cli

PROMPT = "the quick brown fox jumps over the lazy dog, and then over the moon"


def run(*args: str | Path, stdin: bytes | str | None = None) -> Result:
    """A command line in this process."""
    return CliRunner().invoke(cli.cli, [str(arg) for arg in args], input=stdin)


def spawn(script: str, *args: str | Path, **options: Any) -> subprocess.Popen[str]:
    """A command line in a new process, after `script`. Ctrl-C works there even if this process ignores it."""
    start = "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    run_it = f"\nfrom lce.cli import main\nsys.argv = ['lce', *{[str(arg) for arg in args]!r}]\nmain()\n"
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen([sys.executable, "-c", start + script + run_it], text=True, **pipes)


def assert_error(result: Result, code: int, *words: str) -> None:
    """One line on stderr with these words, nothing on stdout, and this exit code."""
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("lce: error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
