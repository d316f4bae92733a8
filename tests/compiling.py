"""Kernels in tests: workers of one run compile a kernel once, and the time that it takes is not a test's.

While one worker compiles it, the others wait, and find it in the cache.
"""

import fcntl
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lce.kernels.runtime import library

LIMIT = 600.0  # seconds for one kernel


@contextmanager
def another_limit() -> Iterator[None]:
    """Let `LIMIT` be in force in the place of the test's own, whose time stands still."""
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_REAL, LIMIT if left else 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)


def take_turns() -> None:
    """Have a kernel compiled by one process at a time, outside the limits of tests."""
    compiled = library.compiled

    def in_turn(file: str, body: Callable[[], Any], folder: Path | None) -> bytes:
        if folder is None:
            return compiled(file, body, folder)
        with another_limit(), (folder / f"{file}.turn").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            return library.read(folder / file) or compiled(file, body, folder)

    library.compiled = in_turn
