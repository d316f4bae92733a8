"""The tiers in memory: pools of slots for pages, least recently used out first."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.layout import UNBOUNDED, CacheLayout
from lce.cache.movers import Mover, fitting
from lce.cache.packing import Parts, pack
from lce.cache.pages import Numbers, PageIndex, Pages, slices
from lce.cache.tier import Tier, Traffic, joined
from lce.errors import CapacityError

AT_ONCE = 64 << 20  # bytes of pages that are read from a lower tier, or written to it, in one go
NEVER = np.iinfo(np.int64).max


class Slots(NamedTuple):
    """What a pool's slots hold: `k v [n_slots, P, L, D]`, or packed pages, and of which page."""

    parts: Parts
    group: Numbers  # whose page a slot holds; -1: free
    chunk: Numbers
    used: Numbers  # the request that last used a slot


class Pool(Tier):
    """Slots for pages in one kind of memory, `k v [n_slots, P, L, D]` or packed ones: at most `limit` of them.

    Pages of the first `pinned_chunks` chunks never leave. An unbounded pool grows by half. Bookkeeping takes 26 bytes a
    slot and 8 a page of the context. Time to free slots: O(n_slots).

    A slot holds a page if its `group` and `chunk` say so and the index leads to it. An interruption may leave a slot
    to which the index does not lead: it is as good as free.
    """

    def __init__(
        self, name: str, layout: CacheLayout, mover: Mover, below: Tier, limit: int = UNBOUNDED, pinned_chunks: int = 0,
        *, packed: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        self.layout = layout
        self.mover = mover
        self.below = below
        self.limit = limit
        self.pinned_chunks = pinned_chunks
        self.packed = packed
        self.page_bytes = layout.stored_page_bytes if packed else layout.page_bytes
        self.traffic = Traffic()
        self.clock = 0  # requests so far
        self._slot = PageIndex(layout)
        self._slots = self._grown(None, 16 if limit == UNBOUNDED else limit)

    @property
    def k(self) -> Tensor:
        return self._slots.parts[0]

    @property
    def v(self) -> Tensor:
        return self._slots.parts[1]

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
        """Pages that can come without one leaving."""
        return UNBOUNDED if self.limit == UNBOUNDED else int((self.group < 0).sum())

    @property
    def capacity(self) -> int:
        """Pages that can be here at once beside the pinned ones."""
        return self.limit - self.pinned_chunks * self.layout.n_layers * self.layout.n_groups

    @property
    def n_bytes(self) -> int:  # type: ignore[override]
        return self.n_slots * self.page_bytes

    def find(self, pages: Pages) -> Numbers:
        """The slot of each page, -1 where it is not here."""
        return self._slot[pages]

    def holds(self, pages: Pages) -> NDArray[np.bool_]:
        return (self.find(pages) >= 0) | self.below.holds(pages)

    def bring(self, pages: Pages) -> Numbers:
        """Have these pages, at most `capacity`, in slots; the slots. The pages stay there until the next request."""
        slots, missing = self._request(pages)
        for some in slices(len(missing), AT_ONCE // self.page_bytes):
            part = missing[some]
            found = self.below.read(pages.at(part))
            slots[part] = self._fill(pages.at(part), *found)
        return slots

    def read(self, pages: Pages) -> Parts:
        """Missing pages pass by: they get slots only where slots are free."""
        slots, missing = self._request(pages)
        if not len(missing):
            return self.take(slots)
        here, found = np.flatnonzero(slots >= 0), self.below.read(pages.at(missing))
        held = self.take(slots[here])
        found = fitting(tuple(x.to(self.k.device) for x in found), held)
        if self.n_free >= len(missing):
            self._fill(pages.at(missing), *found)
        return joined((here, missing), (held, found), self.k.device)

    def read_rows(self, pages: Pages, offsets: Numbers) -> Tensor:
        slots, device = self.find(pages), self.k.device
        here, missing = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        self.used[slots[here]] = self.clock
        self.mover.wait(np.unique(slots[here]))
        held = self._rows(*(torch.from_numpy(x[here]).to(device) for x in (slots, offsets)))
        if not len(missing):
            return held
        rest = self.below.read_rows(pages.at(missing), offsets[missing])
        return joined((here, missing), ((held,), (rest,)), device)[0]

    def _rows(self, slot: Tensor, offset: Tensor) -> Tensor:
        """Single tokens of slots, `[n, 2, P, D]`."""
        if not self.packed:
            return torch.stack((self.k[slot, :, offset], self.v[slot, :, offset]), dim=1)
        k, k_scale, v, v_scale = self._slots.parts
        rows = torch.stack((k[slot, :, offset] * k_scale[slot, :, 0], v[slot, :, offset] * v_scale[slot, :, offset]), 1)
        return rows.to(self.layout.dtype)

    def write(self, pages: Pages, *parts: Tensor) -> None:
        for some in slices(len(pages.group), self.capacity):
            self.clock += 1
            part = pages.at(some)
            self._free(part)  # left by a call that failed
            self._fill(part, *(x[some] for x in parts))

    def forget(self, pages: Pages) -> None:
        self._free(pages)
        self.below.forget(pages)

    def take(self, slots: Numbers) -> Parts:
        """Copies of the pages in these slots."""
        self.mover.wait(slots)
        self.traffic.bytes_out += len(slots) * self.page_bytes
        return tuple(self.mover.pick(x, slots) for x in self._slots.parts)

    def _hand_down(self, slots: Numbers, target: Tier) -> None:
        """Write the pages in these slots to another tier, packed if that one's are."""
        parts = self.take(slots)
        target.write(self._pages(slots), *(pack(*parts) if target.packed and not self.packed else parts))

    def copy_down(self, target: Tier, held_by: Tier) -> None:
        """Write to `target` the pages here that `held_by` does not have."""
        held = self._holding(np.arange(self.n_slots))
        held = held[~held_by.holds(self._pages(held))]
        for some in slices(len(held), AT_ONCE // self.page_bytes):
            self._hand_down(held[some], target)

    def _request(self, pages: Pages) -> tuple[Numbers, Numbers]:
        """The slots of pages, -1 where they are missing, and which are; their use is noted."""
        self.clock += 1
        slots = self.find(pages)
        missing = np.flatnonzero(slots < 0)
        self.used[slots[slots >= 0]] = self.clock
        self.traffic.misses += len(missing)
        self.traffic.hits += len(slots) - len(missing)
        return slots, missing

    def _pages(self, slots: Numbers) -> Pages:
        return Pages(self.group[slots], self.chunk[slots])

    def _fill(self, pages: Pages, *parts: Tensor) -> Numbers:
        """Put pages into slots that are freed for them; the slots. They count once the index has them, at the end."""
        slots = self._vacate(len(pages.group))
        self.mover.put(self._slots.parts, slots, parts)
        self.used[slots], self.chunk[slots] = self.clock, pages.chunk
        self.group[slots] = pages.group
        self._slot[pages] = slots
        self.traffic.bytes_in += len(slots) * self.page_bytes
        return slots

    def _vacate(self, n: int) -> Numbers:
        """`n` slots made free; dirty pages move down first."""
        slots = self._victims(n)
        held = self._holding(slots)
        dirty = held[~self.below.holds(self._pages(held))]
        if len(dirty):
            self._hand_down(dirty, self.below)
        self._drop(held)
        return slots

    def _victims(self, n: int) -> Numbers:
        """`n` slots to fill: free ones, then the least recently used; none pinned, or in use by this request."""
        if self.limit == UNBOUNDED and (short := n - int((self.group < 0).sum())) > 0:
            self._slots = self._grown(self._slots, self.n_slots + max(short, self.n_slots // 2))
        busy = (self.chunk < self.pinned_chunks) | (self.used >= self.clock)
        free = np.ones(self.n_slots, bool)
        free[self._holding(np.arange(self.n_slots))] = False
        age = np.where(free, -1, np.where(busy, NEVER, self.used))
        best = np.argpartition(age, n - 1)[:n] if 0 < n <= len(age) else np.arange(n)
        if n > len(age) or (age[best] == NEVER).any():
            raise CapacityError(f"the {self.name} cache has no space for {n} more pages; give it a larger budget")
        return best

    def _holding(self, slots: Numbers) -> Numbers:
        """Those of these slots that hold a page."""
        slots = slots[self.group[slots] >= 0]
        held: Numbers = slots[self._slot[self._pages(slots)] == slots]
        return held

    def _free(self, pages: Pages) -> None:
        """Forget these pages here."""
        slots = self.find(pages)
        self._drop(slots[slots >= 0])

    def _drop(self, slots: Numbers) -> None:
        """Forget what these slots hold."""
        self._slot[self._pages(self._holding(slots))] = -1
        self.group[slots] = -1

    def _grown(self, had: Slots | None, n_slots: int) -> Slots:
        """`n_slots` slots, the first with what these hold."""
        heads, size, dim = self.layout.page_heads, self.layout.chunk_size, self.layout.head_dim
        numbers, scale = torch.int8 if self.packed else self.layout.dtype, torch.float32
        kinds = [((heads, size, dim), numbers), ((heads, 1, dim), scale), ((heads, size, dim), numbers)]
        kinds = [*kinds, ((heads, size, 1), scale)] if self.packed else kinds[::2]
        parts = tuple(self.mover.empty((n_slots, *shape), dtype) for shape, dtype in kinds)
        group, (chunk, used) = np.full(n_slots, -1), np.zeros((2, n_slots), np.int64)
        if had is not None:
            n = len(had.group)
            self.mover.wait(np.arange(n))
            for x, old in zip(parts, had.parts, strict=True):
                x[:n] = old
            group[:n], chunk[:n], used[:n] = had.group, had.chunk, had.used
        return Slots(parts, group, chunk, used)
