"""A check of each row of a file: a number that reveals damage when the row is read.

The checks of a spill file are in memory. The checks of a context file come after its rows: they are read in blocks of
some thousands as rows are read, and kept. A writer adds new checks to the file too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.errors import DataError
from lce.files import unwritable

Numbers = NDArray[np.int64]
CHECK_BYTES = 4  # of a row in a file
CHECK_BLOCK = 1 << 12  # checks in a block


class Checks:
    """Checks of rows in memory, in blocks that are made as rows come.

    Several contexts may share a file, in several threads. No lock guards the blocks, because Ctrl-C could leave the
    lock held: a block is made once, and never replaced.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, NDArray[np.int32]] = {}

    @property
    def n_bytes(self) -> int:
        """Bytes of memory."""
        return sum(block.nbytes for block in list(self._blocks.values()))

    def reserve(self, n: int) -> None:
        """Make space for the checks of `n` rows."""
        for block in range(-(-n // CHECK_BLOCK)):
            self._block(block)

    def put(self, rows: Numbers, checks: Tensor) -> None:
        """Set the checks `[n]` int32 of these rows."""
        for block, some, places in _by_block(rows):
            self._block(block)[places] = checks[some].numpy()

    def of(self, rows: Numbers) -> NDArray[np.int32]:
        """Return the checks of rows that were written."""
        found = np.empty(len(rows), np.int32)
        for block, some, places in _by_block(rows):
            found[some] = self._block(block)[places]
        return found

    def _block(self, block: int) -> NDArray[np.int32]:
        if block not in self._blocks:
            self._blocks.setdefault(block, self._new(block))
        return self._blocks[block]

    def _new(self, block: int) -> NDArray[np.int32]:
        return np.zeros(CHECK_BLOCK, np.int32)


class FiledChecks(Checks):
    """The checks of `n` rows in an open file, from byte `start` on. Memory: the blocks read so far."""

    def __init__(self, descriptor: int, name: str, start: int, n: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._name = name
        self._start = start
        self._n = n

    def put(self, rows: Numbers, checks: Tensor) -> None:
        for first, stop in runs(rows, 1):
            data = memoryview(checks[first:stop].numpy()).cast("B")  # type: ignore[arg-type]
            write_all(self._descriptor, data, self._start + int(rows[first]) * CHECK_BYTES, self._name)
        super().put(rows, checks)

    def _new(self, block: int) -> NDArray[np.int32]:
        first = block * CHECK_BLOCK
        found = np.zeros(min(CHECK_BLOCK, self._n - first), np.int32)
        data = memoryview(found).cast("B")  # type: ignore[arg-type]
        read_all(self._descriptor, data, self._start + first * CHECK_BYTES, self._name)
        return found


def _by_block(rows: Numbers) -> Iterator[tuple[int, slice, Numbers]]:
    """Yield runs of rows in one block: the block, a slice of `rows`, and the rows' indices in the block."""
    if len(rows):
        blocks = rows // CHECK_BLOCK
        for first, stop in pairwise([0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(rows)]):
            block = int(blocks[first])
            yield block, slice(first, stop), rows[first:stop] - block * CHECK_BLOCK


def runs(first: Numbers, size: int) -> list[tuple[int, int]]:
    """Return runs `a..b-1` of pages of `size` rows that are adjacent in a file, by the first row of each."""
    borders = [0, *(np.flatnonzero(np.diff(first) != size) + 1).tolist(), len(first)]
    return [(a, b) for a, b in pairwise(borders) if a < b]


def read_all(descriptor: int, data: memoryview, offset: int, name: str) -> None:
    """Fill `data` from a byte offset on. Raises `DataError` if the disk fails or the file is too short."""
    while data:
        try:
            n = os.preadv(descriptor, [data], offset)
        except OSError as error:
            raise DataError(f"cannot read {name}: {error.strerror}") from error
        if n == 0:
            raise DataError(f"{name} was cut short since it was opened; prefill the text again")
        data, offset = data[n:], offset + n


def write_all(descriptor: int, data: memoryview, offset: int, name: str) -> None:
    """Write all bytes at an offset. Raises `CapacityError` where the disk refuses."""
    try:
        while data:
            n = os.pwrite(descriptor, data, offset)
            if n == 0:
                raise OSError(5, "the disk accepted no bytes")
            data, offset = data[n:], offset + n
    except OSError as error:
        raise unwritable(name, error) from error


def fingerprints(rows: Tensor, index: int | Tensor) -> Tensor:
    """Return a check of each row `[n, …]` of the file, `[n]` int32.

    A check is a hash of the inner product of the row's words with odd weights.

    The words' high halves, shifted down, are added, because products modulo 2^64 lose most of a word's highest bits,
    and two flips there could cancel. `index` is the number of the first row, or of each row. One damaged or exchanged
    row in 2^32 goes unseen. The check guards against faulty disks and mistakes, not against forgery. Time: about that
    of copying the rows.
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
    """Return a hash of each number: SplitMix64 with signed shifts."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 31)
