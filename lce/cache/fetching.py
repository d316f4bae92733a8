"""Work for another thread: pages are gathered from the host's memory, or read from a file, while the model computes.

One thread for the whole process; it starts with the first fetch, so there is none on a machine without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Lock

POLL_S = 0.1  # how often a caller looks whether its fetch has ended, should the sign of it be lost to an interruption


class Fetch:
    """Work that the thread does, or the caller itself if it needs the result before the thread has begun.

    Who claims the work first does it. The thread is not interrupted by Ctrl-C: what it claimed, it ends. The caller may
    be interrupted anywhere, and calls `finish` again.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._claims: list[str] = []
        self._ended = False
        self._sign = Lock()
        self._sign.acquire()
        self.error: BaseException | None = None  # what went wrong, once it has ended

    def begin(self) -> None:
        """Hand the work to the thread. The caller must be able to `finish` it already: this may be interrupted."""
        _thread().submit(self._by_the_thread)

    def finish(self) -> None:
        """Return when the work has ended. May be repeated."""
        self._claims.append("caller")
        if self._claims[0] == "caller":
            self.error = None
            try:
                self._work()
            except Exception as error:
                self.error = error
            return
        while not self._ended:
            self._sign.acquire(timeout=POLL_S)

    def _by_the_thread(self) -> None:
        self._claims.append("thread")
        if self._claims[0] != "thread":
            return
        try:
            self._work()
        except BaseException as error:
            self.error = error
        self._ended = True
        self._sign.release()


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "lce-fetch")


os.register_at_fork(after_in_child=_thread.cache_clear)  # threads stay behind in the parent
