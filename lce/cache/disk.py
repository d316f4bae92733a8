"""The tier of files: pages are rows of a spill file or of a context file."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.formats import Parts
from lce.cache.layout import DISK, CacheLayout
from lce.cache.movers import Mover
from lce.cache.pages import Numbers, PageIndex, Pages
from lce.cache.row_file import RowFile, SpillFile
from lce.cache.tier import Tier, Traffic, joined

MOVER = Mover()  # rows are read to plain memory


class Disk(Tier):
    """A file of rows: a spill file, or a context file."""

    name = DISK

    def __init__(self, layout: CacheLayout, file: RowFile, below: Tier) -> None:
        self.layout = layout
        self.file = file
        self.below = below
        self.format = layout.format
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
        self.traffic.bytes_out += len(here) * self.format.page_bytes
        parts = self.format.from_rows(self.file.read_pages(first[here], self.format.page_rows), self.file.name)
        if not len(missing):
            return parts
        return joined((here, missing), (parts, self.below.read(pages.at(missing))), MOVER)

    def read_rows(self, pages: Pages, offsets: Numbers) -> Tensor:
        first = self.row[pages]
        here, missing = np.flatnonzero(first >= 0), np.flatnonzero(first < 0)
        self.traffic.bytes_out += len(here) * self.file.row_bytes
        rows = self.file.read(torch.from_numpy(first[here] + offsets[here]))
        if self.format.extra_rows:
            page, of_page = np.unique(first[here], return_inverse=True)
            extra = self.file.read_pages(page + self.layout.chunk_size, self.format.extra_rows)
            self.traffic.bytes_out += extra.nbytes
            rows = self.format.tokens_of_rows(rows, extra.index_select(0, torch.from_numpy(of_page)), self.file.name)
        if not len(missing):
            return rows
        rest = self.below.read_rows(pages.at(missing), offsets[missing])
        return joined((here, missing), ((rows,), (rest,)), MOVER)[0]

    def write(self, pages: Pages, *parts: Tensor) -> None:
        rows = self.format.to_rows(parts)
        first = self.file.allocate_pages(pages.group + self.layout.first_group, pages.chunk, self.format.page_rows)
        self.file.write_pages(first, rows)
        self.row[pages] = first
        self.traffic.bytes_in += len(first) * self.format.page_bytes

    def forget(self, pages: Pages) -> None:
        self.row[pages] = -1
        self.below.forget(pages)

    def fork(self) -> Disk:
        """Return a fork's tier with the same pages, over the same file.

        If the file has one place for each page, the fork only reads the file, and writes to a spill file, if any.
        """
        file, folder = self.file.for_fork(), self.layout.budgets.spill_dir
        other = Disk(self.layout, file, self.below.fork() if isinstance(self.below, Disk) else self.below)
        other.row = self.row.copy()
        if file is self.file or folder is None:
            return other
        return Disk(self.layout, SpillFile(folder, self.format), other)
