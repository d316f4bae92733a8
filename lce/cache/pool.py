"""Pages, and pools of slots that hold them: one tier of a long context's keys and values, in one kind of memory.

A page is one complete chunk's keys and values, of all KV heads or of some. It is named by its lane, which is a layer
and a group of heads, and by its chunk.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.movers import Mover
from lce.errors import CapacityError

Numbers = NDArray[np.int64]
Pages = tuple[Numbers, Numbers]  # which lane, which chunk
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class PageShape:
    """Pages of `heads` KV heads: `chunk_size` tokens, keys and values of `head_dim` numbers; `n_groups` to a chunk."""

    n_layers: int
    n_groups: int
    heads: int
    chunk_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """What one token has of a page: keys and values, heads, numbers."""
        return 2, self.heads, self.head_dim

    @property
    def n_bytes(self) -> int:
        """Bytes of a page."""
        return 2 * self.heads * self.chunk_size * self.head_dim * self.dtype.itemsize


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


class Pool:
    """Slots for pages in one kind of memory, `k v [n_slots, P, L, D]`; at most `limit` of them, or as many as come.

    Bookkeeping takes 26 bytes a slot and 8 a page of the context; making room, O(n_slots).
    """

    def __init__(self, name: str, shape: PageShape, mover: Mover, limit: int | None) -> None:
        self.name = name
        self.shape = shape
        self.mover = mover
        self.limit = limit
        self.traffic = Traffic()
        self.lane = np.zeros(0, np.int64)  # whose page a slot holds; -1: free
        self.chunk = np.zeros(0, np.int64)
        self.used = np.zeros(0, np.int64)  # when last
        self.pinned = np.zeros(0, bool)
        self._slot = Table(shape)
        self.k: Tensor
        self.v: Tensor
        self._grow(limit if limit is not None else 16)

    @property
    def n_slots(self) -> int:
        return len(self.lane)

    @property
    def n_free(self) -> int:
        """Pages that can come without one leaving."""
        return sys.maxsize if self.limit is None else int((self.lane < 0).sum())

    @property
    def n_bytes(self) -> int:
        """Bytes of all slots."""
        return self.n_slots * self.shape.n_bytes

    def find(self, lanes: Numbers, chunks: Numbers) -> Numbers:
        """The slot of each page, -1 where the pool has it not; `lanes` and `chunks` broadcast."""
        return self._slot[lanes, chunks]

    def victims(self, n: int, tick: int) -> Numbers:
        """`n` slots to fill: free ones, then the least recently used; none pinned, or in use since `tick`."""
        if self.limit is None and (short := n - int((self.lane < 0).sum())) > 0:
            self._grow(self.n_slots + max(short, self.n_slots // 2))
        age = np.where(self.lane < 0, -1, np.where(self.pinned | (self.used >= tick), NEVER, self.used))
        best = np.argpartition(age, n - 1)[:n] if 0 < n <= len(age) else np.arange(n)
        if n > len(age) or (age[best] == NEVER).any():
            raise CapacityError(f"the {self.name} cache has no room for {n} more pages; give it a larger budget")
        return best

    def drop(self, slots: Numbers) -> None:
        """Forget what these slots hold."""
        pages = (self.lane[slots], self.chunk[slots])
        ours = self._slot[pages] == slots
        self._slot[pages[0][ours], pages[1][ours]] = -1
        self.pinned[slots] = False
        self.lane[slots] = -1

    def fill(self, slots: Numbers, pages: Pages, k: Tensor, v: Tensor, tick: int) -> None:
        """Put pages `[m, P, L, D]` into free slots. An interruption leaves them free, or filled."""
        self.mover.put(self.k, self.v, slots, k, v)
        self.used[slots], self.chunk[slots] = tick, pages[1]
        self.lane[slots] = pages[0]
        self._slot[pages] = slots
        self.traffic.bytes_in += len(slots) * self.shape.n_bytes

    def take(self, slots: Numbers) -> tuple[Tensor, Tensor]:
        """Copies of the pages in these slots, `[m, P, L, D]`."""
        self.mover.wait(slots)
        self.traffic.bytes_out += len(slots) * self.shape.n_bytes
        return self.mover.pick(self.k, slots), self.mover.pick(self.v, slots)

    def _grow(self, n_slots: int) -> None:
        shape, had = self.shape, self.n_slots
        k, v = self.mover.slots((n_slots, shape.heads, shape.chunk_size, shape.head_dim), shape.dtype)
        if had:
            self.mover.wait(np.arange(had))
            k[:had], v[:had] = self.k, self.v
        self.k, self.v = k, v
        self.lane = np.append(self.lane, np.full(n_slots - had, -1))
        self.chunk, self.used = (np.append(x, np.zeros(n_slots - had, np.int64)) for x in (self.chunk, self.used))
        self.pinned = np.append(self.pinned, np.zeros(n_slots - had, bool))


class Table:
    """A number for each page, -1 until it is set; grows with the chunks."""

    def __init__(self, shape: PageShape) -> None:
        self._numbers = np.full((shape.n_layers * shape.n_groups, 16), -1, np.int64)

    def __getitem__(self, pages: Pages) -> Numbers:
        self._cover(pages[1])
        found: Numbers = self._numbers[pages]
        return found

    def __setitem__(self, pages: Pages, value: Numbers | int) -> None:
        self._cover(pages[1])
        self._numbers[pages] = value

    def copy(self) -> Self:
        """A table of its own."""
        other = copy(self)
        other._numbers = self._numbers.copy()
        return other

    def _cover(self, chunks: Numbers) -> None:
        had = self._numbers.shape[1]
        if chunks.size and (most := int(chunks.max())) >= had:
            grown = np.full((len(self._numbers), max(most + 1, had * 3 // 2)), -1, np.int64)
            grown[:, :had] = self._numbers
            self._numbers = grown


def grid(lanes: Numbers, chunks: Numbers) -> Pages:
    """Every lane with every chunk."""
    return np.repeat(lanes, len(chunks)), np.tile(chunks, len(lanes))


def slices(n: int, size: int) -> Iterator[slice]:
    """`0..n-1` in runs of at most `size`."""
    for start in range(0, n, max(size, 1)):
        yield slice(start, min(start + size, n))


def joined(
    where: tuple[Numbers, Numbers], parts: tuple[tuple[Tensor, ...], tuple[Tensor, ...]], device: torch.device
) -> tuple[Tensor, ...]:
    """Two runs of tensors as one of both: `parts[i]` are the entries `where[i]`."""
    order = torch.from_numpy(np.argsort(np.concatenate(where))).to(device)
    return tuple(torch.cat((a, b.to(device)))[order] for a, b in zip(*parts, strict=True))
