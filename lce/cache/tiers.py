"""Where the keys and values of a long context are: pools of slots in memory, fastest first, and a file under them.

The unit that moves is a page (see `lce.cache.pool`). Complete chunks never change, so a page may be in several tiers at
once; one is dirty while no lower tier has it. A pool that is full gives up its least recently used pages: dirty ones
move down, the others are dropped.

    recent buffers ──> device pool ──> host pool ──> file        a tier that a machine lacks is left out:
                       └────────── pages come back ──┘           without a GPU there is one pool, memory
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.pool import NEVER, Numbers, Pages, PageShape, Pool, Table, Traffic, grid, joined, slices
from lce.cache.rows import RowFile
from lce.errors import CapacityError

AT_ONCE = 64 << 20  # bytes of pages that are read from the file, or written to it, in one go


class Archive:
    """The pages of one context: all complete chunks that have left the recent buffers.

    `pools` are the tiers in memory, fastest first; `file` is the last tier, where there is one. `row` is the first row
    of each page in the file, -1 where it is not there. The `n_pinned` first chunks stay in the first pool. Nothing here
    changes what is attended: the same numbers are handed out whatever tier they were in.
    """

    def __init__(self, shape: PageShape, pools: list[Pool], file: RowFile | None, n_pinned: int = 0) -> None:
        self.shape = shape
        self.pools = pools
        self.file = file
        self.n_pinned = n_pinned
        self.row = Table(shape)
        self.tick = 0
        self.disk = Traffic()
        self._asked: dict[int, Pages] = {}  # by layer, what was last asked of the first pool

    def lanes(self, layer: int) -> Numbers:
        """The lanes of a layer, one for each of its head groups."""
        return np.arange(layer * self.shape.n_groups, (layer + 1) * self.shape.n_groups)

    @property
    def room(self) -> int:
        """How many pages the first pool can hold at once beside its pinned ones."""
        limit = self.pools[0].limit
        return sys.maxsize if limit is None else limit - self.n_pinned * self.shape.n_layers * self.shape.n_groups

    def add(self, layer: int, first: int, k: Tensor, v: Tensor) -> None:
        """Take chunks `first..first+m-1` of a layer, `[G, m, L, D]`, into the first pool.

        What fails is to be done again: it may have taken some of them.
        """
        m, pool = k.shape[1], self.pools[0]
        for some in slices(m, self.room // self.shape.n_groups):
            pages = grid(self.lanes(layer), np.arange(first + some.start, first + some.stop))
            self.tick += 1
            taken = pool.find(*pages)
            pool.drop(taken[taken >= 0])
            slots = self._vacate(0, len(pages[0]))
            # [G, m, L, D] -> [groups, m, P, L, D] -> [pages, P, L, D]
            new_k, new_v = (
                x[:, some].unflatten(0, (-1, self.shape.heads)).transpose(1, 2).flatten(0, 1) for x in (k, v)
            )
            pool.fill(slots, pages, new_k, new_v, self.tick)
            pool.pinned[slots] = pages[1] < self.n_pinned

    def bring(self, pages: Pages) -> Numbers:
        """Have these pages, at most `room`, in the first pool; their slots. They stay there until the next call."""
        pool = self.pools[0]
        self.tick += 1
        slots = pool.find(*pages)
        missing = self._count(pool, slots)
        for some in slices(len(missing), max(1, AT_ONCE // self.shape.n_bytes)):
            part = missing[some]
            wanted = (pages[0][part], pages[1][part])
            new = self._below(0, wanted)
            slots[part] = self._vacate(0, len(part))
            pool.fill(slots[part], wanted, *new, self.tick)
            pool.pinned[slots[part]] = wanted[1] < self.n_pinned
        return slots

    def prefetch(self, layer: int) -> None:
        """Begin to fetch what a layer asked for the last time, where that can happen beside the computation.

        A guess: what is not asked for after all does no harm but to have taken a slot.
        """
        pool = self.pools[0]
        if not pool.mover.asynchronous or layer not in self._asked:
            return
        lanes, chunks = (x[: self.room // 2] for x in self._asked[layer])
        counted = (pool.traffic.hits, pool.traffic.misses)
        pool.traffic.early += int((pool.find(lanes, chunks) < 0).sum())
        self.bring((lanes, chunks))
        pool.traffic.hits, pool.traffic.misses = counted

    def rounds(self, layer: int, wanted: NDArray[np.bool_]) -> Iterator[tuple[Numbers, Tensor, Tensor]]:
        """Pages of a layer, True in `wanted [groups, chunks]`, as many at a time as the first pool can hold.

        Yields the slot of each, `[groups, chunks]` with -1 for those of other rounds, and all slots' `k v
        [P, n_slots, L, D]`. What is yielded holds until the next round. More than the pool can hold drives little out:
        those that are there come first, and the others then take turns in the same quarter of the slots.
        """
        groups, chunks = np.nonzero(wanted)
        lanes, pool = groups + layer * self.shape.n_groups, self.pools[0]
        self._asked[layer] = (lanes, chunks)
        there = pool.find(lanes, chunks) >= 0
        if len(there) <= self.room:
            rounds = [np.arange(len(there))] if len(there) else []
        else:
            missing = np.flatnonzero(~there)
            rounds = [np.flatnonzero(there)[some] for some in slices(int(there.sum()), self.room)]
            rounds += [missing[some] for some in slices(len(missing), max(1, self.room // 4))]
        for some in rounds:
            slots = self.bring((lanes[some], chunks[some]))
            pool.mover.wait(slots)
            table = np.full(wanted.shape, -1, np.int64)
            table[groups[some], chunks[some]] = slots
            yield table, pool.k.transpose(0, 1), pool.v.transpose(0, 1)
            if len(rounds) > 1 and not there[some[0]]:
                pool.used[slots] = 0  # the next to go

    def chunks(self, layer: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """All of chunks `first..stop-1` of a layer, `[G, stop - first, L, D]` each, copied.

        Reading everything once drives nothing out: what the first pool lacks passes it by, unless there is room.
        """
        pool = self.pools[0]
        pages = grid(self.lanes(layer), np.arange(first, stop))
        slots = pool.find(*pages)
        if (slots < 0).sum() <= pool.n_free:
            k, v = pool.take(self.bring(pages))
        else:
            self.tick += 1
            missing = self._count(pool, slots)
            there = np.flatnonzero(slots >= 0)
            below = self._below(0, (pages[0][missing], pages[1][missing]))
            k, v = joined((there, missing), (pool.take(slots[there]), below), pool.k.device)
        # [groups * m, P, L, D] -> [G, m, L, D]
        k, v = (x.unflatten(0, (self.shape.n_groups, -1)).transpose(1, 2).flatten(0, 1) for x in (k, v))
        return k, v

    def tokens(self, layer: int, index: Numbers) -> tuple[Tensor, Tensor]:
        """Keys and values `[G, n, D]` of single tokens, ascending. A chunk of which half is asked comes whole."""
        size, lanes = self.shape.chunk_size, self.lanes(layer)
        present, counts = np.unique(index // size, return_counts=True)
        whole = grid(lanes, present[counts * 2 >= size][: self.room // len(lanes)])
        self._asked[layer] = whole
        self.bring(whole)
        rows = self._rows(
            0, np.repeat(lanes, len(index)), np.tile(index // size, len(lanes)), np.tile(index % size, len(lanes))
        )
        rows = rows.unflatten(0, (len(lanes), -1))  # [groups, n, 2, P, D]
        return rows[:, :, 0].transpose(1, 2).flatten(0, 1), rows[:, :, 1].transpose(1, 2).flatten(0, 1)

    def write_down(self) -> None:
        """Copy to the file whatever is not there yet."""
        assert self.file is not None, "no file to write to"
        for level, pool in enumerate(self.pools):
            held = np.flatnonzero(pool.lane >= 0)
            held = held[self.row[pool.lane[held], pool.chunk[held]] < 0]
            for some in slices(len(held), max(1, AT_ONCE // self.shape.n_bytes)):
                self._write(level, held[some])

    def fork(self, pools: list[Pool]) -> Archive:
        """An archive of its own with the same pages, in the same file; `pools` are empty. Writes dirty pages down.

        Without a file, the last of `pools` gets copies.
        """
        other = Archive(self.shape, pools, self.file, self.n_pinned)
        if self.file is not None:
            self.write_down()
            other.row = self.row.copy()
            return other
        last = len(pools) - 1
        for level, pool in enumerate(self.pools):
            held = np.flatnonzero(pool.lane >= 0)
            held = held[self._dirty(level, held)]
            for some in slices(len(held), max(1, AT_ONCE // self.shape.n_bytes)):
                pages = (pool.lane[held[some]], pool.chunk[held[some]])
                pools[last].fill(other._vacate(last, len(pages[0])), pages, *pool.take(held[some]), 0)
        return other

    def _count(self, pool: Pool, slots: Numbers) -> Numbers:
        """Note the use of slots that were found, -1 where they were not; which were not."""
        missing = np.flatnonzero(slots < 0)
        pool.used[slots[slots >= 0]] = self.tick
        pool.traffic.misses += len(missing)
        pool.traffic.hits += len(slots) - len(missing)
        return missing

    def _below(self, level: int, pages: Pages) -> tuple[Tensor, Tensor]:
        """Pages that pool `level` has not, `k v [m, P, L, D]`, from the tiers under it."""
        if level + 1 == len(self.pools):
            return self._read(pages)
        pool = self.pools[level + 1]
        slots = pool.find(*pages)
        missing = self._count(pool, slots)
        if not len(missing):
            return pool.take(slots)
        there = np.flatnonzero(slots >= 0)
        lost = (pages[0][missing], pages[1][missing])
        found, at_home = self._below(level + 1, lost), pool.take(slots[there])
        if pool.n_free >= len(missing):  # clean pages, which may leave again at any time
            pool.fill(self._vacate(level + 1, len(missing)), lost, *found, self.tick)
        k, v = joined((there, missing), (at_home, found), pool.k.device)
        return k, v

    def _read(self, pages: Pages) -> tuple[Tensor, Tensor]:
        """Pages from the file, `k v [m, P, L, D]`."""
        first = self.row[pages]
        assert self.file is not None, "a page that is nowhere"
        assert (first >= 0).all(), "a page that is nowhere"
        self.disk.hits += len(first)
        self.disk.bytes_out += len(first) * self.shape.n_bytes
        rows = self.file.read_pages(first, self.shape.chunk_size)
        k, v = rows.unbind(dim=2)  # [m, L, P, D]
        return k.transpose(1, 2), v.transpose(1, 2)

    def _rows(self, level: int, lanes: Numbers, chunks: Numbers, offsets: Numbers) -> Tensor:
        """Single rows `[n, 2, P, D]` of pages, from pool `level` and the tiers under it."""
        if level == len(self.pools):
            assert self.file is not None, "a page that is nowhere"
            self.disk.bytes_out += len(lanes) * self.file.row_bytes
            return self.file.read(torch.from_numpy(self.row[lanes, chunks] + offsets))
        pool = self.pools[level]
        device = pool.k.device
        slots = pool.find(lanes, chunks)
        there = np.flatnonzero(slots >= 0)
        pool.used[slots[there]] = self.tick
        pool.mover.wait(np.unique(slots[there]))
        slot, offset = (torch.from_numpy(x[there]).to(device) for x in (slots, offsets))
        held = torch.stack((pool.k[slot, :, offset], pool.v[slot, :, offset]), dim=1)
        missing = np.flatnonzero(slots < 0)
        if not len(missing):
            return held
        rest = self._rows(level + 1, lanes[missing], chunks[missing], offsets[missing])
        return joined((there, missing), ((held,), (rest,)), device)[0]

    def _vacate(self, level: int, n: int) -> Numbers:
        """`n` free slots of a pool; pages that no lower tier has are moved down first."""
        pool = self.pools[level]
        in_use = self.tick if level == 0 else NEVER  # what lower tiers hand out is copied
        slots = pool.victims(n, in_use)
        held = slots[pool.lane[slots] >= 0]
        self._move_down(level, held[self._dirty(level, held)])
        pool.drop(held)
        return slots

    def _dirty(self, level: int, slots: Numbers) -> NDArray[np.bool_]:
        """Which of a pool's pages are in no tier under it."""
        pages = (self.pools[level].lane[slots], self.pools[level].chunk[slots])
        alone: NDArray[np.bool_] = self.row[pages] < 0
        for pool in self.pools[level + 1 :]:
            alone = alone & (pool.find(*pages) < 0)
        return alone

    def _move_down(self, level: int, slots: Numbers) -> None:
        """Copy pages of a pool into the tier under it."""
        if not len(slots):
            return
        if level + 1 == len(self.pools):
            self._write(level, slots)
            return
        upper, lower = self.pools[level], self.pools[level + 1]
        for some in slices(len(slots), lower.limit or len(slots)):
            part = slots[some]
            target = self._vacate(level + 1, len(part))
            lower.fill(target, (upper.lane[part], upper.chunk[part]), *upper.take(part), self.tick - 1)

    def _write(self, level: int, slots: Numbers) -> None:
        """Copy pages of a pool into the file."""
        if self.file is None:
            raise CapacityError("the cache of keys and values is full; give --spill-dir, or a larger budget")
        pool = self.pools[level]
        pages = (pool.lane[slots], pool.chunk[slots])
        rows = torch.stack(pool.take(slots), dim=1).permute(0, 3, 1, 2, 4)  # [m, 2, P, L, D] -> [m, L, 2, P, D]
        first = self.file.place(*pages, self.shape.chunk_size)
        for start, page in zip(first.tolist(), rows, strict=True):
            self.file.write(start, page)
        self.row[pages] = first
        self.disk.bytes_in += len(slots) * self.shape.n_bytes
