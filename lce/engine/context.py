"""A context: a sequence that an engine has prefilled and can go on with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NoReturn, Self, SupportsIndex

from torch import Tensor

from lce.cache.kv import KVCache, Mark
from lce.engine.allowance import ALLOWANCE
from lce.engine.graph import DecodeGraph
from lce.engine.identity import Identity
from lce.engine.lanes import Lane
from lce.engine.saving import ContextData, save
from lce.errors import UsageError
from lce.files import path_of
from lce.models.rope import Rope
from lce.sizes import count


@dataclass(frozen=True)
class ContextMark:
    """A state that a context can go back to: see `Context.mark`."""

    cache: Mark
    n_tokens: int
    logits: Tensor | None


class Unique:
    """The base of objects with memory, threads or locks that a copy would share: neither pickled nor copied."""

    instead: ClassVar[str]  # what to do instead

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = type(self).__name__
        raise UsageError(f"this {kind} cannot be pickled or copied by Python's copy and pickle; {self.instead}")


class Context(Unique):
    """A prefilled sequence that can be asked, forked and saved.

    `token_ids` is the whole sequence. The cache may lag behind it: the last token of an answer is prefilled when the
    next tokens are. Asking a context adds the question and the answer; ask a `fork` to leave the context as it is. One
    call at a time may use a context; different contexts of one engine may be used from different threads.

    A call that fails or is interrupted leaves the context as it was before, so the call can be repeated. A stream that
    has begun to answer leaves the answer so far: an empty prompt continues the answer.

    `close` frees memory and files at once, as the end of `with engine.prefill(...) as context:` does.
    """

    instead = "copy it with fork(), or write it with save() and open it with Engine.open_context() in another process"

    def __init__(self, data: ContextData, rope: Rope, identity: Identity) -> None:
        self.identity = identity  # of the engine that filled the cache; no other engine may use it
        self.rope = rope
        self._cache: KVCache | None = data.cache
        self.token_ids = list(data.token_ids)
        self.announced = data.announced  # length in tokens; some RoPE scalings depend on it
        self.source = data.source  # the file that the context was opened from
        self._last: tuple[int, Tensor | None] = (data.cache.length, data.logits)
        self.graph: DecodeGraph | None = None  # the recorded decode steps, if any
        self.used = False  # by a call or a stream

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        if self._cache is None:
            return f"Context({len(self)} tokens, closed)"
        held = self.cache.bytes_by_tier
        return (
            f"Context({len(self)} tokens, {sum(held[part.device_tier] for part in self.cache.layout.by_device)} bytes)"
        )

    @property
    def cache(self) -> KVCache:
        """Keys and values. Raises `UsageError` for a context that was closed."""
        if self._cache is None:
            raise UsageError("this context was closed; prefill its text again, or open its file")
        return self._cache

    @property
    def logits(self) -> Tensor | None:
        """Logits `[vocab]` after the last token in the cache; None if not known."""
        length, logits = self._last
        return logits if length == self.cache.length else None

    @logits.setter
    def logits(self, logits: Tensor | None) -> None:
        self._last = (self.cache.length, logits)

    def keep(self, lane: Lane | None) -> None:
        """Keep the logits of a lane if the lane ends at the last token in the cache."""
        if lane is not None and lane.logits is not None and lane.stop == self.cache.length:
            self._last = (lane.stop, lane.logits)

    @property
    def uncached(self) -> list[int]:
        """The tokens that are not in the cache yet."""
        return self.token_ids[self.cache.length :]

    @property
    def data(self) -> ContextData:
        """The parts of the context."""
        return ContextData(self.cache, self.token_ids, self.logits, self.announced, self.source)

    def hold(self) -> None:
        """Reserve the context until `used` is set to False. Raises `UsageError` if the context is in use already.

        Write `context.hold()`, `try:` and `finally: context.used = False`. CPython runs signal handlers and changes
        threads at calls, function starts and the ends of loop iterations. None of these lies between the test and the
        assignment, between `hold` and `try`, or before the assignment in `finally`.
        """
        if self.used:
            raise UsageError("this context is being asked already: wait for that answer, or ask a fork() of it")
        self.used = True

    def fork(self) -> Context:
        """Return an independent context with the same tokens. On a CPU the two share the memory of these tokens."""
        self.hold()
        try:
            return Context(replace(self.data, cache=self.cache.fork()), self.rope, self.identity)
        finally:
            self.used = False

    def truncate(self, n_tokens: int) -> None:
        """Go back to the first `n_tokens` tokens. Raises `UsageError` for more than there are.

        When the context is next asked, its last token is read again, because that token's logits were not kept. If the
        method's state cannot go back to exactly there, more tokens are read again: at most those of an open chunk, or
        all tokens for `infllm` and for `esa` with `compress="pca"`. `infllm` and `esa` read these tokens in other
        blocks than before.
        """
        self.hold()
        try:
            n_tokens = count(n_tokens, "n_tokens", least=0)
            if n_tokens > len(self):
                raise UsageError(f"n_tokens is {n_tokens}; expected {len(self)} or less, the length of the context")
            if n_tokens < self.cache.length:
                self.cache.truncate(self.cache.nearest(max(0, n_tokens - 1)))
            del self.token_ids[n_tokens:]  # last: if interrupted before this line, the uncached tokens are read again
        finally:
            self.used = False

    def close(self) -> None:
        """Free the context's memory and files. Any later use raises `UsageError`; a second `close` does nothing.

        Raises `UsageError` while the context is in use.
        """
        if self._cache is not None:
            self.hold()
            self._cache, self._last, self.graph, self.used = None, (0, None), None, False

    def __enter__(self) -> Self:
        self.cache  # noqa: B018  raises if the context was closed
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def save(self, path: str | Path) -> None:
        """Write the context to a file, for `Engine.open_context`; the file appears whole or not at all.

        Time and bytes: one copy of the keys and values. Raises `CapacityError` if the disk has no space for the file.
        """
        self.hold()
        try:
            save(path_of(path), self.data, self.identity)
        finally:
            self.used = False

    def mark(self) -> ContextMark:
        """Return the current state for a later `go_back`. Copies no keys or values."""
        return ContextMark(self.cache.mark(), len(self.token_ids), self.logits)

    def go_back(self, mark: ContextMark) -> None:
        """Restore the state at `mark`. If the cache cannot be read back, its committed blocks stay."""
        try:
            self.cache.go_back(mark.cache)
            self._last = (mark.cache.length, mark.logits)
        finally:
            del self.token_ids[max(mark.n_tokens, self.cache.length) :]
            ALLOWANCE.give_back(self.cache, max(self.announced, len(self)))
