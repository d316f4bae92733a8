"""A number for each row of a file, by which damage to the row is found when it is read.

The numbers of a spill file are in memory. Those of a context file are behind its rows: they are read some thousands at
a time, as rows are asked for, and kept; what a writer adds goes to the file too.
"""

from __future__ import annotations

import os
from functools import cache
from itertools import pairwise
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.layout import CHECK_BYTES
from lce.errors import CapacityError, DataError
from lce.files import unwritable

Numbers = NDArray[np.int64]
BLOCK = 1 << 14  # checks that are read together
FEWEST = 1 << 12  # checks of the first table


class Checks:
    """The checks of rows that are written here: a table in memory that grows by half."""

    def __init__(self) -> None:
        self._table = np.zeros(0, np.int32)
        self._lock = Lock()  # a context and its forks share a file

    @property
    def n_bytes(self) -> int:
        """Bytes of memory."""
        return self._table.nbytes

    def reserve(self, n: int) -> None:
        """Make space for those of `n` rows."""
        with self._lock:
            self._cover(n, n)

    def put(self, rows: Numbers, checks: Tensor) -> None:
        """Set the checks `[n]` int32 of these rows."""
        if len(rows):
            with self._lock:
                self._cover(int(rows.max()) + 1, max(FEWEST, len(self._table) * 3 // 2))
                self._table[rows] = checks.numpy()

    def of(self, rows: Numbers) -> NDArray[np.int32]:
        """The checks of rows that were written."""
        found: NDArray[np.int32] = self._table[rows]
        return found

    def _cover(self, least: int, best: int) -> None:
        if least > len(self._table):
            grown = np.zeros(max(least, best), np.int32)
            grown[: len(self._table)] = self._table
            self._table = grown


class FiledChecks(Checks):
    """The checks of `n` rows in an open file, from byte `start` on. Memory: those of the blocks that were asked for."""

    def __init__(self, descriptor: int, name: str, start: int, n: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._name = name
        self._start = start
        try:
            self._table = np.zeros(n, np.int32)  # the system gives memory only where something is written
            self._known = np.zeros(-(-n // BLOCK), bool)
        except (MemoryError, ValueError) as error:
            raise CapacityError(f"no memory for the checks of {n:,} rows of {name}; free some memory") from error

    @property
    def n_bytes(self) -> int:
        return min(int(self._known.sum()) * BLOCK, len(self._table)) * CHECK_BYTES

    def put(self, rows: Numbers, checks: Tensor) -> None:
        for first, stop in runs(rows, 1):
            data = memoryview(checks[first:stop].numpy()).cast("B")  # type: ignore[arg-type]
            write_all(self._descriptor, data, self._start + int(rows[first]) * CHECK_BYTES, self._name)
        with self._lock:
            self._table[rows] = checks.numpy()  # a block that is not known is read from the file all the same

    def of(self, rows: Numbers) -> NDArray[np.int32]:
        blocks = rows // BLOCK
        missing = np.unique(blocks[~self._known[blocks]])
        if len(missing):
            with self._lock:
                for block in missing.tolist():
                    self._load(block)
        return super().of(rows)

    def _load(self, block: int) -> None:
        if not self._known[block]:
            data = memoryview(self._table[block * BLOCK : (block + 1) * BLOCK]).cast("B")  # type: ignore[arg-type]
            read_all(self._descriptor, data, self._start + block * BLOCK * CHECK_BYTES, self._name)
            self._known[block] = True


def runs(first: Numbers, size: int) -> list[tuple[int, int]]:
    """Runs `a..b-1` of pages of `size` rows that are adjacent in a file, by the first row of each."""
    borders = [0, *(np.flatnonzero(np.diff(first) != size) + 1).tolist(), len(first)]
    return [(a, b) for a, b in pairwise(borders) if a < b]


def read_all(descriptor: int, data: memoryview, offset: int, name: str) -> None:
    """Fill `data` from a byte offset on. Raises `DataError` for a disk that does not read and for a file too short."""
    while data:
        try:
            n = os.preadv(descriptor, [data], offset)
        except OSError as error:
            raise DataError(f"cannot read {name}: {error.strerror}") from error
        if n == 0:
            raise DataError(f"{name} was cut short since it was opened; prefill the text again")
        data, offset = data[n:], offset + n


def write_all(descriptor: int, data: memoryview, offset: int, name: str) -> None:
    """Write bytes at an offset, all of them. Raises `CapacityError` where the disk refuses."""
    try:
        while data:
            n = os.pwrite(descriptor, data, offset)
            if n == 0:
                raise OSError(5, "the disk accepted no bytes")
            data, offset = data[n:], offset + n
    except OSError as error:
        raise unwritable(name, error) from error


def fingerprints(rows: Tensor, index: int | Tensor) -> Tensor:
    """A check of each row `[n, …]` of the file, `[n]` int32: a hash of its words' inner product with odd weights.

    The high halves of the words take part once more, shifted down: products are kept modulo 2^64, so that of a word's
    highest bits little is left otherwise, and two flips of them could cancel. `index` is the number of the first row,
    or of each row. One damaged or exchanged row in 2^32 goes unseen. The check guards against faulty disks and
    mistakes, not against forgery. Time: about that of copying the rows.
    """
    words = rows.flatten(1).view(torch.int64)
    numbers = torch.arange(index, index + len(rows)) if isinstance(index, int) else index
    weights = _weights(2 * words.shape[1])
    low, high = weights[: words.shape[1]], weights[words.shape[1] :]
    sums = words @ low + (words >> 32) @ high
    return _mixed(sums + numbers).view(torch.int32)[::2].contiguous()


@cache
def _weights(n: int) -> Tensor:
    return _mixed(torch.arange(1, n + 1)) | 1


def _mixed(x: Tensor) -> Tensor:
    """A hash of each number, as in SplitMix64, but with shifts of signed numbers."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 31)
