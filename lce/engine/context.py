"""A context: a sequence that an engine has prefilled and can go on with."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lce.engine.identity import Identity
from lce.engine.saving import ContextData, save
from lce.errors import UsageError
from lce.models.rope import Rope


class Context:
    """A prefilled sequence that can be asked, forked and saved.

    `token_ids` is the whole sequence. The cache may lag behind it: the last token of an answer is prefilled when the
    next tokens are. Asking a context adds the question and the answer to it; ask a `fork` to keep the context as it
    is. One call at a time uses a context; different contexts of one engine may be used from different threads.

    If prefill fails or is interrupted, tokens that are not cached yet are dropped; cached blocks stay.
    """

    def __init__(self, data: ContextData, rope: Rope, identity: Identity) -> None:
        self.identity = identity  # of the engine that filled the cache; no other engine may use it
        self.rope = rope
        self.cache = data.cache
        self.token_ids = list(data.token_ids)
        self.logits = data.logits  # [vocab], after the last token in the cache
        self.announced = data.announced  # tokens; some RoPE scalings depend on it
        self.source = data.source  # the file that it was opened from
        self._busy = threading.Lock()

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"Context({len(self)} tokens, {self.cache.bytes_by_tier['device']} bytes)"

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

    def save(self, path: str | Path) -> None:
        """Write the context to a file, for `Engine.open_context`; the file appears whole or not at all.

        Time and bytes: one copy of its keys and values. Raises `CapacityError` where they cannot be written.
        """
        with self.in_use():
            save(Path(path), self.data, self.identity)

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
