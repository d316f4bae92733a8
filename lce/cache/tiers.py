"""Tiers: where the keys and values of a long context are. A chain, each tier with the one below it.

    recent buffers ──> device pool ──> host pool ──> file ──> nowhere      a tier that a machine lacks is left out:
                       └────────── pages come back ──┘                     without a GPU there is one pool

What moves is a page (see `CacheLayout`). Complete chunks never change, so a page may be in several tiers at once. It is
dirty while no tier below has it. A full pool gives up its least recently used pages: dirty ones move down first.

With keys and values in 8 bits, the device's pool has plain pages, whose numbers were rounded before they came; tiers
below have them packed. A page is packed on its way down and unpacked on its way up, which changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.attention import Tiles
from lce.cache.layout import DEVICE, DISK, HOST, SCALE_ROWS, UNBOUNDED, CacheLayout
from lce.cache.movers import Cuda, Mover, Pinned, fitting
from lce.cache.packing import Parts, from_rows, key_scales_of, pack, to_rows, tokens_of_rows
from lce.cache.row_file import FULL, RowFile, SpillFile
from lce.errors import CapacityError
from lce.sizes import size_text

Numbers = NDArray[np.int64]
AT_ONCE = 64 << 20  # bytes of pages that are read from a lower tier, or written to it, in one go
NEVER = np.iinfo(np.int64).max


class Pages(NamedTuple):
    """Names of n pages: `group [n]`, a head group counted over all layers, and `chunk [n]`."""

    group: Numbers
    chunk: Numbers

    @classmethod
    def grid(cls, groups: Numbers, chunks: Numbers) -> Pages:
        """Every group with every chunk."""
        return cls(np.repeat(groups, len(chunks)), np.tile(chunks, len(groups)))

    def at(self, index: Numbers | slice) -> Pages:
        """Some of these pages."""
        return Pages(self.group[index], self.chunk[index])


@dataclass
class Traffic:
    """What went through a tier: pages asked of it that it had (`hits`) or had not (`misses`), bytes in and out.

    `early` pages were fetched before they were asked for, from what was asked for the last time.
    """

    hits: int = 0
    misses: int = 0
    early: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class Tier(ABC):
    """Where pages can be, above another tier."""

    name: str
    traffic: Traffic
    below: Tier
    n_bytes: int  # held now
    packed: bool = False  # whether its pages are

    @abstractmethod
    def holds(self, pages: Pages) -> NDArray[np.bool_]:
        """Which pages are in this tier or in one below it."""

    @abstractmethod
    def read(self, pages: Pages) -> Parts:
        """Copies of pages, `k v [n, P, L, D]` or packed, from here or from below."""

    @abstractmethod
    def read_rows(self, pages: Pages, offsets: Numbers) -> Tensor:
        """Copies of single tokens of pages, rows `[n, 2, P, D]`, from here or from below."""

    @abstractmethod
    def write(self, pages: Pages, *parts: Tensor) -> None:
        """Take pages, `k v [n, P, L, D]` or packed, that no tier below has. Not atomic: call again after an error."""

    @abstractmethod
    def forget(self, pages: Pages) -> None:
        """Have pages no longer, here or below: other contents are about to be written."""


class Nowhere(Tier):
    """The end of the chain: has nothing, takes nothing."""

    name = ""
    n_bytes = 0

    def holds(self, pages: Pages) -> NDArray[np.bool_]:
        return np.zeros(np.broadcast(*pages).shape, bool)

    def read(self, pages: Pages) -> Parts:
        raise AssertionError("a page that is in no tier")

    def read_rows(self, pages: Pages, offsets: Numbers) -> Tensor:
        raise AssertionError("a page that is in no tier")

    def write(self, pages: Pages, *parts: Tensor) -> None:
        raise CapacityError(FULL)

    def forget(self, pages: Pages) -> None:
        pass


class Disk(Tier):
    """A file of rows: a spill file, or a context file."""

    name = DISK

    def __init__(self, layout: CacheLayout, file: RowFile, below: Tier) -> None:
        self.layout = layout
        self.file = file
        self.below = below
        self.packed = layout.packed
        self.traffic = below.traffic if isinstance(below, Disk) else Traffic()  # files are one tier to users
        self.row = PageIndex(layout)  # the first row of each page in the file

    @property
    def n_bytes(self) -> int:  # type: ignore[override]
        return self.file.n_bytes

    def holds(self, pages: Pages) -> NDArray[np.bool_]:
        return (self.row[pages] >= 0) | self.below.holds(pages)

    def read(self, pages: Pages) -> Parts:
        first = self.row[pages]
        here, missing = np.flatnonzero(first >= 0), np.flatnonzero(first < 0)
        self.traffic.hits += len(here)
        self.traffic.bytes_out += len(here) * self.layout.stored_page_bytes
        parts = from_rows(self.file.read_pages(first[here], self.layout.page_rows), self.layout, self.file.name)
        if not len(missing):
            return parts
        return _joined((here, missing), (parts, self.below.read(pages.at(missing))))

    def read_rows(self, pages: Pages, offsets: Numbers) -> Tensor:
        first = self.row[pages]
        here, missing = np.flatnonzero(first >= 0), np.flatnonzero(first < 0)
        self.traffic.bytes_out += len(here) * self.file.row_bytes
        rows = self.file.read(torch.from_numpy(first[here] + offsets[here]))
        if self.packed:
            rows = self._unpacked(rows, first[here])
        if not len(missing):
            return rows
        rest = self.below.read_rows(pages.at(missing), offsets[missing])
        return _joined((here, missing), ((rows,), (rest,)))[0]

    def _unpacked(self, rows: Tensor, first: Numbers) -> Tensor:
        """Packed rows of pages that begin at rows `first`, `[n, 2, P, D]`; reads the scales of each page once."""
        page, of_page = np.unique(first, return_inverse=True)
        found = self.file.read_pages(page + self.layout.chunk_size, SCALE_ROWS)
        self.traffic.bytes_out += found.nbytes
        scales = key_scales_of(found, self.layout, self.file.name).index_select(0, torch.from_numpy(of_page))
        return tokens_of_rows(rows, scales, self.layout, self.file.name)

    def write(self, pages: Pages, *parts: Tensor) -> None:
        rows = to_rows(parts, self.layout)
        first = self.file.allocate_pages(*pages, self.layout.page_rows)
        self.file.write_pages(first, rows)
        self.row[pages] = first
        self.traffic.bytes_in += len(first) * self.layout.stored_page_bytes

    def forget(self, pages: Pages) -> None:
        self.row[pages] = -1
        self.below.forget(pages)

    def fork(self) -> Disk:
        """A tier of its own with the same pages, over the same file.

        If the file has one place for each page, the other context only reads it, and writes to a spill file, if any.
        """
        file, folder = self.file.for_fork(), self.layout.budgets.spill_dir
        other = Disk(self.layout, file, self.below.fork() if isinstance(self.below, Disk) else self.below)
        other.row = self.row.copy()
        if file is self.file or folder is None:
            return other
        return Disk(self.layout, SpillFile(folder, self.layout.row_shape, self.layout.row_dtype), other)


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
        return _joined((here, missing), (held, found), self.k.device)

    def read_rows(self, pages: Pages, offsets: Numbers) -> Tensor:
        slots, device = self.find(pages), self.k.device
        here, missing = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        self.used[slots[here]] = self.clock
        self.mover.wait(np.unique(slots[here]))
        held = self._rows(*(torch.from_numpy(x[here]).to(device) for x in (slots, offsets)))
        if not len(missing):
            return held
        rest = self.below.read_rows(pages.at(missing), offsets[missing])
        return _joined((here, missing), ((held,), (rest,)), device)[0]

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


class TierStack:
    """The tiers of one context, from the device's pool down: all complete chunks that have left the recent buffers.

    Tiers never change what is attended: the same numbers come back from any of them.
    """

    def __init__(self, layout: CacheLayout, bottom: Tier, buffer_tokens: int = 0) -> None:
        """Empty pools above `bottom`, beside buffers of `buffer_tokens` tokens, or of those that are usual."""
        self.layout = layout
        self.bottom = bottom  # what is below all pools: a file, or nowhere
        slots, mover = layout.device_slots(buffer_tokens), Mover() if layout.on_cpu else Cuda(layout.device)
        host = []
        if layout.host_slots:
            host.append(Pool(HOST, layout, Pinned(), bottom, layout.host_slots, packed=layout.packed))
        top = Pool(DEVICE, layout, mover, host[0] if host else bottom, slots, layout.pinned_chunks)
        self.pools = [top, *host]
        self._asked: dict[int, Pages] = {}  # by layer, what was last asked of the first pool

    @classmethod
    def empty(cls, layout: CacheLayout, n_tokens: int, file: RowFile | None) -> TierStack:
        """Tiers of a context of `n_tokens` tokens, over `file`; None: a spill file, if the layout has a folder for one.

        Raises `CapacityError` where the budgets cannot hold them.
        """
        if file is None and not layout.overflows:
            held = (layout.budget if layout.on_cpu else layout.budgets.host) or 0
            chunk_bytes = layout.chunk_size * layout.token_bytes
            if not layout.on_cpu:
                chunk_bytes = layout.stored_bytes(layout.chunk_size)
            if (needed := layout.whole_chunks(n_tokens) // layout.chunk_size * chunk_bytes) > held:
                most = held * layout.chunk_size // chunk_bytes
                raise CapacityError(
                    f"{n_tokens:,} tokens need {size_text(needed)} for keys and values, and the budget is "
                    f"{size_text(held)}: {most:,} tokens; give --spill-dir, or a larger budget"
                )
        if file is None and layout.budgets.spill_dir is not None:
            file = spill = SpillFile(layout.budgets.spill_dir, layout.row_shape, layout.row_dtype)
            spill.reserve(layout.needs(n_tokens)[DISK] // spill.row_bytes)
        return cls(layout, Nowhere() if file is None else Disk(layout, file, Nowhere()))

    @property
    def top(self) -> Pool:
        """The first pool: the device's."""
        return self.pools[0]

    def __iter__(self) -> Iterator[Tier]:
        """The tiers, fastest first."""
        tier: Tier = self.top
        while not isinstance(tier, Nowhere):
            yield tier
            tier = tier.below

    def groups(self, layer: int) -> Numbers:
        """A layer's head groups, counted over all layers."""
        return np.arange(layer * self.layout.n_groups, (layer + 1) * self.layout.n_groups)

    def add(self, layer: int, first: int, k: Tensor, v: Tensor) -> None:
        """Take chunks from `first` on of a layer, `k v [G, m·L, D]`. Not atomic: call again after an error.

        They replace pages of the same names, which a truncation may have left.
        """
        layout, m = self.layout, k.shape[1] // self.layout.chunk_size
        for some in slices(m, max(1, self.top.capacity // layout.n_groups)):
            tokens = slice(some.start * layout.chunk_size, some.stop * layout.chunk_size)
            pages = Pages.grid(self.groups(layer), np.arange(first + some.start, first + some.stop))
            self.top.forget(pages)
            self.top.write(pages, *(pages_of(x[:, tokens], layout) for x in (k, v)))

    def chunks(self, layer: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """All of chunks `first..stop-1` of a layer, `k v [G, (stop - first)·L, D]`, copied.

        Reading everything once evicts nothing: pages that the first pool lacks pass by, unless slots are free.
        """
        pages = self.top.read(Pages.grid(self.groups(layer), np.arange(first, stop)))
        # [groups·m, P, L, D] -> [groups, m, P, L, D] -> [G, m, L, D] -> [G, m·L, D]
        k, v = (x.unflatten(0, (self.layout.n_groups, -1)).transpose(1, 2).flatten(0, 1).flatten(1, 2) for x in pages)
        return k, v

    def tokens(self, layer: int, index: Numbers) -> tuple[Tensor, Tensor]:
        """Keys and values `[G, n, D]` of single tokens, ascending. A chunk of which half is asked comes whole."""
        size, groups = self.layout.chunk_size, self.groups(layer)
        present, counts = np.unique(index // size, return_counts=True)
        whole = Pages.grid(groups, present[counts * 2 >= size][: self.top.capacity // len(groups)])
        self._asked[layer] = whole
        self.top.bring(whole)
        rows = self.top.read_rows(Pages.grid(groups, index // size), np.tile(index % size, len(groups)))
        rows = rows.unflatten(0, (len(groups), -1))  # [groups, n, 2, P, D]
        return rows[:, :, 0].transpose(1, 2).flatten(0, 1), rows[:, :, 1].transpose(1, 2).flatten(0, 1)

    def rounds(self, layer: int, wanted: NDArray[np.bool_]) -> Iterator[Tiles]:
        """Pages of a layer, True in `wanted [groups, chunks]`, as many at a time as the first pool can hold.

        Each `Tiles` is valid until the next one. If the request exceeds the pool, resident pages are served first; the
        missing ones cycle through a quarter of the slots, so that little is evicted.
        """
        groups, chunks = np.nonzero(wanted)
        pages, top = Pages(groups + layer * self.layout.n_groups, chunks), self.top
        self._asked[layer] = pages
        resident = top.find(pages) >= 0
        if len(resident) <= top.capacity:
            rounds = [np.arange(len(resident))] if len(resident) else []
        else:
            here, missing = np.flatnonzero(resident), np.flatnonzero(~resident)
            rounds = [here[some] for some in slices(len(here), top.capacity)]
            rounds += [missing[some] for some in slices(len(missing), max(1, top.capacity // 4))]
        for some in rounds:
            slots = top.bring(pages.at(some))
            top.mover.wait(slots)
            index = np.full(wanted.shape, -1, np.int64)
            index[groups[some], chunks[some]] = slots
            yield self._slot_tiles(index)
            if len(rounds) > 1 and not resident[some[0]]:
                top.used[slots] = 0  # the next to be evicted

    def _slot_tiles(self, slots: Numbers) -> Tiles:
        """The first pool's slots as tiles: page head p of slot s is tile `s·P + p`. `slots [groups, chunks]`, or -1."""
        k, v, heads = self.top.k, self.top.v, self.layout.page_heads
        slot = torch.from_numpy(slots).to(k.device)[:, None]
        tile = torch.where(slot < 0, -1, slot * heads + torch.arange(heads, device=k.device)[:, None])
        return Tiles(k.flatten(0, 1), v.flatten(0, 1), tile.flatten(0, 1))

    def prefetch(self, layer: int) -> None:
        """Begin to fetch what a layer asked for the last time, where that can happen beside the computation.

        A guess: a page that is not asked for after all has only taken a slot.
        """
        top = self.top
        if not top.mover.asynchronous or layer not in self._asked:
            return
        pages, counted = self._asked[layer].at(slice(top.capacity // 2)), copy(top.traffic)
        missing = int((top.find(pages) < 0).sum())
        top.bring(pages)
        top.traffic.hits, top.traffic.misses = counted.hits, counted.misses
        top.traffic.early += missing

    def write_down(self) -> None:
        """Copy to the file every page that is not there yet."""
        for pool in self.pools:
            pool.copy_down(self.bottom, self.bottom)

    def shrink(self, buffer_tokens: int) -> None:
        """Start over with empty pools beside larger buffers; the file has all that the pools held."""
        smaller = TierStack(self.layout, self.bottom, buffer_tokens)
        for pool, old in zip(smaller.pools, self.pools, strict=True):
            pool.traffic = old.traffic
        self.pools = smaller.pools

    def fork(self, buffer_tokens: int = 0) -> TierStack:
        """Tiers of another context with the same pages, over the same file; dirty pages are written down first.

        Without a file, the other's last pool gets copies.
        """
        if isinstance(self.bottom, Disk):
            self.write_down()
            return TierStack(self.layout, self.bottom.fork(), buffer_tokens)
        other = TierStack(self.layout, self.bottom, buffer_tokens)
        for pool in self.pools:
            pool.copy_down(other.pools[-1], pool.below)
        return other


class PageIndex:
    """A number for each page, -1 until it is set; grows with the chunks."""

    def __init__(self, layout: CacheLayout) -> None:
        self._numbers = np.full((layout.n_layers * layout.n_groups, 16), -1, np.int64)

    def __getitem__(self, pages: Pages) -> Numbers:
        self._cover(pages.chunk)
        found: Numbers = self._numbers[pages.group, pages.chunk]
        return found

    def __setitem__(self, pages: Pages, value: Numbers | int) -> None:
        self._cover(pages.chunk)
        self._numbers[pages.group, pages.chunk] = value

    def copy(self) -> Self:
        """An index of its own."""
        other = copy(self)
        other._numbers = self._numbers.copy()
        return other

    def _cover(self, chunks: Numbers) -> None:
        had = self._numbers.shape[1]
        if chunks.size and (most := int(chunks.max())) >= had:
            grown = np.full((len(self._numbers), max(most + 1, had * 3 // 2)), -1, np.int64)
            grown[:, :had] = self._numbers
            self._numbers = grown


def pages_of(x: Tensor, layout: CacheLayout) -> Tensor:
    """Whole chunks of a buffer `[G, m·L, D]` as pages `[groups·m, P, L, D]`."""
    heads = x.unflatten(1, (-1, layout.chunk_size)).unflatten(0, (-1, layout.page_heads))
    pages: Tensor = heads.transpose(1, 2).flatten(0, 1)
    return pages


def slices(n: int, size: int) -> Iterator[slice]:
    """`0..n-1` in runs of at most `size`, and of one at least."""
    for start in range(0, n, max(size, 1)):
        yield slice(start, min(start + max(size, 1), n))


def _joined(where: tuple[Numbers, Numbers], parts: tuple[Parts, Parts], device: torch.device | None = None) -> Parts:
    """Two runs of tensors as one of both: `parts[i]` are the entries `where[i]`."""
    order = torch.from_numpy(np.argsort(np.concatenate(where)))
    return tuple(
        torch.cat((a, b.to(device or a.device)))[order.to(device or a.device)] for a, b in zip(*parts, strict=True)
    )
