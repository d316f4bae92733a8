"""A context: a sequence that an engine has read, and may go on reading."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from lce.cache.kv import KVCache
from lce.engine.saving import Identity, save
from lce.errors import UsageError
from lce.models.rope import Rope


class Maker(Protocol):
    """What fills a context's cache."""

    @property
    def identity(self) -> Identity: ...


class Context:
    """A prefilled sequence that can be asked, forked and saved.

    `token_ids` is everything said so far; the cache may lag behind it by the tokens that were drawn last and not read
    yet. Asking a context adds the question and the answer to it: ask a `fork` to keep it as it is. A context is used by
    one call at a time; different contexts of one engine may be used from different threads.

    A call that fails or is interrupted while it reads takes back what it said and has not read: the context is then as
    it was before, but for the whole blocks that were read.
    """

    def __init__(self, cache: KVCache, rope: Rope, maker: Maker, announced: int) -> None:
        self.maker = maker  # what fills the cache; another engine must not
        self.cache = cache
        self.rope = rope
        self.announced = announced  # tokens, which some RoPE scalings depend on
        self.token_ids: list[int] = []
        self.logits: Tensor | None = None  # [vocab], after the last token in the cache
        self._busy = threading.Lock()

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"Context({len(self)} tokens, {self.cache.bytes_by_tier['device']} bytes)"

    @property
    def unread(self) -> list[int]:
        """Tokens said but not yet in the cache."""
        return self.token_ids[self.cache.length :]

    def fork(self) -> Context:
        """A context of its own that starts as this one. Bytes: one copy of its cache."""
        with self.in_use():
            context = Context(self.cache.copy(), self.rope, self.maker, self.announced)
            context.token_ids = list(self.token_ids)
            context.logits = self.logits
            return context

    def save(self, path: str | Path) -> None:
        """Write the context to a file, for `Engine.open_context`; it appears whole or not at all.

        Time and bytes: one copy of its keys and values. Raises `CapacityError` where they cannot be written.
        """
        with self.in_use():
            save(Path(path), self.cache, self.token_ids, self.logits, self.maker.identity, self.announced)

    @contextmanager
    def saying(self, ids: Sequence[int]) -> Iterator[None]:
        """Add `ids` to what is said, for a block of code that reads them; unread ones are taken back if it fails."""
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
