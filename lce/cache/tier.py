"""`Pages`, the units of keys and values that move between tiers, and `Tier`, the base class of tiers.

Tiers form a chain, fastest first. A kind of tier is one class in a file of this folder: see `kinds`.
"""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.formats import Parts
from lce.cache.layout import CacheLayout
from lce.cache.movers import Mover, Numbers
from lce.cache.row_file import FULL
from lce.errors import CapacityError

UNBOUNDED = 1 << 62  # in place of a number of tokens, bytes or pages: no limit
MOST_CHANGES = 64  # after more assignments a `PageIndex` is copied to the device as a whole


class Pages(NamedTuple):
    """The names of n pages. A page is named by its head group, counted over all layers, and its chunk: `[n]` each."""

    group: Numbers
    chunk: Numbers

    @classmethod
    def grid(cls, groups: Numbers, chunks: Numbers) -> "Pages":
        """Return the pages of every head group in `groups` and every chunk in `chunks`."""
        return cls(np.repeat(groups, len(chunks)), np.tile(chunks, len(groups)))

    def at(self, index: Numbers | slice) -> "Pages":
        """Return the pages at `index`."""
        return Pages(self.group[index], self.chunk[index])


class PageIndex:
    """A map from pages to numbers; -1: absent. `on_device` copies to a GPU what has changed since its last call."""

    def __init__(self, layout: CacheLayout, mover: Mover) -> None:
        self._numbers = np.full((layout.n_layers * layout.n_groups, 16), -1, np.int64)
        self._mover = mover
        self._copy: Tensor | None = None  # the copy on the device; None: the whole map must be copied
        self._changed: list[Pages] = []

    def __getitem__(self, pages: Pages) -> Numbers:
        self._cover(pages.chunk)
        found: Numbers = self._numbers[pages.group, pages.chunk]
        return found

    def __setitem__(self, pages: Pages, value: Numbers | int) -> None:
        self._cover(pages.chunk)
        if self._mover.asynchronous and pages.chunk.size:
            self._changed.append(pages)  # before the change, because an interruption may come between
            if len(self._changed) > MOST_CHANGES:
                self._copy, self._changed = None, [pages]
        self._numbers[pages.group, pages.chunk] = value

    def _cover(self, chunks: Numbers) -> None:
        had = self._numbers.shape[1]
        if chunks.size and (most := int(chunks.max())) >= had:
            n_more = max(most + 1, had * 3 // 2) - had
            self._numbers = np.pad(self._numbers, ((0, 0), (0, n_more)), constant_values=-1)

    def on_device(self, groups: slice, n_chunks: int) -> Tensor:
        """Return `[groups, n_chunks]` numbers on the device, valid until the next change. Does not wait for the GPU."""
        self._cover(np.array([n_chunks - 1]))
        if not self._mover.asynchronous:
            return torch.from_numpy(self._numbers[groups, :n_chunks])
        if self._copy is None or self._copy.shape != self._numbers.shape:
            with torch.inference_mode(mode=False):  # because later changes may come inside or outside inference mode
                self._copy = self._mover.upload(torch.from_numpy(self._numbers.copy()))
        elif self._changed:
            flat = np.unique(np.concatenate([x.group * self._numbers.shape[1] + x.chunk for x in self._changed]))
            where, what = self._mover.upload(torch.from_numpy(np.stack((flat, self._numbers.reshape(-1)[flat]))))
            self._copy.view(-1).index_copy_(0, where, what)
        self._changed = []
        return self._copy[groups, :n_chunks]


@dataclass
class Traffic:
    """A tier's traffic: pages that requests found (`hits`) or missed, pages prefetched in time (`early`), bytes."""

    hits: int = 0
    misses: int = 0
    early: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class Tier(ABC):
    """A place for pages in a chain: the tier `below` is slower. Class methods are for layouts and memory plans."""

    rank: ClassVar[int] = 0  # the order in the chain below the device, fastest first; 0: not in `kinds`
    name: str  # the name for users
    mover: Mover = Mover()  # a mover to the memory into which this tier reads pages
    writable = True  # whether new pages can be written here, so that forks can share them

    def __init__(self, layout: CacheLayout, below: "Tier") -> None:
        self.layout = layout
        self.below = below
        self.format = layout.format
        self.page_bytes = layout.format.page_bytes
        self.traffic = Traffic()
        self.index = PageIndex(layout, self.mover)  # each page's place in this tier, or -1

    @classmethod
    def limit(cls, layout: CacheLayout) -> int | None:
        """Return how many pages this kind of tier may hold, or `UNBOUNDED`; None if `layout` has no such tier."""
        return None

    @classmethod
    def bytes_for(cls, layout: CacheLayout, n_pages: int) -> int:
        """Return the bytes that `n_pages` pages take in this kind of tier."""
        return n_pages * layout.format.page_bytes

    @classmethod
    def location(cls, layout: CacheLayout) -> torch.device | Path:
        """Return the device or the folder where this kind of tier keeps its pages."""
        return torch.device("cpu")

    @classmethod
    def build(cls, layout: CacheLayout, below: "Tier", n_tokens: int) -> Self:
        """Return an empty tier above `below`, for a context of `n_tokens` tokens."""
        return cls(layout, below)

    @property
    @abstractmethod
    def n_bytes(self) -> int:
        """The bytes that this tier takes now."""

    def holds(self, pages: Pages) -> NDArray[np.bool_]:
        """Return for each page whether it is in this tier or in a tier below."""
        return (self.index[pages] >= 0) | self.below.holds(pages)

    def find(self, pages: Pages) -> tuple[Numbers, Numbers, Numbers]:
        """Return each page's place in this tier (-1: not here), and the indices of pages that are here and not here."""
        place = self.index[pages]
        return place, np.flatnonzero(place >= 0), np.flatnonzero(place < 0)

    def read(self, pages: Pages) -> Parts:
        """Return copies of pages, from this or a lower tier. Copies are packed unless this is the device's tier."""
        place, here, missing = self.find(pages)
        found = self.take(place[here])
        return found if not len(missing) else self.joined((here, missing), found, self.below.read(pages.at(missing)))

    def lend(self, pages: Pages) -> Parts | None:
        """Begin to copy pages to the GPU, in the current stream; None: another way must be taken, `read`."""
        return None

    def read_rows(self, pages: Pages, offsets: Numbers) -> Tensor:
        """Return copies of one token per page, at `offsets [n]`, as `[n, 2, P, D]`, from this or a lower tier."""
        place, here, missing = self.find(pages)
        found = self.take_rows(place[here], offsets[here])
        if not len(missing):
            return found
        rest = self.mover.upload(self.below.read_rows(pages.at(missing), offsets[missing]))
        return self.joined((here, missing), (found,), (rest,))[0]

    def joined(self, where: tuple[Numbers, Numbers], found: Parts, rest: Parts) -> Parts:
        """Join pages `found` and `rest`. Their indices in the result are `where[0]` and `where[1]`."""
        order = self.mover.upload(torch.from_numpy(np.argsort(np.concatenate(where))))
        return tuple(torch.cat(both).index_select(0, order) for both in zip(found, rest, strict=True))

    def order(self, pages: Pages) -> Numbers:
        """Return the order of pages in which `read` is fastest."""
        return np.arange(len(pages.group))

    def take(self, place: Numbers) -> Parts:
        """Return copies of the pages that are at `place` in this tier."""
        raise NotImplementedError

    def take_rows(self, place: Numbers, offsets: Numbers) -> Tensor:
        """Return copies of one token per page, at `offsets [n]`, as `[n, 2, P, D]`, of the pages at `place`."""
        raise NotImplementedError

    @abstractmethod
    def write(self, pages: Pages, *parts: Tensor) -> None:
        """Write pages that no lower tier has, packed unless this is the device's tier. After an error, call again."""

    def forget(self, pages: Pages) -> None:
        """Remove pages from this tier and lower tiers, before other keys and values are written for them."""
        self.index[pages] = -1
        self.below.forget(pages)

    def fork(self) -> "Tier":
        """Return a tier with the same pages for another context, possibly this tier itself."""
        return self


class Nowhere(Tier):
    """The end of the chain of tiers, which has no pages and takes none."""

    name = ""
    writable = False
    n_bytes = 0

    def __init__(self) -> None:
        pass

    def holds(self, pages: Pages) -> NDArray[np.bool_]:
        return np.zeros(np.broadcast(*pages).shape, bool)

    def find(self, pages: Pages) -> tuple[Numbers, Numbers, Numbers]:
        raise AssertionError("a page that is in no tier")

    def write(self, pages: Pages, *parts: Tensor) -> None:
        raise CapacityError(FULL)

    def forget(self, pages: Pages) -> None:
        pass


@cache
def kinds() -> tuple[type[Tier], ...]:
    """Return the classes of tiers below the device, fastest first: all in this folder with a `rank` above 0."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")
    found, left = [], [Tier]
    while left:
        left += (kind := left.pop()).__subclasses__()
        found += [kind] if kind.rank else []
    return tuple(sorted(found, key=lambda kind: kind.rank))


def slices(n: int, size: int) -> Iterator[slice]:
    """Cut `0..n-1` into slices of at most `size`; a `size` below 1 counts as 1."""
    for start in range(0, n, max(size, 1)):
        yield slice(start, min(start + max(size, 1), n))
