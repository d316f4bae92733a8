"""Streams of the pieces of a generation, for a `for` loop and for an `async for` loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from inspect import GEN_RUNNING, getgeneratorstate
from threading import RLock
from typing import Self

from lce.engine.answer import Generation, Piece
from lce.engine.context import Unique
from lce.errors import UsageError


@dataclass
class CancelFlag:
    """A flag that any thread may set; the loops of prefill and decode check it between steps."""

    is_set: bool = False


class Stream(Unique):
    """An iterator over the pieces of a generation. `result` holds the text so far and is complete at the end.

    `cancel` and `close` may be called from any thread, and the end of `with` closes the stream. The result of a stream
    that is ended early has the `finish_reason` "cancelled"; the context stays usable, as after an error.
    """

    _instead = "its result can be"

    def __init__(self, pieces: Generator[Piece, None, None], result: Generation, flag: CancelFlag) -> None:
        self.result = result
        self._pieces = pieces
        self._flag = flag
        self._step = RLock()  # the thread that runs a step holds this lock

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        with self._step:
            if getgeneratorstate(self._pieces) == GEN_RUNNING:
                raise UsageError("a callback asks for the next piece of the stream that has called it; return from it")
            try:
                return next(self._pieces)
            except StopIteration:
                self._settle()
                raise

    def finish(self) -> Generation:
        """Generate to the end and return the result. An error closes the stream."""
        try:
            for _ in self:
                pass
        except BaseException:
            self.close()  # a traceback may keep the stream alive
            raise
        return self.result

    def cancel(self) -> None:
        """Ask the generation to end, and return at once. The current step, of one block or one token, is the last."""
        self._flag.is_set = True

    def close(self) -> None:
        """End the generation and free the context. Waits for a step that runs in another thread."""
        self.cancel()
        with self._step:
            if getgeneratorstate(self._pieces) != GEN_RUNNING:  # else a callback of the running step made this call
                self._pieces.close()
                self._settle()

    def _settle(self) -> None:
        if self._flag.is_set and not self.result.finish_reason:
            self.result.finish_reason = "cancelled"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncStream(Unique):
    """An async iterator over a generation's pieces. The stream's own thread runs the steps, and ends with the stream.

    Cancelling the task that waits for a piece cancels the generation after the current step. To leave the loop early,
    `await stream.aclose()` or use `async with`. A stream that is garbage-collected ends as well.
    """

    _instead = "its result can be"

    def __init__(self, start: Callable[[CancelFlag], Stream]) -> None:
        self._start = start
        self._flag = CancelFlag()
        self._stream: Stream | None = None
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="lce-stream")

    @property
    def result(self) -> Generation:
        """The generation so far."""
        return Generation() if self._stream is None else self._stream.result

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        if self._thread is None:
            raise StopAsyncIteration
        piece = None
        try:
            piece = await asyncio.get_running_loop().run_in_executor(self._thread, self._next)
        finally:
            if piece is None:  # the stream has ended or failed
                await self.aclose()
        if piece is None:
            raise StopAsyncIteration
        return piece

    def _next(self) -> Piece | None:
        if self._stream is None:
            self._stream = self._start(self._flag)
        return next(self._stream, None)

    def cancel(self) -> None:
        """Ask the generation to end, and return at once. May be called from any thread."""
        self._flag.is_set = True

    async def aclose(self) -> None:
        """End the generation and its thread, and free the context. Waits for the current step."""
        try:
            if (thread := self._thread) is not None:
                self.cancel()
                await asyncio.shield(asyncio.get_running_loop().run_in_executor(thread, self._close))
                thread.shutdown()  # does not wait, because the thread is idle
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=False)  # the thread ends after the current step
                self._thread = None

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()
