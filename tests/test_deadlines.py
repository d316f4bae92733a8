"""No test waits without limit: every call that may block has a deadline of its own, besides that of its test."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import start, within

TESTS = Path(__file__).parent
BLOCKING = {"communicate", "join", "readline", "result", "wait"}  # without an argument they may wait for ever
SUBPROCESS = {"run", "call", "check_call", "check_output"}
HAS_LIMITS = {"Popen", "communicate", "line", "wait"}  # names of `tests.command.Process`, whose waits have limits


def without_limit(text: str) -> Iterator[str]:
    """The calls in a file that may wait for ever."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.While) and "sleep(" in ast.unparse(node.body[0]) and len(node.body) == 1:
            yield f"line {node.lineno}: a loop that only sleeps: see tests.command.until"
        if not isinstance(node, ast.Call) or any(keyword.arg in ("timeout", None) for keyword in node.keywords):
            continue
        if isinstance(node.func, ast.Attribute):
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            if owner == "subprocess" and node.func.attr in {*SUBPROCESS, "Popen"}:
                yield f"line {node.lineno}: subprocess.{node.func.attr}"
            elif node.func.attr in BLOCKING - HAS_LIMITS and not node.args:
                yield f"line {node.lineno}: {node.func.attr}()"
            elif node.func.attr == "urlopen":
                yield f"line {node.lineno}: urlopen"


@pytest.mark.parametrize("file", sorted(TESTS.rglob("*.py")), ids=lambda file: file.relative_to(TESTS).as_posix())
def test_nothing_waits_without_limit(file: Path) -> None:
    """`tests.command` has `output`, `start`, `spawn` and `within`, whose waits end."""
    assert list(without_limit(file.read_text(encoding="utf-8"))) == []


def test_such_calls_are_found() -> None:
    text = "subprocess.run([1])\nthread.join()\n','.join(x)\nthread.join(timeout=3)\npipe.readline()\nurlopen(x)"
    text += "\nwhile not done():\n  sleep(1)\nwhile not done():\n  assert monotonic() < end\n  sleep(1)"
    found = sorted(int(line.split(":")[0].split()[1]) for line in without_limit(text))
    assert found == [1, 2, 5, 7]


def test_deadlines_end_a_wait() -> None:
    with start("import time; time.sleep(600)") as process:
        with pytest.raises(TimeoutError):
            within(process.wait, 0.1)
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=0.1)
        process.kill()
