"""Counts the lines of the functions that a command of lce runs: what somebody who follows the command has to read.

    python -m tools.count_path generate -m demo --method longheads -f examples/haystack.txt

Counts, in all threads, the lines of every function of the three packages that is entered, with decorators and inner
functions, and each line once. Bodies of modules and classes, and compiled kernels, are not functions that are entered.
With `--files` before the command, each file is listed with its lines.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = ("lce", "lce_serve", "lce_lab")


class Entered:
    """The code that was entered while an instance was the profiler of all threads."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call":
            self.codes.add(frame.f_code)

    def lines(self) -> dict[Path, set[int]]:
        """Return the lines of the functions that were entered, by file."""
        first: dict[Path, set[int]] = {}
        for code in self.codes:
            path = Path(code.co_filename)
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES:
                first.setdefault(path, set()).add(code.co_firstlineno)
        found = {path: spans(path, starts) for path, starts in first.items()}
        return {path: lines for path, lines in sorted(found.items()) if lines}


def spans(path: Path, starts: set[int]) -> set[int]:
    """Return the lines of the functions of a file that begin, with their decorators, at the lines `starts`."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            first = min(node.lineno, *(each.lineno for each in decorators)) if decorators else node.lineno
            if first in starts:
                lines |= set(range(first, (node.end_lineno or first) + 1))
    return lines


def run_command(arguments: list[str], profiler: Callable[[FrameType, str, Any], None]) -> None:
    """Run a command line of lce in this process, and call `profiler` for all that its threads enter."""
    threading.setprofile(profiler)
    sys.setprofile(profiler)
    try:
        from lce import cli

        sys.argv = ["lce", *arguments]
        cli.main()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # None ends it


def entered(arguments: list[str]) -> Entered:
    """Run a command line of lce in this process; return what it entered."""
    found = Entered()
    run_command(arguments, found)
    return found


def main() -> None:
    arguments = sys.argv[1:]
    lists = arguments[:1] == ["--files"]
    lines = entered(arguments[1:] if lists else arguments).lines()
    for path, found in lines.items() if lists else ():
        print(f"{len(found):6} {path.relative_to(ROOT)}")
    print(f"{sum(map(len, lines.values())):,} lines of functions in {len(lines)} files")


if __name__ == "__main__":
    main()
