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
    """What a context goes back to: see `Context.mark`."""

    cache: Mark
    n_tokens: int
    logits: Tensor | None


class Unique:
    """What holds memory, threads or locks that a copy would share: it is neither pickled nor copied."""

    instead: ClassVar[str]  # what to do instead

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = type(self).__name__
        raise UsageError(f"this {kind} cannot be pickled or copied by Python's copy and pickle; {self.instead}")


class Context(Unique):
    """A prefilled sequence that can be asked, forked and saved.

    `token_ids` is the whole sequence. The cache may lag behind it: the last token of an answer is prefilled when the
    next tokens are. Asking a context adds the question and the answer to it; ask a `fork` to keep the context as it
    is. One call at a time uses a context; different contexts of one engine may be used from different threads.

    A call that fails or is interrupted leaves the context as it was before the call, so that it can be made again. A
    stream that has begun to answer leaves what it said: an empty prompt continues it.

    `close` frees memory and files at once, as the end of `with engine.prefill(...) as context:` does.
    """

    instead = "copy it with fork(), or write it with save() and open it with Engine.open_context() in another process"

    def __init__(self, data: ContextData, rope: Rope, identity: Identity) -> None:
        self.identity = identity  # of the engine that filled the cache; no other engine may use it
        self.rope = rope
        self._cache: KVCache | None = data.cache
        self.token_ids = list(data.token_ids)
        self.announced = data.announced  # tokens; some RoPE scalings depend on it
        self.source = data.source  # the file that it was opened from
        self._last: tuple[int, Tensor | None] = (data.cache.length, data.logits)
        self.graph: DecodeGraph | None = None  # its decode steps, where they are recorded
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
        """Logits `[vocab]` after the last token in the cache; None where they are not known."""
        length, logits = self._last
        return logits if length == self.cache.length else None

    @logits.setter
    def logits(self, logits: Tensor | None) -> None:
        self._last = (self.cache.length, logits)

    def keep(self, lane: Lane | None) -> None:
        """Keep the logits of a lane, if they are those after the last token in the cache."""
        if lane is not None and lane.logits is not None and lane.stop == self.cache.length:
            self._last = (lane.stop, lane.logits)

    @property
    def uncached(self) -> list[int]:
        """The tokens that are not in the cache yet."""
        return self.token_ids[self.cache.length :]

    @property
    def data(self) -> ContextData:
        """What the context is made of."""
        return ContextData(self.cache, self.token_ids, self.logits, self.announced, self.source)

    def hold(self) -> None:
        """Use the context alone until `used` is set to False again. Raises `UsageError` if it is used already.

        Write `context.hold()`, `try:` and `finally: context.used = False`. CPython runs signal handlers and changes
        threads at calls, at function starts and at the ends of loops' turns. There are none between the test and the
        assignment, none between `hold` and `try`, and none before the assignment in `finally`.
        """
        if self.used:
            raise UsageError("this context is being asked already: wait for that answer, or ask a fork() of it")
        self.used = True

    def fork(self) -> Context:
        """Return a context of its own with the same tokens. On a CPU the two share the memory of what the cache has."""
        self.hold()
        try:
            return Context(replace(self.data, cache=self.cache.fork()), self.rope, self.identity)
        finally:
            self.used = False

    def truncate(self, n_tokens: int) -> None:
        """Go back to the first `n_tokens` tokens. Raises `UsageError` for more than there are.

        The last of them is read again when the context is next asked, because its logits were not kept. So are the
        tokens before it of which the method did not keep enough: those of an open chunk at most, all of them for
        `infllm` and for `esa` with `compress="pca"`. These two and `esa` read them in other blocks than before.
        """
        self.hold()
        try:
            n_tokens = count(n_tokens, "n_tokens", least=0)
            if n_tokens > len(self):
                raise UsageError(f"n_tokens is {n_tokens}; expected {len(self)} or less, the length of the context")
            if n_tokens < self.cache.length:
                self.cache.truncate(self.cache.nearest(max(0, n_tokens - 1)))
            del self.token_ids[n_tokens:]  # last: until here the tokens behind the cache would be read again
        finally:
            self.used = False

    def close(self) -> None:
        """Free the context's memory and files. Any later use raises `UsageError`; closing it again does nothing.

        Raises `UsageError` while it is being asked.
        """
        if self._cache is not None:
            self.hold()
            self._cache, self._last, self.graph, self.used = None, (0, None), None, False

    def __enter__(self) -> Self:
        self.cache  # noqa: B018  refuses a context that was closed
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def save(self, path: str | Path) -> None:
        """Write the context to a file, for `Engine.open_context`; the file appears whole or not at all.

        Time and bytes: one copy of its keys and values. Raises `CapacityError` where they cannot be written.
        """
        self.hold()
        try:
            save(path_of(path), self.data, self.identity)
        finally:
            self.used = False

    def mark(self) -> ContextMark:
        """Return what `go_back` needs to undo what comes; no copy."""
        return ContextMark(self.cache.mark(), len(self.token_ids), self.logits)

    def go_back(self, mark: ContextMark) -> None:
        """Be as when `mark` was taken. If the cache cannot be read back, the blocks that it has stay."""
        try:
            self.cache.go_back(mark.cache)
            self._last = (mark.cache.length, mark.logits)
        finally:
            del self.token_ids[max(mark.n_tokens, self.cache.length) :]
            ALLOWANCE.give_back(self.cache, max(self.announced, len(self)))
