"""What a generation gives: a result with its figures, and streams of its pieces for `for` and for `async for`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from inspect import GEN_RUNNING, getgeneratorstate
from threading import RLock
from typing import Self

from lce.cache.tier import Traffic
from lce.engine.context import Unique
from lce.errors import UsageError


@dataclass
class Stats:
    """The token counts, times and memory of one call that generates or prefills.

    `prompt_tokens` counts the tokens of the call's prompt, `read_before` those that the context had before the call.
    `first_token_s` is the time from the beginning of the call to the first token, `decode_s` the time after that token,
    `more_s` has the time of further work, by its name.
    `memory` has the cache's bytes by tier (device, host, disk), `traffic` each tier's hits, misses and copied bytes.
    """

    prompt_tokens: int = 0
    read_before: int = 0
    generated_tokens: int = 0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    more_s: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    traffic: dict[str, Traffic] = field(default_factory=dict)

    @property
    def prefill_tokens_per_s(self) -> float:
        """The prompt tokens per second; 0 if nothing was prefilled."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """The generated tokens per second after the first token; 0 for fewer than two tokens."""
        return max(0, self.generated_tokens - 1) / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probabilities of a drawn token and, in `top`, of the likeliest tokens, before temperature and filters."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Generation:
    """A generated `text`, its `token_ids`, and the figures in `stats`.

    `finish_reason` says why the text ended: `stop` for an end token or the option `stop`, `length` for `max_tokens`,
    `cancelled` for a stream that was ended early. It is empty until the text ends. `stop` is the stop string that ended
    the text, if one did. `logprobs`, if requested, has an entry for each token. `warning` says that the text became
    longer than the method can read. `seed` draws the same tokens again; None if nothing was drawn.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stats: Stats = field(default_factory=Stats)
    logprobs: list[TokenLogprobs] | None = None
    warning: str | None = None
    seed: int | None = None
    stop: str | None = None


@dataclass(frozen=True)
class Piece:
    """A piece of a generation's text, `str(piece)` or `piece.text`. Later pieces do not change earlier ones."""

    text: str

    def __str__(self) -> str:
        return self.text


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
