"""Rows of numbers in a file: the keys and values that memory does not hold.

A row is what one token has in one page's heads, `[2, P, D]`: its keys and its values. Rows are written through the file
descriptor, so that a full disk or a failing one is an error and not a signal. Single rows are read through a memory
map: one gather wherever they lie. Pages of many rows are read through the descriptor: first what the system has in
memory, then the rest by several threads, because a map waits for the disk a few kilobytes at a time.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.errors import CapacityError, DataError
from lce.files import map_copy, unwritable

Numbers = NDArray[np.int64]
MAPPED = 8 << 20  # bytes read through a map before its pages are released, so that they do not count as our memory
READERS = 8  # threads that wait for the disk at once
NO_WAIT = getattr(os, "RWF_NOWAIT", 0)  # read what the system has in memory, or nothing
PER_CALL = 1 << 20  # bytes that one system call reads
FULL = "the cache of keys and values is full; give --spill-dir, or a larger budget"
GROWTH = 64 << 20  # bytes: a spill file grows by at least this much, and by half of its size


class Descriptor(int):
    """A file descriptor, closed once: by `close`, or when nothing refers to it any more."""

    _open = True

    def close(self) -> None:
        if self._open:
            self._open = False
            os.close(self)

    __del__ = close


class RowFile:
    """Rows `[*row_shape]` of one dtype in an open file, from byte `start` on; the first `n_rows` exist.

    `checks`, where given, holds a number for each row. A row that was altered since it was written is found by it when
    it is read: see `fingerprints`.
    """

    def __init__(
        self, descriptor: int, name: str, row_shape: Sequence[int], dtype: torch.dtype, *, start: int = 0,
        n_rows: int = 0, checks: Tensor | None = None, writable: bool = True,
    ) -> None:  # fmt: skip
        self.name = name
        self.row_shape = tuple(row_shape)
        self.dtype = dtype
        self.n_rows = n_rows
        self.bytes_read = self.bytes_written = 0
        self._descriptor = descriptor if isinstance(descriptor, Descriptor) else Descriptor(descriptor)
        self._start = start
        self._checks = checks
        self._writable = writable
        self._touched = 0  # bytes read and written since the maps' pages were released
        self._lock = Lock()
        self._mapped: tuple[mmap.mmap, Tensor] | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return torch.Size(self.row_shape).numel() * self.dtype.itemsize

    @property
    def bytes_taken(self) -> int:
        """Bytes that the rows take on the disk, with what is reserved for later ones."""
        return self.n_bytes

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return self.n_rows * self.row_bytes

    def allocate_pages(self, groups: Numbers, chunks: Numbers, size: int) -> Numbers:
        """Where to write pages of `size` rows: the first row of each. Raises `CapacityError` where there is no space.

        `groups` and `chunks` name the pages, as `lce.cache.tiers.Pages` does.
        """
        raise CapacityError(FULL)

    def write(self, first: int, rows: Tensor) -> None:
        """Overwrite rows `first..first+n-1`, which exist, with `rows [n, *row_shape]`."""
        assert first + len(rows) <= self.n_rows, "a row that does not exist"
        data = rows.contiguous().cpu()
        if self._checks is not None:
            self._checks[first : first + len(rows)] = fingerprints(data, first)
        write_at(self._descriptor, data, self._start + first * self.row_bytes, self.name)
        self.bytes_written += len(rows) * self.row_bytes
        self._touch(len(rows) * self.row_bytes)

    def read(self, rows: Tensor) -> Tensor:
        """The rows of these numbers, `[*rows.shape, *row_shape]`. Time and bytes: O(rows), for a file of any size.

        Raises `DataError` for a row that is not what was written.
        """
        if not rows.numel():
            return torch.empty(*rows.shape, *self.row_shape, dtype=self.dtype)
        flat = rows.reshape(-1)
        found = self._map().index_select(0, flat)
        self._check(found, flat)
        return found.view(*rows.shape, *self.row_shape)

    def read_pages(self, first: Numbers, size: int) -> Tensor:
        """Rows `first[i]..first[i]+size-1` of each page: `[n, size, *row_shape]`. Time and bytes: O(n · size).

        Raises `DataError` for a row that is not what was written, and for a disk that does not read.
        """
        found = torch.empty(len(first), size, *self.row_shape, dtype=self.dtype)
        if not found.numel():
            return found
        data = memoryview(found.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        page = size * self.row_bytes
        parts = [(data[a * page : b * page], int(first[a])) for a, b in _runs(first, size, max(1, PER_CALL // page))]
        waiting = [part for part in parts if not self._fill(*part, NO_WAIT)]
        shares = [waiting[i::READERS] for i in range(min(READERS, len(waiting)))]
        list(_readers().map(lambda share: [self._fill(*part) for part in share], shares))
        self._check(found.flatten(0, 1), (torch.from_numpy(first)[:, None] + torch.arange(size)).flatten())
        return found

    def _fill(self, data: memoryview, row: int, flags: int = 0) -> bool:
        """Fill `data` from a row on; False where `NO_WAIT` was given and the disk would have to be waited for."""
        offset = self._start + row * self.row_bytes
        while data:
            try:
                n = os.preadv(self._descriptor, [data], offset, flags)
            except OSError as error:
                if flags and error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
                    return False
                raise DataError(f"cannot read {self.name}: {error.strerror}") from error
            if n == 0:
                raise DataError(f"{self.name} was cut short since it was opened; prefill the text again")
            data, offset = data[n:], offset + n
        return True

    def _check(self, found: Tensor, rows: Tensor) -> None:
        """Compare rows `found [n, …]` with their checks, and count them as read."""
        if self._checks is not None and (fingerprints(found, rows) != self._checks[rows]).any():
            raise DataError(f"{self.name} was altered since it was written; prefill the text again")
        self.bytes_read += len(rows) * self.row_bytes
        self._touch(len(rows) * self.row_bytes)

    def _touch(self, n_bytes: int) -> None:
        """Release the maps' pages now and then; the system keeps them in its own cache as long as it likes."""
        self._touched += n_bytes
        if self._touched > MAPPED:
            self._touched = 0
            for mapping in self._mappings():
                mapping.madvise(mmap.MADV_DONTNEED)

    def _mappings(self) -> list[mmap.mmap]:
        return [] if self._mapped is None else [self._mapped[0]]

    def close(self) -> None:
        """Close the file, and so unlock it; nothing can be read or written any more."""
        self._descriptor.close()

    def flush(self) -> None:
        """Make the rows written so far survive a power cut."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise unwritable(self.name, error) from error

    def _map(self) -> Tensor:
        stop, mapped = self._start + self.bytes_taken // self.row_bytes * self.row_bytes, self._mapped
        if os.fstat(self._descriptor).st_size < stop:  # reading behind the end is a signal, not an error
            raise DataError(f"{self.name} was cut short since it was opened; prefill the text again")
        if mapped is None or len(mapped[0]) < stop:
            mapping = mmap.mmap(self._descriptor, stop) if self._writable else map_copy(self._descriptor, stop)
            numbers = torch.frombuffer(mapping, dtype=self.dtype, offset=self._start)
            self._mapped = mapped = (mapping, numbers.view(-1, *self.row_shape))
        return mapped[1]  # not self._mapped, which another thread may have replaced by a shorter one


class SpillFile(RowFile):
    """A file without a name: the system removes it when it is closed, however the process ends."""

    def __init__(self, folder: Path, row_shape: Sequence[int], dtype: torch.dtype) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder, prefix="lce-spill-") as file:
                descriptor = Descriptor(os.dup(file.fileno()))
        except OSError as error:
            raise unwritable(str(folder), error) from error
        super().__init__(descriptor, f"the spill file in {folder}", row_shape, dtype)
        self._reserved = 0

    def allocate_pages(self, groups: Numbers, chunks: Numbers, size: int) -> Numbers:
        return self.allocate(len(groups) * size) + np.arange(len(groups)) * size

    def allocate(self, n: int) -> int:
        """Take disk space for `n` more rows; the number of the first."""
        with self._lock:  # a context and its forks share a file
            first = self.n_rows
            wanted = (first + n) * self.row_bytes
            if wanted > self._reserved:
                self._take(wanted, max(wanted, self._reserved * 3 // 2, self._reserved + GROWTH))
            self.n_rows = first + n
            return first

    def reserve(self, n: int) -> None:
        """Take disk space for `n` rows now, so that writing them cannot fail for lack of it."""
        if n * self.row_bytes > self._reserved:
            self._take(n * self.row_bytes, n * self.row_bytes)

    @property
    def bytes_taken(self) -> int:
        return max(self.n_bytes, self._reserved)

    def _take(self, least: int, best: int) -> None:
        for size in (best, least):
            try:
                os.posix_fallocate(self._descriptor, 0, size)
                self._reserved = size
                return
            except OSError as error:
                failure = error
        raise unwritable(self.name, failure) from failure


def _runs(first: Numbers, size: int, most: int) -> list[tuple[int, int]]:
    """Runs of pages `a..b-1` that are adjacent in the file, at most `most` pages each."""
    borders = [0, *(np.flatnonzero(np.diff(first) != size) + 1).tolist(), len(first)]
    return [(at, min(at + most, b)) for a, b in pairwise(borders) for at in range(a, b, most)]


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(READERS, "lce-read")


os.register_at_fork(after_in_child=_readers.cache_clear)  # threads stay behind in the parent


def write_at(descriptor: int, data: Tensor, offset: int, name: str) -> None:
    """Write a contiguous CPU tensor at a byte offset, all of it. Raises `CapacityError` where the disk refuses."""
    left = memoryview(data.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    try:
        while left:
            n = os.pwrite(descriptor, left, offset)
            if n == 0:
                raise OSError(5, "the disk accepted no bytes")
            left, offset = left[n:], offset + n
    except OSError as error:
        raise unwritable(name, error) from error


def fingerprints(rows: Tensor, index: int | Tensor) -> Tensor:
    """A check of each row `[n, …]` of the file, `[n]` int32: a hash of its words' inner product with odd weights.

    `index` is the number of the first row, or of each row. One damaged or exchanged row in 2^32 goes unseen. The check
    guards against faulty disks and mistakes, not against forgery. Time: that of reading the rows.
    """
    words = rows.flatten(1).view(torch.int64)
    weights = _mixed(torch.arange(1, words.shape[1] + 1)) | 1
    numbers = torch.arange(index, index + len(rows)) if isinstance(index, int) else index
    return _mixed(words @ weights + numbers).view(torch.int32)[::2]


def _mixed(x: Tensor) -> Tensor:
    """A hash of each number, as in SplitMix64, but with shifts of signed numbers."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 31)
