"""Pools, the tiers in memory. A pool has slots for pages; the least recently used pages leave first.

Another thread gathers pages for the device from host memory, or reads them from a file, while the model computes. The
process has one such thread, which the first `Fetch` starts; a `Pinned` mover divides its copies among more threads.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lce.cache.formats import Parts
from lce.cache.layout import HOST, CacheLayout
from lce.cache.limits import Limits
from lce.cache.movers import Cuda, Fetch, Mover, Numbers, Pinned
from lce.cache.shared import own_memory
from lce.cache.tier import UNBOUNDED, Nowhere, Pages, Tier, slices
from lce.errors import CapacityError
from lce.profiling import timed

AT_ONCE = 64 << 20  # the most bytes of pages that are read from or written to a lower tier at a time
SLAB = 256 << 20  # the bytes of a slab of the host's pool: a power of two, as page-locked memory is allocated
NEVER = np.iinfo(np.int64).max  # larger than the last use of any slot: for slots that must not be filled
QUEUED = 1024  # a queue of slots to fill has at least so many slots, or all that may be filled


class Slots(NamedTuple):
    """The slots of a pool: slabs of memory, and which page each slot holds.

    A slot holds the page that its `group` and `chunk` name, if the pool's index maps this page to the slot. Otherwise
    the slot is free.
    """

    slabs: tuple[Parts, ...]
    group: Numbers  # the head group of each slot's page; -1 marks a free slot
    chunk: Numbers  # the chunk of each slot's page
    used: Numbers  # the number of the last request that used each slot

    def of_slabs(self, slabs: tuple[Parts, ...]) -> "Slots":
        """Return slots of larger or more `slabs`: the first slots hold the same pages as now, others are free."""
        more = (0, sum(len(slab[0]) for slab in slabs) - len(self.group))
        group = np.pad(self.group, more, constant_values=-1)
        return Slots(slabs, group, np.pad(self.chunk, more), np.pad(self.used, more))


class Pool(Tier):
    """A tier of at most `max_slots` slots, of one page each, in one kind of memory.

    Pages of the first `pinned_chunks` chunks never leave. Bookkeeping takes 24 bytes per slot and 8 bytes per page of
    the context. Time to free slots: O(n_slots / 16), and O(n_slots) when the queue of slots is renewed.
    """

    def __init__(self, layout: CacheLayout, below: Tier, mover: Mover, max_slots: int, pinned_chunks: int = 0) -> None:
        self.mover = mover
        super().__init__(layout, below)
        self.max_slots = max_slots
        self.pinned_chunks = pinned_chunks
        acts = [layer in layout.acting_layers for layer in layout.layers]
        self._pins = np.repeat(acts, layout.n_groups)  # for each head group, whether its first chunks are pinned
        self.clock = 0  # the number of requests so far
        self._queue = np.zeros((2, 0), np.int64)  # the slots to fill next, and when each was last used (-1: free)
        self.slots = Slots((), *np.zeros((3, 0), np.int64))  # replaced in one assignment when the pool grows

    @property
    def n_slots(self) -> int:
        return len(self.slots.group)

    @property
    def n_free(self) -> int:
        """The number of pages that can be added before another page must leave."""
        return int((self.slots.group < 0).sum()) + self.max_slots - self.n_slots

    @property
    def capacity(self) -> int:
        """The largest number of pages in the pool at once, pinned pages not counted."""
        return self.max_slots - self.pinned_chunks * len(self.layout.acting_layers) * self.layout.n_groups

    @property
    def n_bytes(self) -> int:
        return self.n_slots * self.page_bytes

    def order(self, pages: Pages) -> Numbers:
        return np.argsort(self.index[pages], kind="stable")

    @timed("cache")
    def bring(self, pages: Pages) -> Numbers:
        """Return the slots of at most `capacity` pages, missing ones read first. They stay until the next request."""
        slots, missing = self._request(pages)
        if len(missing):
            missing = missing[self.below.order(pages.at(missing))]
            slots[missing] = self._vacate(len(missing))
            self._load(pages.at(missing), slots[missing], self.slots.slabs)
            self.arrived(pages.at(missing), slots[missing])
        return slots

    def fetch(self, pages: Pages) -> tuple[Fetch, Pages, Numbers] | None:
        """Return a `Fetch` of the missing pages, these pages, and their slots, for `arrived`; None if all are here."""
        _, absent = self._request(pages, counted=False)
        if not len(absent):
            return None
        missing, slots = pages.at(absent[self.below.order(pages.at(absent))]), self._vacate(len(absent))
        slabs, after = self.slots.slabs, self.mover.now()

        def work() -> None:
            with torch.inference_mode():  # inference mode is set for each thread
                self._load(missing, slots, slabs, after)

        return Fetch(work), missing, slots

    def _load(self, pages: Pages, slots: Numbers, slabs: Sequence[Parts], after: object = None) -> None:
        """Copy pages from the tier below to slots, once the device work that `after` marks is done: see `Mover.put`."""
        for some in slices(len(slots), AT_ONCE // self.page_bytes):
            with self.mover.beside():
                found = self.below.lend(pages.at(some)) or self.below.read(pages.at(some))
            self.mover.put(slabs, slots[some], found, after, self._unpacked)

    def arrived(self, pages: Pages, slots: Numbers) -> None:
        """Record in the pool's index that `pages` are now in `slots`."""
        self.slots.used[slots], self.slots.chunk[slots] = self.clock, pages.chunk
        self.slots.group[slots] = pages.group
        self.index[pages] = slots
        self.traffic.bytes_in += len(slots) * self.page_bytes

    def read(self, pages: Pages) -> Parts:
        """Return copies of pages. Pages read from the tier below get slots only if slots are free."""
        slots, missing = self._request(pages)
        if not len(missing):
            return self.take(slots)
        here, rest = np.flatnonzero(slots >= 0), self.below.read(pages.at(missing))
        rest = self._unpacked(tuple(self.mover.upload(x) for x in rest))
        found = self.joined((here, missing), self.take(slots[here]), rest) if len(here) else rest
        if self.n_free >= len(missing):
            self._fill(pages.at(missing), rest)
        return found

    def take(self, place: Numbers) -> Parts:
        self.mover.wait(place)
        self.traffic.bytes_out += len(place) * self.page_bytes
        return self.mover.pick(self.slots.slabs, place)

    def lend(self, pages: Pages) -> Parts | None:
        place = self.index[pages]
        if not len(place) or place.min() < 0:
            return None
        self.mover.wait(place)
        found = self.mover.lend(self.slots.slabs, place)
        if found is not None:
            self._request(pages)
            self.traffic.bytes_out += len(place) * self.page_bytes
        return found

    def write(self, pages: Pages, *parts: Tensor) -> None:
        for some in slices(len(pages.group), self.capacity):
            self.clock += 1
            part = pages.at(some)
            self._drop(self.index[part])  # pages that an earlier, failed call left here
            self._fill(part, tuple(x[some] for x in parts))

    def forget(self, pages: Pages) -> None:
        self._drop(self.index[pages])
        self.below.forget(pages)

    def write_through(self, pages: Pages, *parts: Tensor) -> None:
        """Begin to copy pages to free slots of the pool below, so that these pages can leave later without a copy."""
        below = self.below
        if not self.mover.asynchronous or not isinstance(below, Pool):
            return
        n = len(pages.group)
        some = slice(n if isinstance(below.below, Nowhere) else min(n, below.n_free))  # the last tier takes all
        if some.stop:
            below.write(pages.at(some), *self._packed(*(x[some] for x in parts)))
            self.traffic.bytes_out += some.stop * self.page_bytes

    def copy_down(self, target: Tier, held_by: Tier) -> None:
        """Write to `target` the pages of this pool that are neither in the tier `held_by` nor below it."""
        held = self._holding(np.arange(self.n_slots))
        self._hand_down(held[~held_by.holds(self._pages(held))], target)

    def release(self, slots: Numbers) -> None:
        """Mark the pages in `slots` as the next to leave."""
        self.slots.used[slots] = 0
        self._queue = self._queue[:, :0]  # emptied, so that a new queue is made, with these slots in front

    def _hand_down(self, slots: Numbers, target: Tier) -> None:
        """Write the pages in these slots to another tier: a lower tier, or the same tier of another stack."""
        for some in slices(len(slots), AT_ONCE // self.page_bytes):
            parts = self.take(slots[some])
            parts = parts if isinstance(target, type(self)) else self._packed(*parts)
            target.write(self._pages(slots[some]), *parts)

    def _packed(self, *parts: Tensor) -> Parts:
        """Convert pages of this pool to the form that the tiers below have: packed in the storage format."""
        return parts

    def _unpacked(self, parts: Parts) -> Parts:
        """Convert pages from the form that the tier below has to the form that this pool has."""
        return parts

    def _request(self, pages: Pages, *, counted: bool = True) -> tuple[Numbers, Numbers]:
        """Return the slot of each page, -1 if missing, and the indices of missing pages; note that slots were used."""
        self.clock += 1
        slots, here, missing = self.find(pages)
        self.slots.used[slots[here]] = self.clock
        self.traffic.misses += len(missing) if counted else 0
        self.traffic.hits += len(here) if counted else 0
        return slots, missing

    def _pages(self, slots: Numbers) -> Pages:
        return Pages(self.slots.group[slots], self.slots.chunk[slots])

    def _fill(self, pages: Pages, parts: Parts) -> None:
        slots = self._vacate(len(pages.group))
        self.mover.put(self.slots.slabs, slots, parts)
        self.arrived(pages, slots)

    def _vacate(self, n: int) -> Numbers:
        """Free `n` slots and return them. Pages that no tier below has are first written to the tier below."""
        slots = self._victims(n)
        held = self._holding(slots)
        dirty = held[~self.below.holds(self._pages(held))]
        if len(dirty):
            self._hand_down(dirty, self.below)
        self._drop(held)
        return slots

    def _victims(self, n: int) -> Numbers:
        """Return `n` slots to fill: free slots, then the least recently used, but none that is pinned or in use now.

        The slots come from a queue of a sixteenth of all slots, so that few requests scan all slots. Slots that were
        used since the queue was made are skipped. Slots outside the queue were used later than slots in it.
        """
        n_free = int((self.slots.group < 0).sum())
        if self.n_slots < self.max_slots and n_free < n:
            self.slots = self._grown(min(self.n_slots + n - n_free, self.max_slots))
            n_free = int((self.slots.group < 0).sum())
        found = self._take_queued(n)
        # The queue lacks slots that became free after it was made.
        if len(found) < n or (self.slots.group[found] < 0).sum() < min(n, n_free):
            self._renew_queue(n)
            found = self._take_queued(n)
        if len(found) < n:
            raise CapacityError(f"the {self.name} cache has no space for {n} more pages; give it a larger budget")
        return np.sort(found)

    def _take_queued(self, n: int) -> Numbers:
        queued, age = self._queue
        free, used = self.slots.group[queued] < 0, self.slots.used[queued]
        good = np.flatnonzero(np.where(age < 0, free, ~free & (used == age) & (used < self.clock)))[:n]
        self._queue = self._queue[:, good[-1] + 1 if len(good) else 0 :]
        taken: Numbers = queued[good]
        return taken

    def _renew_queue(self, n: int) -> None:
        """Renew the queue: at least `n` slots to fill, or all slots that may be filled. Time: O(n_slots)."""
        slots, n_queued = self.slots, min(max(n, self.n_slots // 16, QUEUED), self.n_slots)
        free = np.ones(self.n_slots, bool)
        free[self._holding(np.arange(self.n_slots))] = False
        slots.group[free] = -1  # an interruption may have left another number
        busy = ((slots.chunk < self.pinned_chunks) & self._pins[slots.group]) | (slots.used >= self.clock)
        age = np.where(free, -1, np.where(busy, NEVER, slots.used))
        oldest = np.sort(np.argpartition(age, n_queued - 1)[:n_queued]) if n_queued else np.arange(0)
        oldest = oldest[age[oldest] < NEVER]
        oldest = oldest[np.argsort(age[oldest], kind="stable")]
        self._queue = np.stack((oldest, age[oldest]))

    def _grown(self, n_slots: int) -> Slots:
        """Return `Slots` with the same pages and at least `n_slots` slots."""
        raise NotImplementedError

    def _holding(self, slots: Numbers) -> Numbers:
        slots = slots[self.slots.group[slots] >= 0]
        return slots.compress(self.index[self._pages(slots)] == slots)

    def _drop(self, slots: Numbers) -> None:
        """Free slots; entries of -1 are ignored."""
        slots = slots[slots >= 0]
        self.index[self._pages(self._holding(slots))] = -1
        self.slots.group[slots] = -1


class Device(Pool):
    """The pool in the device's memory, which kernels read in place: one slab, keys and values `[n_slots, P, L, D]`.

    The pool shares the device's budget with buffers of at least `buffer_tokens` tokens, and all its slots are allocated
    at once. Without a budget, the number of slots grows by half when all are in use.
    """

    def __init__(self, layout: CacheLayout, below: Tier, buffer_tokens: int = 0) -> None:
        mover = Mover() if layout.on_cpu else Cuda(layout.device)
        super().__init__(layout, below, mover, Limits(layout).device_slots(buffer_tokens), Limits(layout).pinned_chunks)
        self.name = layout.device_tier
        self.page_bytes = layout.page_bytes
        self.slots = self._grown(16 if self.max_slots == UNBOUNDED else self.max_slots)

    def _grown(self, n_slots: int) -> Slots:
        """Copy the pages to a larger slab, and return its slots. Bytes: one copy of the pages."""
        n, n_slots = self.n_slots, min(max(n_slots, self.n_slots * 3 // 2), self.max_slots)
        shape = n_slots, self.format.heads, self.format.size, self.format.stored_dim
        make = self.mover.empty if not self.layout.on_cpu else partial(own_memory, device=self.layout.device, huge=True)
        slab = tuple(make(shape, self.format.stored_dtype) for _ in range(2))
        if n:
            self.mover.wait(np.arange(n))
            for x, old in zip(slab, self.slots.slabs[0], strict=True):
                x[:n] = old
        return self.slots.of_slabs((slab,))

    def _packed(self, *parts: Tensor) -> Parts:
        return (self.format.pack(*parts),)

    def _unpacked(self, parts: Parts) -> Parts:
        return self.format.unpack(*parts)

    def take_rows(self, place: Numbers, offsets: Numbers) -> Tensor:
        self.slots.used[place] = self.clock
        self.mover.wait(np.unique(place))
        slot, offset = self.mover.upload(torch.from_numpy(np.stack((place, offsets))))
        return torch.stack([x[slot, :, offset] for x in self.slots.slabs[0]], dim=1)


class Host(Pool):
    """The pool in the host's memory beside a GPU, with packed pages, in slabs of `SLAB` bytes, or more for large pages.

    Page-locked memory is allocated in powers of two, so with a budget the last slab has the largest that still fits.
    """

    name = HOST
    rank = 1

    @classmethod
    def limit(cls, layout: CacheLayout) -> int | None:
        if layout.on_cpu:
            return None
        if layout.budgets.host is None:
            return UNBOUNDED
        full, rest = divmod(layout.budgets.host, slab_bytes(layout))
        return full * slab_slots(layout) + power_of_two(rest + 1) // 2 // layout.format.page_bytes

    @classmethod
    def bytes_for(cls, layout: CacheLayout, n_pages: int) -> int:
        full, rest = divmod(n_pages, slab_slots(layout))
        if rest and layout.budgets.host is not None:
            return full * slab_bytes(layout) + power_of_two(rest * layout.format.page_bytes)
        return (full + (rest > 0)) * slab_bytes(layout)

    @classmethod
    def build(cls, layout: CacheLayout, below: Tier, n_tokens: int) -> "Host":
        return cls(layout, below, Pinned(layout.device), cls.limit(layout) or 0)

    @property
    def n_bytes(self) -> int:
        return self.bytes_for(self.layout, self.n_slots)

    def _grown(self, n_slots: int) -> Slots:
        slots = self.slots
        while len(slots.group) < n_slots:
            size = min(slab_slots(self.layout), self.max_slots - len(slots.group))
            slab = self.mover.empty((size, self.format.page_rows, *self.format.row_shape), self.format.row_dtype)
            slots = slots.of_slabs((*slots.slabs, (slab,)))
        return slots

    def take_rows(self, place: Numbers, offsets: Numbers) -> Tensor:
        self.slots.used[place] = self.clock
        self.mover.wait(np.unique(place))
        found = torch.empty(len(place), 2, self.format.heads, self.format.stored_dim, dtype=self.format.stored_dtype)
        slab, slots = np.divmod(place, slab_slots(self.layout))
        for number in np.unique(slab).tolist():
            here = np.flatnonzero(slab == number)
            (pages,), slot = self.slots.slabs[number], torch.from_numpy(slots[here])
            rows, extra = pages[slot, torch.from_numpy(offsets[here])], pages[slot, self.format.size :]
            found[torch.from_numpy(here)] = self.format.tokens(rows, extra)
        return found


def slab_bytes(layout: CacheLayout) -> int:
    """Return the bytes that one slab of the host's pool takes."""
    return max(SLAB, power_of_two(layout.format.page_bytes))


def slab_slots(layout: CacheLayout) -> int:
    """Return how many whole pages fit in a slab of the host's pool."""
    return slab_bytes(layout) // layout.format.page_bytes


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`; `n` is 1 or more."""
    return 1 << (n - 1).bit_length()
