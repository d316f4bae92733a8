"""A context: a sequence that an engine has prefilled and can go on with."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NoReturn, Self, SupportsIndex

from lce.cache.kv import KVCache
from lce.engine.arguments import path_of, tokens_of
from lce.engine.identity import Identity
from lce.engine.saving import ContextData, save
from lce.errors import UsageError
from lce.models.rope import Rope


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

    If prefill fails or is interrupted, tokens that are not cached yet are dropped; cached blocks stay.

    `close` frees memory and files at once, as the end of `with engine.prefill(...) as context:` does.
    """

    instead = "copy it with fork(), or write it with save() and open it with Engine.open_context() in another process"

    def __init__(self, data: ContextData, rope: Rope, identity: Identity) -> None:
        self.identity = identity  # of the engine that filled the cache; no other engine may use it
        self.rope = rope
        self._cache: KVCache | None = data.cache
        self.token_ids = list(data.token_ids)
        self.logits = data.logits  # [vocab], after the last token in the cache
        self.announced = data.announced  # tokens; some RoPE scalings depend on it
        self.source = data.source  # the file that it was opened from
        self._busy = threading.Lock()

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        if self._cache is None:
            return f"Context({len(self)} tokens, closed)"
        return f"Context({len(self)} tokens, {self.cache.bytes_by_tier['device']} bytes)"

    @property
    def cache(self) -> KVCache:
        """Keys and values. Raises `UsageError` for a context that was closed."""
        if self._cache is None:
            raise UsageError("this context was closed; prefill its text again, or open its file")
        return self._cache

    @property
    def uncached(self) -> list[int]:
        """The tokens that are not in the cache yet."""
        return self.token_ids[self.cache.length :]

    @property
    def data(self) -> ContextData:
        """What the context is made of."""
        return ContextData(self.cache, self.token_ids, self.logits, self.announced, self.source)

    def fork(self) -> Context:
        """An independent copy of the context. Bytes: one copy of its cache."""
        with self.in_use():
            return Context(replace(self.data, cache=self.cache.copy()), self.rope, self.identity)

    def truncate(self, n_tokens: int) -> None:
        """Go back to the first `n_tokens` tokens. Raises `UsageError` for more than there are.

        The last of them is read again when the context is next asked, because its logits were not kept. So are the
        tokens before it of which the method did not keep enough: those of an open chunk at most, all of them for
        `infllm` and for `esa` with `compress="pca"`. These two and `esa` read them in other blocks than before.
        """
        with self.in_use():
            n_tokens = tokens_of(n_tokens, "n_tokens", least=0)
            if n_tokens > len(self):
                raise UsageError(f"n_tokens is {n_tokens}; expected {len(self)} or less, the length of the context")
            if n_tokens < self.cache.length or (n_tokens == self.cache.length and self.logits is None):
                self.cache.truncate(self.cache.nearest(max(0, n_tokens - 1)))
                self.logits = None
            del self.token_ids[n_tokens:]  # last: until here the tokens behind the cache would be read again

    def close(self) -> None:
        """Free the context's memory and files. Any later use raises `UsageError`; closing it again does nothing.

        Raises `UsageError` while it is being asked.
        """
        if self._cache is not None:
            with self.in_use():
                self._cache = self.logits = None

    def __enter__(self) -> Self:
        self.cache  # noqa: B018  refuses a context that was closed
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def save(self, path: str | Path) -> None:
        """Write the context to a file, for `Engine.open_context`; the file appears whole or not at all.

        Time and bytes: one copy of its keys and values. Raises `CapacityError` where they cannot be written.
        """
        with self.in_use():
            save(path_of(path), self.data, self.identity)

    @contextmanager
    def adding(self, ids: Sequence[int]) -> Iterator[None]:
        """Append `ids` for the code inside to prefill; if that fails, those that are not cached yet are dropped."""
        before = len(self)
        self.token_ids.extend(ids)
        try:
            yield
        except BaseException:
            del self.token_ids[max(before, self.cache.length) :]
            raise

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold the context for one call. Raises `UsageError` if another call holds it."""
        if not self._busy.acquire(blocking=False):
            raise UsageError("this context is being asked already: wait for that answer, or ask a fork() of it")
        try:
            yield
        finally:
            self._busy.release()
