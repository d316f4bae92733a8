"""Names of pages, the units that move between tiers, and indices by page on the host and on the device."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.layout import CacheLayout
from lce.cache.movers import Mover

Numbers = NDArray[np.int64]
MOST_CHANGES = 64  # assignments after which the whole table is copied to the device again


class Pages(NamedTuple):
    """Names of n pages: `group [n]`, a head group counted over all layers, and `chunk [n]`."""

    group: Numbers
    chunk: Numbers

    @classmethod
    def grid(cls, groups: Numbers, chunks: Numbers) -> Pages:
        """Return every group with every chunk."""
        return cls(np.repeat(groups, len(chunks)), np.tile(chunks, len(groups)))

    def at(self, index: Numbers | slice) -> Pages:
        """Return the pages at `index`."""
        return Pages(self.group[index], self.chunk[index])


class PageIndex:
    """A map from each page to a number, -1 until set; grows with the chunks."""

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
        """Return a copy of the index."""
        other = copy(self)
        other._numbers = self._numbers.copy()
        return other

    def _cover(self, chunks: Numbers) -> None:
        had = self._numbers.shape[1]
        if chunks.size and (most := int(chunks.max())) >= had:
            grown = np.full((len(self._numbers), max(most + 1, had * 3 // 2)), -1, np.int64)
            grown[:, :had] = self._numbers
            self._numbers = grown


class PageTable(PageIndex):
    """A page index with a copy on the device: changes are copied all at once, when the device's copy is requested.

    If host and device are the same memory there is no copy.
    """

    def __init__(self, layout: CacheLayout, mover: Mover) -> None:
        super().__init__(layout)
        self._mover = mover
        self._copy: Tensor | None = None  # on the device; None: none, or outdated
        self._changed: list[Pages] = []

    def __setitem__(self, pages: Pages, value: Numbers | int) -> None:
        if self._mover.asynchronous and pages.chunk.size:
            self._changed.append(pages)  # first: an interruption may come between
            if len(self._changed) > MOST_CHANGES:
                self._copy = None
                self._changed = [pages]
        super().__setitem__(pages, value)

    def on_device(self, groups: slice, n_chunks: int) -> Tensor:
        """Return the numbers `[groups, n_chunks]` of some groups' first chunks, valid until the next change.

        Does not wait for the device. Bytes: 16 a changed page, or the whole table after many changes.
        """
        if n_chunks > self._numbers.shape[1]:
            self._cover(np.array([n_chunks - 1]))
        if not self._mover.asynchronous:
            return torch.from_numpy(self._numbers[groups, :n_chunks])
        if self._copy is None or self._copy.shape != self._numbers.shape:
            self._copy = self._whole()
        elif self._changed:
            flat = np.unique(np.concatenate([x.group * self._numbers.shape[1] + x.chunk for x in self._changed]))
            where, what = self._mover.upload(torch.from_numpy(np.stack((flat, self._numbers.reshape(-1)[flat]))))
            self._copy.view(-1).index_copy_(0, where, what)
        self._changed = []
        return self._copy[groups, :n_chunks]

    @torch.inference_mode(mode=False)  # later changes may come inside or outside inference mode
    def _whole(self) -> Tensor:
        return self._mover.upload(torch.from_numpy(self._numbers.copy()))


def pages_of(x: Tensor, layout: CacheLayout) -> Tensor:
    """Return whole chunks of a buffer `[G, m·L, D]` as pages `[groups·m, P, L, D]`."""
    heads = x.unflatten(1, (-1, layout.chunk_size)).unflatten(0, (-1, layout.page_heads))
    pages: Tensor = heads.transpose(1, 2).flatten(0, 1)
    return pages


def slices(n: int, size: int) -> Iterator[slice]:
    """Yield `0..n-1` in runs of at most `size`; a `size` below 1 counts as 1."""
    for start in range(0, n, max(size, 1)):
        yield slice(start, min(start + max(size, 1), n))
