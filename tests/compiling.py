"""Kernels in tests: workers of one run compile a kernel once, and the time that it takes is not a test's.

While one worker compiles it, the others wait, and find it in the cache.
"""

import fcntl
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lce.kernels.code import compiling

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
    compiled = compiling.compiled

    def in_turn(body: Callable[..., Any], signature: Any, **options: Any) -> Callable[..., Any]:
        folder = compiling.usable_cache()
        if folder is None:
            return compiled(body, signature, **options)
        with another_limit(), (folder / f"{body.__name__}.turn").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return compiled(body, signature, **options)

    compiling.compiled = in_turn
