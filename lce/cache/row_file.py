"""Files of rows: keys and values that are not held in memory. Each row has a checksum.

A row has the keys and values of one token in the heads of one page, `[2, P, D]`. Rows are read and written through the
file descriptor, so that a full disk, a failing disk or a truncated file raises an error, not a signal. Rows in the
system's page cache are read first, then several threads read the other rows.

A row's checksum also depends on the row's number and on a seed of the file, so a row copied from another place or from
another file is refused. The checksums of a spill file are in memory, those of a context file after its rows, too.
"""

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.formats import KVFormat
from lce.cache.movers import Numbers, runs
from lce.errors import CapacityError, DataError
from lce.files import unwritable
from lce.system import lasting_executor

CHECK_BYTES = 4  # the bytes of one row's checksum
CHECK_BLOCK = 1 << 12  # the number of checksums in a block
READERS = 8  # the number of threads that wait for the disk at once
NO_WAIT = getattr(os, "RWF_NOWAIT", 0)  # a flag: read only from the system's page cache
PER_CALL = 1 << 20  # the most bytes that one system call reads
GAP = 4096  # the most unneeded bytes that are read to save a system call
AT_ONCE = 4096  # the most single rows that are read together
FULL = "the cache of keys and values is full; give --spill-dir, or a larger budget"


class Descriptor(int):
    """A file descriptor that is closed once, by `close` or when nothing refers to it any more."""

    _open = True
    _close = staticmethod(os.close)  # still found here when the interpreter has emptied the module `os`, at exit

    def close(self) -> None:
        if self._open:
            self._open = False
            self._close(self)

    __del__ = close


@dataclass(eq=False)
class Checks:
    """Checksums of rows in memory, in blocks that are allocated when they are first used.

    If `n` is not 0, a file has the checksums of its `n` rows, too, from byte `start` on; a block is read from there.
    They depend on `seed`, a random number. Threads may share them: a block is made once and never replaced.
    """

    descriptor: int = -1
    name: str = ""
    start: int = 0
    n: int = 0
    seed: int = 0
    _blocks: dict[int, NDArray[np.int32]] = field(default_factory=dict, init=False)

    def reserve(self, n: int) -> None:
        """Allocate memory for the checksums of `n` rows."""
        for block in range(-(-n // CHECK_BLOCK)):
            self._block(block)

    def put(self, rows: Numbers, checks: Tensor) -> None:
        """Set the int32 checksums `[n]` of rows, in memory and, if the file has checksums, in the file."""
        for run in runs(np.diff(rows) != 1, len(rows)) if self.n else ():
            start = self.start + int(rows[run.start]) * CHECK_BYTES
            write_all(self.descriptor, raw_bytes(checks[run]), start, self.name)
        for block, some, places in _by_block(rows):
            self._block(block)[places] = checks[some].numpy()

    def of(self, rows: Numbers) -> NDArray[np.int32]:
        """Return the checksums of rows that were written."""
        found = np.empty(len(rows), np.int32)
        for block, some, places in _by_block(rows):
            found[some] = self._block(block)[places]
        return found

    def _block(self, block: int) -> NDArray[np.int32]:
        if block not in self._blocks:
            first = block * CHECK_BLOCK
            found = torch.zeros(min(CHECK_BLOCK, self.n - first) if self.n else CHECK_BLOCK, dtype=torch.int32)
            if self.n:
                read_all(self.descriptor, raw_bytes(found), self.start + first * CHECK_BYTES, self.name)
            self._blocks.setdefault(block, found.numpy())
        return self._blocks[block]


class RowFile:
    """An open file of `n_rows` rows in a storage format, from byte `start` on. Takes new pages if it is `writable`."""

    writable = True

    def __init__(
        self, descriptor: int, name: str, format: KVFormat, checks: Checks, start: int = 0, n_rows: int = 0
    ) -> None:
        self.name = name
        self.format = format
        self.row_bytes = format.row_bytes
        self.n_rows = n_rows
        self.bytes_read = self.bytes_written = 0
        self.checks = checks
        self._descriptor = descriptor if isinstance(descriptor, Descriptor) else Descriptor(descriptor)
        self._start = start
        self._no_wait = NO_WAIT
        self.reserved = 0  # the bytes of disk space allocated so far, including rows not written yet

    @property
    def n_bytes(self) -> int:
        """The bytes of all rows in the file."""
        return self.n_rows * self.row_bytes

    def allocate_pages(self, groups: Numbers, chunks: Numbers, size: int) -> Numbers:
        """Allocate `size` rows for each page `(groups[i], chunks[i])`; return the numbers of the pages' first rows."""
        raise CapacityError(FULL)

    def for_fork(self) -> "RowFile":
        """Return the row file that a forked context is to use; it has the same rows."""
        return self

    def write_pages(self, first: Numbers, pages: Tensor) -> None:
        """Write `pages [n, size, *row_shape]`: page i to the existing rows `first[i]..first[i]+size-1`."""
        size = pages.shape[1]
        assert not len(first) or int(first.max()) + size <= self.n_rows, "a row that does not exist"
        if not pages.numel():
            return
        data, rows, page = pages.contiguous().cpu(), _rows_of(first, size), size * self.row_bytes
        raw = raw_bytes(data)
        for run in runs(np.diff(first) != size, len(first)):
            start = self._start + int(first[run.start]) * self.row_bytes
            write_all(self._descriptor, raw[run.start * page : run.stop * page], start, self.name)
        self.checks.put(rows, fingerprints(data.flatten(0, 1), rows + self.checks.seed))
        self.bytes_written += len(raw)

    def read(self, rows: Numbers) -> Tensor:
        """Return rows `[n, *row_shape]` by their numbers `[n]`. Time: O(n). Raises `DataError` for a damaged row."""
        found = torch.empty(len(rows), *self.format.row_shape, dtype=self.format.row_dtype)
        for start in range(0, len(rows), AT_ONCE):
            self._gather(rows[start : start + AT_ONCE], found[start : start + AT_ONCE])
        self._check(found, rows)
        return found

    def _gather(self, rows: Numbers, found: Tensor) -> None:
        """Read rows into `found`. Rows that are close together are read in one call, with the gaps between them."""
        order = None if (rows[1:] > rows[:-1]).all() else np.argsort(rows, kind="stable")
        ascending = rows if order is None else rows[order]
        cuts = np.flatnonzero((np.diff(ascending) - 1) * self.row_bytes > GAP) + 1
        begins, ends = np.concatenate(([0], cuts)), np.concatenate((cuts, [len(rows)]))
        first, lengths = ascending[begins], ascending[ends - 1] + 1 - ascending[begins]
        stops = np.cumsum(lengths)
        whole = order is None and int(stops[-1]) == len(rows)
        scratch = found if whole else found.new_empty(int(stops[-1]), *self.format.row_shape)
        raw, bounds = raw_bytes(scratch), np.concatenate(([0], stops * self.row_bytes)).tolist()
        offsets = (self._start + first * self.row_bytes).tolist()
        self._fetch((raw[a:b], offset) for (a, b), offset in zip(pairwise(bounds), offsets, strict=True))
        if whole:
            return
        at = ascending - np.repeat(first - stops + lengths, ends - begins)  # each row's index in `scratch`
        if order is not None:
            at[order] = at.copy()
        torch.index_select(scratch, 0, torch.from_numpy(at), out=found)

    def read_pages(self, first: Numbers, size: int) -> Tensor:
        """Return pages `[n, size, *row_shape]` that begin at rows `first [n]`. Raises `DataError` for a damaged row."""
        found = torch.empty(len(first), size, *self.format.row_shape, dtype=self.format.row_dtype)
        if not found.numel():
            return found
        data, page = raw_bytes(found), size * self.row_bytes
        most = max(1, PER_CALL // page)
        self._fetch(
            (data[at * page : min(at + most, run.stop) * page], self._start + int(first[at]) * self.row_bytes)
            for run in runs(np.diff(first) != size, len(first))
            for at in range(run.start, run.stop, most)
        )
        self._check(found.flatten(0, 1), _rows_of(first, size))
        return found

    def _fetch(self, parts: Iterable[tuple[memoryview, int]]) -> None:
        """Fill each (memory, byte offset) of `parts`: first from the system's page cache, then from the disk."""
        descriptor, preadv, waiting = self._descriptor, os.preadv, []
        for data, offset in parts:  # kept fast: there may be thousands of parts, each of about a microsecond
            try:
                n = preadv(descriptor, [data], offset, self._no_wait)
            except OSError as error:
                if error.errno == errno.EOPNOTSUPP:
                    self._no_wait = 0  # the file system lacks RWF_NOWAIT: `preadv` waits for the disk from now on
                n = 0
            if n < len(data):
                waiting.append((data[n:], offset + n))
        shares = [waiting[i::READERS] for i in range(min(READERS, len(waiting)))]
        list((lasting_executor(READERS, "lce-read").map if len(shares) > 1 else map)(self._read_all, shares))

    def _read_all(self, parts: Sequence[tuple[memoryview, int]]) -> None:
        for data, offset in parts:
            read_all(self._descriptor, data, offset, self.name)

    def _check(self, found: Tensor, rows: Numbers) -> None:
        """Raise `DataError` unless rows `found [n, …]` agree with their checksums; add their bytes to `bytes_read`."""
        if len(rows) and (fingerprints(found, rows + self.checks.seed).numpy() != self.checks.of(rows)).any():
            raise DataError(f"{self.name} was altered since it was written; prefill the text again")
        self.bytes_read += len(rows) * self.row_bytes

    def close(self) -> None:
        """Close and unlock the file, which cannot be used any more."""
        self._descriptor.close()

    def flush(self) -> None:
        """Make the rows written so far survive a power cut."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise unwritable(self.name, error) from error


def raw_bytes(x: Tensor) -> memoryview:
    """Return the bytes of a tensor, a view if the tensor is contiguous and on the CPU."""
    return memoryview(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _rows_of(first: Numbers, size: int) -> Numbers:
    rows: Numbers = (first[:, None] + np.arange(size)).reshape(-1)
    return rows


def _by_block(rows: Numbers) -> Iterator[tuple[int, slice, Numbers]]:
    """Split `rows` where the block of checksums changes. Yield for each part: block, slice of `rows`, indices in it."""
    blocks = rows // CHECK_BLOCK
    for run in runs(np.diff(blocks) != 0, len(rows)):
        block = int(blocks[run.start])
        yield block, run, rows[run] - block * CHECK_BLOCK


def read_all(descriptor: int, data: memoryview, offset: int, name: str) -> None:
    """Fill `data` from a byte offset on. Raises `DataError` if the disk fails or the file is too short."""
    while data:
        try:
            n = os.preadv(descriptor, [data], offset)
        except OSError as error:
            raise DataError(f"cannot read {name}: {error.strerror}; prefill the text again") from error
        if n == 0:
            raise DataError(f"{name} was cut short since it was opened; prefill the text again")
        data, offset = data[n:], offset + n


def write_all(descriptor: int, data: memoryview, offset: int, name: str) -> None:
    """Write all of `data` at a byte offset. Raises `CapacityError` if the disk is full or refuses the bytes."""
    try:
        while data:
            n = os.pwrite(descriptor, data, offset)
            if n == 0:
                raise OSError(5, "the disk accepted no bytes")
            data, offset = data[n:], offset + n
    except OSError as error:
        raise unwritable(name, error) from error


def fingerprints(rows: Tensor, places: Numbers) -> Tensor:
    """Return a checksum of each row of `[n, …]`, as `[n]` int32.

    The checksum is a hash of the inner product of the row's 64-bit words with odd weights. The high half of each word
    also counts as a word of its own: a product modulo 2^64 keeps little of a word's highest bits, so two flipped bits
    there could cancel. `places [n]` are the rows' numbers plus the file's seed. One damaged or exchanged row in 2^32 is
    not noticed: this guards against faulty disks, not forgery. Time: about that of copying the rows.
    """
    words = rows.flatten(1).view(torch.int64)
    low, high = _weights(2 * words.shape[1]).chunk(2)
    sums = torch.addmv(torch.from_numpy(places), words, low).addmv_(words >> 32, high)
    return _mixed(sums).view(torch.int32)[::2].clone(memory_format=torch.contiguous_format)


@cache
def _weights(n: int) -> Tensor:
    return _mixed(torch.arange(1, n + 1)) | 1


def _mixed(x: Tensor) -> Tensor:
    """Return a hash of each int64 number: SplitMix64, with shifts that keep the sign."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 31)
