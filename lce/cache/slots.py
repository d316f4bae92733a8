"""The slots of a pool: their memory, the pages in them, growth, and the order in which they are filled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lce.cache.formats import Parts
from lce.cache.movers import Mover
from lce.cache.pages import Numbers

NEVER = np.iinfo(np.int64).max
QUEUED = 1024  # the fewest slots in a queue, if there are enough


class Slots(NamedTuple):
    """A pool's slots: slabs with the parts of stored pages, and which page each slot holds."""

    slabs: tuple[Parts, ...]
    group: Numbers  # the head group of each slot's page; -1: free
    chunk: Numbers
    used: Numbers  # the last request that used each slot

    @classmethod
    def none(cls) -> Slots:
        return cls((), *np.zeros((3, 0), np.int64))

    def with_slab(self, slab: Parts) -> Slots:
        """Return these slots followed by those of another slab."""
        return self._with((*self.slabs, slab), len(self.group) + len(slab[0]))

    def moved_to(self, slab: Parts, mover: Mover) -> Slots:
        """Return the slots of a larger slab, with these slots' contents in the first ones. Bytes: one copy."""
        n = len(self.group)
        if n:
            mover.wait(np.arange(n))
            for x, old in zip(slab, self.slabs[0], strict=True):
                x[:n] = old
        return self._with((slab,), len(slab[0]))

    def _with(self, slabs: tuple[Parts, ...], n_slots: int) -> Slots:
        n = len(self.group)
        group, (chunk, used) = np.full(n_slots, -1), np.zeros((2, n_slots), np.int64)
        group[:n], chunk[:n], used[:n] = self[1:]
        return Slots(slabs, group, chunk, used)


class SlotQueue:
    """Slots in the order in which they are filled: free ones, then the least recently used.

    The queue has a sixteenth of all slots, so that few requests scan all slots. Slots used since the queue was made are
    skipped; slots outside the queue were used later.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Empty the queue, because its slots are no longer the oldest."""
        self._queue = np.zeros((2, 0), np.int64)  # slots, and the request that last used each; -1: free

    def renew(self, n: int, slots: Slots, free: NDArray[np.bool_], busy: NDArray[np.bool_]) -> None:
        """Queue at least `n` slots, or all that are `free` or not `busy`. Time: O(n_slots)."""
        n_slots = len(slots.group)
        n_queued = min(max(n, n_slots // 16, QUEUED), n_slots)
        age = np.where(free, -1, np.where(busy, NEVER, slots.used))
        oldest = np.sort(np.argpartition(age, n_queued - 1)[:n_queued]) if n_queued else np.arange(0)
        oldest = oldest[age[oldest] < NEVER]
        oldest = oldest[np.argsort(age[oldest], kind="stable")]
        self._queue = np.stack((oldest, age[oldest]))

    def take(self, n: int, slots: Slots, clock: int) -> Numbers:
        """Return the first `n` slots that may be filled, or fewer.

        Slots that request `clock` uses may not be filled.
        """
        queued, age = self._queue
        free, used = slots.group[queued] < 0, slots.used[queued]
        good = np.flatnonzero(np.where(age < 0, free, ~free & (used == age) & (used < clock)))[:n]
        self._queue = self._queue[:, good[-1] + 1 if len(good) else 0 :]
        taken: Numbers = queued[good]
        return taken
