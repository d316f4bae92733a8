"""Pages, what moves between tiers: their names, and an index of them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.layout import CacheLayout

Numbers = NDArray[np.int64]


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
