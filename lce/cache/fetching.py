"""Work for another thread: gathers pages from host memory, or reads them from a file, while the model computes.

There is one thread for the whole process. It starts with the first fetch, so never on a machine without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache


class Fetch:
    """Work for the thread, or for the caller if it needs the result before the thread has begun.

    Ctrl-C does not interrupt the thread. A caller that was interrupted calls `finish` again.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._future: Future[None] = Future()
        self.error: BaseException | None = None  # the error, once the work has ended

    def begin(self) -> None:
        """Hand the work to the thread."""
        _thread().submit(self._by_the_thread)

    def _by_the_thread(self) -> None:
        if self._future.set_running_or_notify_cancel():
            try:
                self._work()
                self._future.set_result(None)
            except BaseException as error:
                self._future.set_exception(error)

    def finish(self) -> None:
        """Wait until the work has ended. May be repeated."""
        if not self._future.cancel():  # the thread has begun
            wait([self._future])
            self.error = self._future.exception()
            return
        try:
            self._work()
            self.error = None
        except Exception as error:
            self.error = error


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "lce-fetch")


os.register_at_fork(after_in_child=_thread.cache_clear)  # threads stay behind in the parent
