"""The tiers in memory: pools of slots for pages. The least recently used pages leave first.

The device's pool is one tensor for keys and one for values, which kernels read in place. The host's pool grows by slabs
of page-locked memory and never moves pages.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.fetching import Fetch
from lce.cache.formats import KVFormat, Parts, converted
from lce.cache.layout import UNBOUNDED, CacheLayout
from lce.cache.movers import Mover, Unpack
from lce.cache.pages import Numbers, Pages, PageTable, slices
from lce.cache.slots import SlotQueue, Slots
from lce.cache.tier import Nowhere, Tier, Traffic, joined
from lce.errors import CapacityError
from lce.profiling import timed

AT_ONCE = 64 << 20  # bytes of pages read from a lower tier, or written to it, at a time


class Pool(Tier):
    """A tier of at most `limit` slots in one kind of memory, for pages as `format` stores them.

    Pages of the first `pinned_chunks` chunks never leave. Without `slab_slots` all slots are one slab: allocated at the
    start, or growing by half if there is no limit. Otherwise slabs of `slab_slots` slots are added as needed.
    Bookkeeping takes 24 bytes a slot and 8 a page of the context. Time to free slots: O(n_slots / 16), and now and then
    O(n_slots).

    A slot holds a page if its `group` and `chunk` name the page and the index leads to the slot. After an interruption
    the index may not lead to a slot: the slot counts as free.
    """

    def __init__(
        self, name: str, format: KVFormat, layout: CacheLayout, mover: Mover, below: Tier, limit: int = UNBOUNDED,
        pinned_chunks: int = 0, *, slab_slots: int | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.layout = layout
        self.mover = mover
        self.below = below
        self.limit = limit
        self.pinned_chunks = pinned_chunks
        self.format = format
        self.page_bytes = format.page_bytes
        self.traffic = Traffic()
        self.clock = 0  # requests so far
        self.slab_slots = slab_slots
        self.slot = PageTable(layout, mover)  # slot of each page
        self._queue = SlotQueue()
        self._slots = Slots.none()
        if slab_slots is None:
            self._grow(16 if limit == UNBOUNDED else limit)

    @property
    def k(self) -> Tensor:
        """Keys of the only slab, `[n_slots, P, L, D]`."""
        return self._slots.slabs[0][0]

    @property
    def v(self) -> Tensor:
        """Values of the only slab, `[n_slots, P, L, D]`."""
        return self._slots.slabs[0][1]

    @property
    def group(self) -> Numbers:
        return self._slots.group

    @property
    def chunk(self) -> Numbers:
        return self._slots.chunk

    @property
    def used(self) -> Numbers:
        return self._slots.used

    @property
    def n_slots(self) -> int:
        return len(self.group)

    @property
    def n_free(self) -> int:
        """How many pages can come without another leaving."""
        return UNBOUNDED if self.limit == UNBOUNDED else int((self.group < 0).sum()) + self.limit - self.n_slots

    @property
    def capacity(self) -> int:
        """The most pages at once, besides pinned ones."""
        return self.limit - self.pinned_chunks * self.layout.n_layers * self.layout.n_groups

    @property
    def n_bytes(self) -> int:  # type: ignore[override]
        if self.slab_slots is not None:
            return self.layout.slab_bytes_for(self.n_slots)
        return self.n_slots * self.page_bytes

    def find(self, pages: Pages) -> Numbers:
        """Return the slot of each page, -1 for missing pages."""
        return self.slot[pages]

    def holds(self, pages: Pages) -> NDArray[np.bool_]:
        return (self.find(pages) >= 0) | self.below.holds(pages)

    def order(self, pages: Pages) -> Numbers:
        return np.argsort(self.find(pages), kind="stable")

    @timed("cache")
    def bring(self, pages: Pages) -> Numbers:
        """Bring at most `capacity` pages into slots; return the slots. The pages stay until the next request."""
        slots, missing = self._request(pages)
        missing = missing[self.below.order(pages.at(missing))]
        for some in slices(len(missing), AT_ONCE // self.page_bytes):
            part = missing[some]
            found = self.below.read(pages.at(part))
            slots[part] = self._fill(pages.at(part), found, self._unpacked)
        return slots

    def fetch(self, pages: Pages) -> tuple[Fetch, Pages, Numbers] | None:
        """Return `bring` as work for another thread, the missing pages, and their slots; None if no page is missing.

        Until the work has ended, nothing else may use this pool or the tiers below. Then call `arrived`.
        """
        self.clock += 1
        slots = self.find(pages)
        self.used[slots[slots >= 0]] = self.clock
        missing = pages.at(np.flatnonzero(slots < 0))
        if not len(missing.group):
            return None
        missing = missing.at(self.below.order(missing))
        slots = self._vacate(len(missing.group))
        slabs, after = self._slots.slabs, self.mover.now()

        def work() -> None:
            with torch.inference_mode():  # the mode is per thread
                for some in slices(len(slots), AT_ONCE // self.page_bytes):
                    self.mover.put(slabs, slots[some], self.below.read(missing.at(some)), after, self._unpacked)

        return Fetch(work), missing, slots

    def arrived(self, pages: Pages, slots: Numbers) -> None:
        """Enter pages that were put into slots in the index."""
        self.used[slots], self.chunk[slots] = self.clock, pages.chunk
        self.group[slots] = pages.group
        self.slot[pages] = slots
        self.traffic.bytes_in += len(slots) * self.page_bytes

    def read(self, pages: Pages) -> Parts:
        """Return copies of pages. Missing pages get slots only if slots are free."""
        slots, missing = self._request(pages)
        if not len(missing):
            return self.take(slots)
        here, found = np.flatnonzero(slots >= 0), self.below.read(pages.at(missing))
        held = self.take(slots[here])
        found = self._unpacked(tuple(self.mover.upload(x) for x in found))
        if self.n_free >= len(missing):
            self._fill(pages.at(missing), found)
        return joined((here, missing), (held, found), self.mover) if len(here) else found

    def read_rows(self, pages: Pages, offsets: Numbers) -> Tensor:
        slots = self.find(pages)
        here, missing = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        self.used[slots[here]] = self.clock
        self.mover.wait(np.unique(slots[here]))
        held = self._rows(slots[here], offsets[here])
        if not len(missing):
            return held
        rest = self.mover.upload(self.below.read_rows(pages.at(missing), offsets[missing]))
        return joined((here, missing), ((held,), (rest,)), self.mover)[0]

    def _rows(self, slots: Numbers, offsets: Numbers) -> Tensor:
        """Return single tokens of slots, `[n, 2, P, D]`."""
        if self.slab_slots is None:
            slot, offset = self.mover.upload(torch.from_numpy(np.stack((slots, offsets))))
            return self.format.tokens(self._slots.slabs[0], slot, offset)
        rows = torch.empty(len(slots), 2, self.layout.page_heads, self.layout.head_dim, dtype=self.layout.dtype)
        slab, slots = np.divmod(slots, self.slab_slots)
        for number in np.unique(slab).tolist():
            here = np.flatnonzero(slab == number)
            slot, offset = (torch.from_numpy(x[here]) for x in (slots, offsets))
            rows[torch.from_numpy(here)] = self.format.tokens(self._slots.slabs[number], slot, offset)
        return rows

    def write(self, pages: Pages, *parts: Tensor) -> None:
        for some in slices(len(pages.group), self.capacity):
            self.clock += 1
            part = pages.at(some)
            self._free(part)  # left by a failed call
            self._fill(part, tuple(x[some] for x in parts))

    def forget(self, pages: Pages) -> None:
        self._free(pages)
        self.below.forget(pages)

    def take(self, slots: Numbers) -> Parts:
        """Return copies of the pages in these slots."""
        if not len(slots):
            return tuple(self.mover.empty((0, *shape), x) for shape, x in self.format.shapes)
        self.mover.wait(slots)
        self.traffic.bytes_out += len(slots) * self.page_bytes
        return self.mover.pick(self._slots.slabs, slots)

    def _hand_down(self, slots: Numbers, target: Tier) -> None:
        """Write the pages in these slots to another tier."""
        target.write(self._pages(slots), *converted(self.take(slots), self.format, target.format))

    def _unpacked(self, parts: Parts) -> Parts:
        """Convert pages of the tier below to this pool's format."""
        return converted(parts, self.below.format, self.format)

    def write_through(self, pages: Pages, *parts: Tensor) -> None:
        """Begin to copy pages, which are about to be written here, to the pool below, so that they can leave at once.

        Copies as many as that pool has free slots for; the other pages move down when they leave. Raises
        `CapacityError` if that pool is the last tier and has no slots for all.
        """
        below = self.below
        if not self.mover.asynchronous or not isinstance(below, Pool):
            return
        n = len(pages.group)
        some = slice(n if isinstance(below.below, Nowhere) else min(n, below.n_free))
        if some.stop:
            below.write(pages.at(some), *converted(tuple(x[some] for x in parts), self.format, below.format))
            self.traffic.bytes_out += some.stop * self.page_bytes

    def copy_down(self, target: Tier, held_by: Tier) -> None:
        """Write to `target` the pages here that `held_by` does not have."""
        held = self._holding(np.arange(self.n_slots))
        held = held[~held_by.holds(self._pages(held))]
        for some in slices(len(held), AT_ONCE // self.page_bytes):
            self._hand_down(held[some], target)

    def _request(self, pages: Pages) -> tuple[Numbers, Numbers]:
        """Return the slots of pages, -1 for missing ones, and which pages are missing; record their use."""
        self.clock += 1
        slots = self.find(pages)
        missing = np.flatnonzero(slots < 0)
        self.used[slots[slots >= 0]] = self.clock
        self.traffic.misses += len(missing)
        self.traffic.hits += len(slots) - len(missing)
        return slots, missing

    def _pages(self, slots: Numbers) -> Pages:
        return Pages(self.group[slots], self.chunk[slots])

    def _fill(self, pages: Pages, parts: Parts, unpack: Unpack = lambda pages: pages) -> Numbers:
        """Put pages into vacated slots; return the slots. Pages are in the pool once the index has them, at the end."""
        slots = self._vacate(len(pages.group))
        self.mover.put(self._slots.slabs, slots, parts, unpack=unpack)
        self.arrived(pages, slots)
        return slots

    def _vacate(self, n: int) -> Numbers:
        """Free `n` slots and return them; dirty pages move down first."""
        slots = self._victims(n)
        held = self._holding(slots)
        dirty = held[~self.below.holds(self._pages(held))]
        if len(dirty):
            self._hand_down(dirty, self.below)
        self._drop(held)
        return slots

    def _victims(self, n: int) -> Numbers:
        """Return `n` slots to fill: free ones, then the least recently used; none pinned, or in use by this request."""
        n_free = int((self.group < 0).sum())
        if self.n_slots < self.limit and n_free < n:
            self._grow(n - n_free)
            n_free = int((self.group < 0).sum())
        slots = self._queue.take(n, self._slots, self.clock)
        if len(slots) < n or (self.group[slots] < 0).sum() < min(n, n_free):  # slots became free since it was made
            free = np.ones(self.n_slots, bool)
            free[self._holding(np.arange(self.n_slots))] = False
            self.group[free] = -1  # left by an interruption
            self._queue.renew(n, self._slots, free, (self.chunk < self.pinned_chunks) | (self.used >= self.clock))
            slots = self._queue.take(n, self._slots, self.clock)
        if len(slots) < n:
            raise CapacityError(f"the {self.name} cache has no space for {n} more pages; give it a larger budget")
        return np.sort(slots)

    def release(self, slots: Numbers) -> None:
        """Mark the pages in these slots as the next to leave."""
        self.used[slots] = 0
        self._queue.clear()

    def _holding(self, slots: Numbers) -> Numbers:
        """Return those of these slots that hold a page."""
        slots = slots[self.group[slots] >= 0]
        held: Numbers = slots[self.slot[self._pages(slots)] == slots]
        return held

    def _free(self, pages: Pages) -> None:
        """Remove pages from this pool."""
        slots = self.find(pages)
        self._drop(slots[slots >= 0])

    def _drop(self, slots: Numbers) -> None:
        """Free slots."""
        self.slot[self._pages(self._holding(slots))] = -1
        self.group[slots] = -1

    def _grow(self, n: int) -> None:
        """Add at least `n` slots, or as many as the limit allows."""
        shapes, wanted = self.format.shapes, min(self.n_slots + n, self.limit)
        if self.slab_slots is None:
            n_slots = min(max(wanted, self.n_slots * 3 // 2), self.limit)
            slab = tuple(self.mover.empty((n_slots, *shape), dtype) for shape, dtype in shapes)
            self._slots = self._slots.moved_to(slab, self.mover)
            return
        while self.n_slots < wanted:
            size = min(self.slab_slots, self.limit - self.n_slots)
            self._slots = self._slots.with_slab(self.mover.slab(shapes, size))
