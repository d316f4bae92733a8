"""The memory and disk that this process has promised to its contexts.

Free memory alone would admit two contexts that do not fit together, because neither uses all its memory yet. So each
context takes a promise, and plans count the unused promises of other contexts as taken. A promise ends with the
context's cache: when the context is closed or freed, or when the call that made it fails.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from lce.cache.kv import KVCache
from lce.cache.layout import CacheLayout
from lce.engine.planning import Planner


@dataclass(frozen=True)
class Promise:
    """The memory and disk that a cache may use: what `planner` says `n_tokens` tokens need."""

    planner: Planner
    n_tokens: int

    def unused(self, cache: KVCache) -> dict[str, int]:
        """Return the promised bytes that the cache does not use yet, by kind of memory."""
        promised, used = self.planner.bytes_needed(self.n_tokens), self.planner.bytes_used(cache)
        return {kind: max(0, n_bytes - used.get(kind, 0)) for kind, n_bytes in promised.items()}


class Allowance:
    """The promises of a process. Different contexts may use it from different threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promises: WeakKeyDictionary[KVCache, Promise] = WeakKeyDictionary()
        os.register_at_fork(after_in_child=self._unlock)  # another thread of the parent may have it

    def _unlock(self) -> None:
        self._lock = threading.Lock()

    def planner(self, layout: CacheLayout, method: str, weights: Mapping[str, int] | None = None) -> Planner:
        """Return a planner for a context that does not exist yet, beside weights that are not loaded yet."""
        return Planner.of(layout, method, weights, self._unused())

    def file_planner(self, layout: CacheLayout, method: str) -> Planner:
        """Return a planner for a context that does not exist yet and is prefilled into a file."""
        return Planner.into_file(layout, method, self._unused())

    def promise(self, cache: KVCache, method: str, n_tokens: int) -> None:
        """Promise a cache what `n_tokens` tokens need, unless that much is promised already.

        Raises `CapacityError` if less is available; earlier promises stay.
        """
        if n_tokens <= self.promised(cache):
            return
        with self._lock:
            held = self._promises.get(cache)
            promised = {} if held is None else held.planner.bytes_needed(held.n_tokens)
            planner = Planner.growing(cache, method, self._unused(besides=cache), promised)
            planner.check(n_tokens)
            self._promises[cache] = Promise(planner, n_tokens)

    def promised(self, cache: KVCache) -> int:
        """Return how many tokens a cache may grow to; 0 without a promise."""
        held = self._promises.get(cache)
        return 0 if held is None else held.n_tokens

    def give_back(self, cache: KVCache, n_tokens: int) -> None:
        """Reduce the promise of a cache to what `n_tokens` tokens need."""
        with self._lock:
            held = self._promises.get(cache)
            if held is not None and n_tokens < held.n_tokens:
                self._promises[cache] = Promise(held.planner, n_tokens)

    def _unused(self, besides: KVCache | None = None) -> Mapping[str, int]:
        """Return what is promised to other caches and not used yet, in bytes by kind of memory."""
        total: Counter[str] = Counter()
        for cache, promise in list(self._promises.items()):
            if cache is not besides:
                total.update(promise.unused(cache))
        return total


ALLOWANCE = Allowance()
