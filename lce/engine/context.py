"""A context: a sequence of tokens that an engine has prefilled and can continue. Makes and checks contexts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import ClassVar, NamedTuple, NoReturn, Self, SupportsIndex, TypeVar

from torch import Tensor

from lce.cache.kv import KVCache, Mark
from lce.engine.lanes import Lane
from lce.engine.planning import ALLOWANCE
from lce.engine.saving import ContextData, ContextFiles, Target
from lce.engine.setup import Setup
from lce.errors import UsageError, shown
from lce.files import path_of
from lce.models.rope import Rope
from lce.sizes import count

T = TypeVar("T")


class ContextMark(NamedTuple):
    """A state to which a context can go back: see `Context.mark`."""

    cache: Mark
    n_tokens: int
    logits: Tensor | None


class Unique:
    """The base of classes whose objects own memory, threads or locks, and can be neither pickled nor copied."""

    _instead: ClassVar[str]  # the remedy that the error message names

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = type(self).__name__
        raise UsageError(f"this {kind} cannot be pickled or copied by Python's copy and pickle; {self._instead}")


class Context(Unique):
    """A prefilled sequence of tokens that can be continued, forked and saved.

    `token_ids` is the whole sequence; the cache may lack the last token of an answer, which is prefilled with the next
    tokens. `Engine.generate` appends prompt and answer to a given `context`: give a `fork` to keep the original.
    One call at a time may use a context; different contexts of one engine may be used from different threads.
    `announced` is the final number of tokens, as given by an argument `length`; some RoPE scalings depend on it.
    `source` names the file from which the context was opened.

    A call that fails or is interrupted leaves the context as it was before, so the call can be repeated. A stream that
    has begun to answer leaves the answer so far: an empty prompt continues the answer.
    """

    _instead = "copy it with fork(), or write it with save() and open it with Engine.open_context() in another process"

    def __init__(self, data: ContextData, rope: Rope, files: ContextFiles) -> None:
        self.files = files
        self.rope = rope
        self._cache: KVCache | None = data.cache
        self.token_ids = list(data.token_ids)
        self.announced = data.announced
        self.source = data.source
        self._only_read = data.only_read  # so many first tokens, or more than there are after `truncate`
        self._saves = data.saves
        self._last = data.cache.length, data.logits  # a number of cached tokens, and the logits after them
        self._lock = Lock()  # the call or stream that uses the context holds this lock

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        if self._cache is None:
            return f"Context({len(self)} tokens, closed)"
        held, parts = self.cache.bytes_by_tier, self.cache.layout.by_device
        return f"Context({len(self)} tokens, {sum(held[part.device_tier] for part in parts)} bytes)"

    @property
    def cache(self) -> KVCache:
        """The cache of keys and values. Raises `UsageError` for a context that was closed."""
        if self._cache is None:
            raise UsageError("this context was closed; prefill its text again, or open its file")
        return self._cache

    @property
    def logits(self) -> Tensor | None:
        """The logits `[vocab]` after the last token in the cache; None if they are not known."""
        length, logits = self._last
        return logits if length == self.cache.length else None

    def store_logits(self, lane: Lane) -> None:
        """Store the logits of a lane, this context's part in a pass, if the cache ends with the lane's last token."""
        if lane.logits is not None and lane.stop == self.cache.length:
            if self._only_read >= lane.indices[0]:
                self._only_read = lane.indices[0 if lane.decoding else 1]
            self._last = (lane.stop, lane.logits)

    @property
    def uncached(self) -> list[int]:
        """The ids of the tokens that are not in the cache yet."""
        return self.token_ids[self.cache.n_tokens :]

    @property
    def data(self) -> ContextData:
        """The parts from which a file or a fork of the context is made."""
        own = self.source, self._saves, self._only_read
        return ContextData(self.cache, self.token_ids, self.logits, self.announced, *own)

    def hold(self) -> Lock:
        """Return a lock that reserves the context inside `with`. Raises `UsageError` if the context is in use already.

        Ctrl-C never leaves the context reserved: CPython delivers no signal between taking the lock and the first
        instruction inside `with`, nor between the last one and the release.
        """
        if self._lock.locked():
            raise UsageError("this context is being asked already: wait for that answer, or ask a fork() of it")
        return self._lock

    def fork(self) -> "Context":
        """Return an independent context with the same tokens. On a CPU the two share the memory of these tokens."""
        with self.hold():
            return Context(replace(self.data, cache=self.cache.fork(), saves=set()), self.rope, self.files)

    def truncate(self, n_tokens: int) -> None:
        """Drop all tokens after the first `n_tokens`. Raises `UsageError` if the context has fewer.

        The next call prefills the last remaining token again, because the logits after it were not kept. More tokens
        are prefilled again if the method's state cannot go back to exactly `n_tokens`: those of an incomplete chunk or
        block; for `infllm` those after its last point, of which there are few far from the end; and all tokens for
        `esa` with `compress="pca"` before its components were computed, and for `self_extend` beyond a fourth.

        Raises `UsageError`, too, for fewer tokens than `cache.fixed`. At exactly `cache.fixed` tokens nothing is
        prefilled again, and the next call must have a prompt.
        """
        with self.hold():
            n_tokens = count(n_tokens, "n_tokens", least=0)
            if n_tokens > len(self):
                raise UsageError(f"n_tokens is {n_tokens}; expected {len(self)} or less, the length of the context")
            if n_tokens < self.cache.n_tokens:
                again = max(n_tokens - 1, min(n_tokens, self.cache.fixed))  # the last token is read again, if possible
                self.cache.truncate(self.cache.nearest(again))
            del self.token_ids[n_tokens:]  # last: if interrupted before this, the next call prefills again

    def close(self) -> None:
        """Free memory and files, as the end of `with` does. Raises `UsageError` while in use; so does any later use."""
        if self._cache is not None:
            with self.hold():
                self._cache, self._last = None, (0, None)

    def __enter__(self) -> Self:
        self.cache  # noqa: B018  raises if the context was closed
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the context to a file for `Engine.open_context`. The file appears whole or not at all.

        The file is a copy of the keys and values. Raises `CapacityError` if the disk has no space for the file. Raises
        `UsageError` if a file exists there, unless `force`, or unless that file is this context's own: the file that
        it was opened from or last saved to, whatever its name. A fork has no file of its own.
        """
        with self.hold():
            self.files.save(Target(path_of(path), force, self._saves), self.data)

    def mark(self) -> ContextMark:
        """Return the current state for a later `go_back`. Copies no keys or values."""
        return ContextMark(self.cache.mark(), len(self.token_ids), self.logits)

    def go_back(self, mark: ContextMark) -> None:
        """Restore the state at `mark`. If the cache cannot go back, its committed blocks stay."""
        cache, n_tokens, logits = mark
        try:
            self.cache.go_back(cache)
            self._last = (cache.length, logits)
        finally:
            del self.token_ids[max(n_tokens, self.cache.n_tokens) :]
            ALLOWANCE.give_back(self.cache, _rows(self.cache, max(self.announced, len(self))))


def new_context(setup: Setup, length: int | str) -> Context:
    """Return an empty context: see `Engine.new_context`."""
    cache, announced = KVCache.empty(setup.layout), setup.together(lambda: count(length, "length"))
    reserve(setup, cache, announced)
    return context_of(setup, ContextData(cache, announced=announced))


def open_context(setup: Setup, path: str | Path) -> Context:
    """Open a context file: see `Engine.open_context`."""
    return context_of(setup, setup.files.open(setup.together(lambda: path_of(path))))


def context_of(setup: Setup, data: ContextData) -> Context:
    """Return the context that `data` has the parts of."""
    rope = setup.rope_of(data.announced, data.cache.n_tokens - data.cache.length)
    return Context(data, rope, setup.files)


def reserve(setup: Setup, cache: KVCache, length: int) -> None:
    """Reserve memory for `length` tokens of a cache, if `ALLOWANCE` has enough. Raises `CapacityError` if not."""
    before, n_rows = ALLOWANCE.promised(cache), _rows(cache, length)

    def promise() -> None:
        ALLOWANCE.promise(cache, n_rows)
        cache.reserve(n_rows)

    try:
        setup.together(promise, lambda _: {"length": length})
    except BaseException:
        ALLOWANCE.give_back(cache, before)
        raise


def _rows(cache: KVCache, n_tokens: int) -> int:
    """Return the number of rows that a cache takes when it has `n_tokens` tokens of the text."""
    return cache.length + n_tokens - cache.n_tokens


def own_context(setup: Setup, context: object) -> Context | None:
    """Return a context of this engine, or None. Raises `UsageError` for another engine's context."""
    return None if context is None else given_context(setup, context)


def given_context(setup: Setup, context: object) -> Context:
    """Return a context of this engine. Raises `UsageError` for None and for another engine's context."""
    if not isinstance(context, Context):
        raise UsageError(f"context is {shown(context)}; expected what prefill, open_context or fork returns")
    if context.files is not setup.files:
        raise UsageError("this context was made by another engine; ask that one, or prefill the text again")
    return context


def appended(setup: Setup, context: Context | None, n_new: int, announced: int, work: Callable[[Context], T]) -> T:
    """Call `work`, which appends `n_new` tokens, on `context` or a new context. Undo all changes after an error."""
    held = new_context(setup, max(n_new, announced)) if context is None else context
    with held.hold():
        setup.warn(len(held) + n_new, held.rope)
        reserve(setup, held.cache, max(len(held) + n_new, announced))
        mark = held.mark()
        try:
            return work(held)
        except BaseException:
            held.go_back(mark)
            raise
