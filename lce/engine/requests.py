"""The requests of a batch, and the streams by which their callers read the answers."""

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Literal

from lce.engine.answer import Answer, Options
from lce.engine.context import Context
from lce.engine.setup import Setup
from lce.engine.stream import Generation, Piece, Stream
from lce.errors import UsageError
from lce.progress import Progress
from lce.tokenizer.chat import ChatText

State = Literal["waiting", "prefill", "decode", "done"]
Item = Piece | BaseException | None  # None ends the stream


class Channel:
    """A queue of a stream's items from the engine's thread to readers, in threads or in event loops."""

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def put(self, item: Item) -> None:
        """Add an item; any thread may call this."""
        with self._changed:
            self.items.append(item)
            self._changed.notify_all()
            for loop, event in self._waiting:
                with suppress(RuntimeError):  # the reader's loop was closed
                    loop.call_soon_threadsafe(event.set)

    def get(self) -> Item:
        """Wait for an item and return it."""
        with self._changed:
            self._changed.wait_for(lambda: self.items)
            return self._next()

    async def receive(self) -> Item:
        """Wait for an item like `get`, in an event loop. A task that is cancelled while it waits loses no item."""
        while True:
            with self._changed:
                if self.items:
                    return self._next()
                waiting = asyncio.get_running_loop(), asyncio.Event()
                self._waiting.append(waiting)
            try:
                await waiting[1].wait()
            finally:
                with self._changed:
                    self._waiting.remove(waiting)

    def _next(self) -> Item:
        """Return the next item, and remove a piece; later calls return the last item, which is none, too."""
        return self.items.popleft() if isinstance(self.items[0], Piece) else self.items[0]


@dataclass(eq=False)
class Request:
    """A prompt and its options, and how far a batch is with the answer. The engine's thread alone changes it.

    `start` is the context that the prompt continues, if any; the prompt is read into a fork of `start`. `context` is
    what the prompt is read into, once reading begins; the first `n_before` of its tokens precede the prompt. With
    `reads_only`, the request ends when the prompt is read. A request that `gives` the context or a fork of it has that
    as `held` at the end, unless it fails or is cancelled. `threads` are the threads that call callbacks.
    """

    setup: Setup
    chat: ChatText | None  # the prompt, if it is a rendered chat
    ids: list[int]
    options: Options
    start: Context | None = None
    reads_only: bool = False
    gives: Literal["", "context", "fork"] = ""
    held: Context | None = None  # the caller's own
    threads: Set[int] = frozenset()
    result: Generation = field(default_factory=Generation)
    channel: Channel = field(default_factory=Channel)
    state: State = "waiting"
    cancelled: bool = False
    asked: float = 0.0  # the time of the request
    context: Context | None = None
    is_sound: bool = True  # whether no pass with the context has failed
    answer: Answer | None = None
    n_before: int = 0
    waits_for: Literal["", "context", "memory"] = ""
    tried: float = 0.0  # the time at which the batch last tried to begin
    n_overtaking: int = 0  # later requests that began while there was no memory for this one
    n_said: int = 0  # tokens of the context before the answer
    n_read: int = 0  # tokens of the prompt that are cached
    report: Progress | None = None
    closing: ExitStack = field(default_factory=ExitStack)


class BatchStream(Stream):
    """The answer to a request of a batch: an iterator over its pieces, for `for` and for `async for`.

    `result` has the text so far, and is complete at the end; its `stats.read_before` counts the tokens of the prompt
    that were cached. `setup` is that of the engine that answers: of the request's method, or of its context. A stream
    that nobody holds any more is cancelled.
    """

    def __init__(self, request: Request) -> None:
        self.result, self.setup = request.result, request.setup
        self._request = request
        self._end = weakref.finalize(self, setattr, request, "cancelled", True)
        self._end.atexit = False

    @property
    def state(self) -> State:
        """What the batch does with the request: it is waiting, in prefill, in decode, or done."""
        return self._request.state

    @property
    def context(self) -> Context | None:
        """The caller's context, once a stream of `Batch.read`, or with `keep_context`, has ended without an error."""
        return self._request.held

    @property
    def prompt_ids(self) -> list[int]:
        """The ids of the prompt."""
        return self._request.ids

    @property
    def progress(self) -> tuple[int, int]:
        """The number of the prompt's tokens that are read or were cached, and the number of its tokens."""
        return self._request.n_read, len(self._request.ids)

    def cancel(self) -> None:
        """Ask the request to end, and return at once. What was read of the prompt stays cached."""
        self._request.cancelled = True

    close = cancel

    def __next__(self) -> Piece:
        if threading.get_ident() in self._request.threads and not self._request.channel.items:
            raise UsageError("a request's callback cannot wait for its own batch; return from the callback first")
        if (item := self._request.channel.get()) is None:
            raise StopIteration
        return _raised(item)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        if (item := await self._request.channel.receive()) is None:
            raise StopAsyncIteration
        return _raised(item)

    async def afinish(self) -> Generation:
        """Wait like `finish`, in an event loop."""
        try:
            async for _ in self:
                pass
        except BaseException:
            self.cancel()
            raise
        return self.result


def _raised(item: Piece | BaseException) -> Piece:
    """Return a piece, or raise an error. An error that ends loops would seem to be the end of the stream."""
    if isinstance(item, StopIteration | StopAsyncIteration):
        raise RuntimeError(f"a callback raised {type(item).__name__}") from item
    if isinstance(item, BaseException):
        raise item
    return item
