"""The disk tier of a KV cache. Pages are rows of a spill file, which is temporary, or of a saved context's file."""

import os
import tempfile
from copy import deepcopy
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from lce.cache.formats import KVFormat, Parts
from lce.cache.layout import DISK, CacheLayout
from lce.cache.limits import Limits
from lce.cache.movers import Numbers
from lce.cache.row_file import Checks, Descriptor, RowFile
from lce.cache.tier import UNBOUNDED, Pages, Tier
from lce.files import named, unwritable

GROWTH = 64 << 20  # the fewest bytes by which a spill file grows; it grows by half of its size if that is more


class Disk(Tier):
    """A tier with pages in a spill file or a context file. Users see one disk tier even if a chain has both."""

    name = DISK
    rank = 2

    def __init__(self, layout: CacheLayout, below: Tier, file: RowFile) -> None:
        super().__init__(layout, below)
        self.file = file
        if isinstance(below, Disk):
            self.traffic = below.traffic

    @classmethod
    def limit(cls, layout: CacheLayout) -> int | None:
        return None if layout.budgets.spill_dir is None else UNBOUNDED

    @classmethod
    def location(cls, layout: CacheLayout) -> Path:
        assert layout.budgets.spill_dir is not None
        return layout.budgets.spill_dir

    @classmethod
    def build(cls, layout: CacheLayout, below: Tier, n_tokens: int = 0) -> "Disk":
        """Return a tier on a new spill file, with disk space reserved for the pages of `n_tokens` tokens."""
        file = SpillFile(cls.location(layout), layout.format)
        file.reserve(Limits(layout).needs(n_tokens)[DISK] // file.row_bytes)
        return cls(layout, below, file)

    @property
    def writable(self) -> bool:  # type: ignore[override]
        return self.file.writable

    @property
    def n_bytes(self) -> int:
        return self.file.n_bytes

    def take(self, place: Numbers) -> Parts:
        self.traffic.hits += len(place)
        self.traffic.bytes_out += len(place) * self.page_bytes
        rows = self.file.read_pages(place, self.format.page_rows)
        self.format.check(rows[:, : self.format.size], rows[:, self.format.size :], self.file.name)
        return (rows,)

    def take_rows(self, place: Numbers, offsets: Numbers) -> Tensor:
        self.traffic.bytes_out += len(place) * self.file.row_bytes
        rows = extra = self.file.read(place + offsets)
        if self.format.extra_rows:
            page, of_page = np.unique(place, return_inverse=True)
            extra = self.file.read_pages(page + self.format.size, self.format.extra_rows)
            self.traffic.bytes_out += extra.nbytes
            extra = extra.index_select(0, torch.from_numpy(of_page))
            self.format.check(rows, extra, self.file.name)
        return self.format.tokens(rows, extra)

    def write(self, pages: Pages, *parts: Tensor) -> None:
        (packed,) = parts
        groups = pages.group + self.layout.first_layer * self.layout.n_groups
        first = self.file.allocate_pages(groups, pages.chunk, self.format.page_rows)
        self.file.write_pages(first, packed)
        self.index[pages] = first
        self.traffic.bytes_in += len(first) * self.page_bytes

    def fork(self) -> Tier:
        """Return a tier on the same file; if the fork may not write to it, below a tier on a new spill file."""
        file = self.file.for_fork()
        other = Disk(self.layout, self.below.fork(), file)
        other.index = deepcopy(self.index)
        return other if file is self.file or not self.limit(self.layout) else Disk.build(self.layout, other)


class SpillFile(RowFile):
    """A temporary row file without a name. The system removes it when it is closed, however the process ends."""

    def __init__(self, folder: Path, format: KVFormat) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder, prefix="lce-spill-") as file:
                descriptor = Descriptor(os.dup(file.fileno()))
        except OSError as error:
            raise unwritable(folder, error) from error
        super().__init__(descriptor, f"the spill file in {named(folder)}", format, Checks())
        self._lock = Lock()  # several contexts may share the file

    def allocate_pages(self, groups: Numbers, chunks: Numbers, size: int) -> Numbers:
        """Allocate disk space for pages after the last row, and some more for later pages."""
        with self._lock:
            first = self.n_rows + np.arange(len(groups)) * size
            wanted = (self.n_rows + len(groups) * size) * self.row_bytes
            if wanted > self.reserved:
                self._take(wanted, max(wanted, self.reserved * 3 // 2, self.reserved + GROWTH))
            self.n_rows += len(groups) * size
        return first

    def reserve(self, n: int) -> None:
        """Allocate disk space for `n` rows, and memory for their checksums, so that later writes do not fail."""
        self.checks.reserve(n)
        if (n_bytes := n * self.row_bytes) > self.reserved:
            self._take(n_bytes, n_bytes)

    def _take(self, least: int, best: int) -> None:
        for size in (best, least):
            try:
                os.posix_fallocate(self._descriptor, 0, size)
                self.reserved = max(self.reserved, size)
                return
            except OSError as error:
                failure = error
        raise unwritable(self.name, failure) from failure
