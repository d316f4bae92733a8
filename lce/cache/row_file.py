"""Files of rows: keys and values that memory does not hold.

A row is what one token has in one page's heads, `[2, P, D]`: its keys and its values. Rows are read and written through
the file descriptor, so that a full disk, a failing disk or a truncated file is an error and not a signal. Rows in the
system's page cache are read first, then the others by several threads.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from lce.cache.checks import Checks, Numbers, fingerprints, read_all, runs, write_all
from lce.cache.formats import KVFormat
from lce.errors import CapacityError, DataError
from lce.files import named, unwritable

READERS = 8  # threads that wait for the disk at once
NO_WAIT = getattr(os, "RWF_NOWAIT", 0)  # read only from the system's page cache
PER_CALL = 1 << 20  # bytes that one system call reads
GAP = 4096  # unneeded bytes worth reading to save a call
AT_ONCE = 4096  # single rows that are read together
FULL = "the cache of keys and values is full; give --spill-dir, or a larger budget"
GROWTH = 64 << 20  # bytes: a spill file grows by at least this much, and by half of its size


class Descriptor(int):
    """A file descriptor, closed once: by `close`, or when nothing refers to it any more."""

    _open = True
    _close = staticmethod(os.close)  # found here after the interpreter has taken its modules apart

    def close(self) -> None:
        if self._open:
            self._open = False
            self._close(self)

    __del__ = close


class RowFile:
    """Rows as a format has them in an open file, from byte `start` on; the first `n_rows` exist.

    Rows and pages can only be written if the file is `writable`. `checks` has a number for each row, which reveals on
    reading that the row was altered.
    """

    def __init__(
        self, descriptor: int, name: str, format: KVFormat, checks: Checks, *, start: int = 0, n_rows: int = 0,
        writable: bool = True,
    ) -> None:  # fmt: skip
        self.name = name
        self.row_shape = format.row_shape
        self.dtype = format.row_dtype
        self.row_bytes = format.row_bytes
        self.n_rows = n_rows  # that exist
        self.bytes_read = self.bytes_written = 0
        self.checks = checks
        self._descriptor = descriptor if isinstance(descriptor, Descriptor) else Descriptor(descriptor)
        self._start = start
        self.writable = writable
        self._no_wait = NO_WAIT

    @property
    def bytes_taken(self) -> int:
        """Bytes on the disk, including space reserved for later rows."""
        return self.n_bytes

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return self.n_rows * self.row_bytes

    def allocate_pages(self, groups: Numbers, chunks: Numbers, size: int) -> Numbers:
        """Allocate pages of `size` rows; return the first row of each.

        Raises `CapacityError` if there is no space.

        `groups` and `chunks` name the pages, as `lce.cache.tiers.Pages` does.
        """
        raise CapacityError(FULL)

    def for_fork(self) -> RowFile:
        """Return the file as another context with the same rows uses it."""
        return self

    def write(self, first: int, rows: Tensor) -> None:
        """Overwrite rows `first..first+n-1`, which exist, with `rows [n, *row_shape]`."""
        self.write_pages(np.array([first]), rows[None])

    def write_pages(self, first: Numbers, pages: Tensor) -> None:
        """Overwrite rows `first[i]..first[i]+size-1`, which exist, with `pages [n, size, *row_shape]`."""
        size = pages.shape[1]
        assert not len(first) or int(first.max()) + size <= self.n_rows, "a row that does not exist"
        if not pages.numel():
            return
        data, rows = pages.contiguous().cpu(), _rows_of(first, size)
        raw = memoryview(data.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        page = size * self.row_bytes
        for a, b in runs(first, size):
            write_all(
                self._descriptor, raw[a * page : b * page], self._start + int(first[a]) * self.row_bytes, self.name
            )
        self.checks.put(rows, fingerprints(data.flatten(0, 1), torch.from_numpy(rows)))
        self.bytes_written += len(raw)

    def read(self, rows: Tensor) -> Tensor:
        """Read rows by number, `[*rows.shape, *row_shape]`.

        Time and bytes: O(rows), for a file of any size.

        Raises `DataError` for a row that is not what was written, and for a disk that does not read.
        """
        flat = rows.reshape(-1).numpy()
        found = torch.empty(len(flat), *self.row_shape, dtype=self.dtype)
        for start in range(0, len(flat), AT_ONCE):
            self._gather(flat[start : start + AT_ONCE], found[start : start + AT_ONCE])
        self._check(found, flat)
        return found.view(*rows.shape, *self.row_shape)

    def _gather(self, rows: Numbers, found: Tensor) -> None:
        """Read rows into `found`; rows close together are read in one call, with the gaps between them."""
        order = None if (rows[1:] > rows[:-1]).all() else np.argsort(rows, kind="stable")
        ascending = rows if order is None else rows[order]
        cuts = np.flatnonzero((np.diff(ascending) - 1) * self.row_bytes > GAP) + 1
        begins, ends = np.concatenate(([0], cuts)), np.concatenate((cuts, [len(rows)]))
        first, lengths = ascending[begins], ascending[ends - 1] + 1 - ascending[begins]
        stops = np.cumsum(lengths)
        whole = order is None and int(stops[-1]) == len(rows)
        scratch = found if whole else found.new_empty(int(stops[-1]), *self.row_shape)
        raw = self._raw(scratch)
        bounds = np.concatenate(([0], stops * self.row_bytes)).tolist()
        self._fetch(
            (raw[start:stop], offset)
            for (start, stop), offset in zip(
                pairwise(bounds), (self._start + first * self.row_bytes).tolist(), strict=True
            )
        )
        if whole:
            return
        at = ascending - np.repeat(first - stops + lengths, ends - begins)  # index in the scratch buffer
        if order is not None:
            at[order] = at.copy()
        torch.index_select(scratch, 0, torch.from_numpy(at), out=found)

    def read_pages(self, first: Numbers, size: int) -> Tensor:
        """Read rows `first[i]..first[i]+size-1` of each page: `[n, size, *row_shape]`. Time and bytes: O(n · size).

        Raises `DataError` for a row that is not what was written, and for a disk that does not read.
        """
        found = torch.empty(len(first), size, *self.row_shape, dtype=self.dtype)
        if not found.numel():
            return found
        data, page = self._raw(found), size * self.row_bytes
        most = max(1, PER_CALL // page)
        self._fetch(
            (data[at * page : min(at + most, b) * page], self._start + int(first[at]) * self.row_bytes)
            for a, b in runs(first, size)
            for at in range(a, b, most)
        )
        self._check(found.flatten(0, 1), _rows_of(first, size))
        return found

    def _raw(self, rows: Tensor) -> memoryview:
        return memoryview(rows.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]

    def _fetch(self, parts: Iterable[tuple[memoryview, int]]) -> None:
        """Fill each part from its byte offset on: first from the system's page cache, then from the disk."""
        descriptor, preadv, waiting = self._descriptor, os.preadv, []
        for data, offset in parts:  # thousands of them: a microsecond each
            try:
                n = preadv(descriptor, [data], offset, self._no_wait)
            except OSError as error:
                if error.errno == errno.EOPNOTSUPP and self._no_wait:
                    self._no_wait = 0  # this file system lacks RWF_NOWAIT; parts are read one after the other
                elif error.errno != errno.EAGAIN:
                    raise DataError(f"cannot read {self.name}: {error.strerror}") from error
                n = 0
            if n < len(data):
                waiting.append((data[n:], offset + n))
        if len(waiting) < 2:
            self._wait_for(waiting)
        else:
            shares = [waiting[i::READERS] for i in range(min(READERS, len(waiting)))]
            list(_readers().map(self._wait_for, shares))

    def _wait_for(self, parts: Sequence[tuple[memoryview, int]]) -> None:
        for data, offset in parts:
            read_all(self._descriptor, data, offset, self.name)

    def _check(self, found: Tensor, rows: Numbers) -> None:
        """Compare rows `found [n, …]` with their checks, and count them as read."""
        if len(rows) and (fingerprints(found, torch.from_numpy(rows)).numpy() != self.checks.of(rows)).any():
            raise DataError(f"{self.name} was altered since it was written; prefill the text again")
        self.bytes_read += len(rows) * self.row_bytes

    def close(self) -> None:
        """Close and unlock the file; no more reads or writes."""
        self._descriptor.close()

    def flush(self) -> None:
        """Make the rows written so far survive a power cut."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise unwritable(self.name, error) from error


class SpillFile(RowFile):
    """A file without a name: the system removes it when it is closed, however the process ends."""

    def __init__(self, folder: Path, format: KVFormat) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder, prefix="lce-spill-") as file:
                descriptor = Descriptor(os.dup(file.fileno()))
        except OSError as error:
            raise unwritable(folder, error) from error
        super().__init__(descriptor, f"the spill file in {named(folder)}", format, Checks())
        self._reserved = 0
        self._lock = Lock()  # several contexts may share the file

    def allocate_pages(self, groups: Numbers, chunks: Numbers, size: int) -> Numbers:
        return self.allocate(len(groups) * size) + np.arange(len(groups)) * size

    def allocate(self, n: int) -> int:
        """Allocate disk space for `n` more rows, and some spare; return the first row's number."""
        with self._lock:
            first, wanted = self.n_rows, (self.n_rows + n) * self.row_bytes
            if wanted > self._reserved:
                self._take(wanted, max(wanted, self._reserved * 3 // 2, self._reserved + GROWTH))
            self.n_rows += n
        return first

    def reserve(self, n: int) -> None:
        """Allocate disk space for `n` rows now, so that writes cannot run out of space, and memory for checks."""
        self.checks.reserve(n)
        if n * self.row_bytes > self._reserved:
            self._take(n * self.row_bytes, n * self.row_bytes)

    @property
    def bytes_taken(self) -> int:
        return max(self.n_bytes, self._reserved)

    def _take(self, least: int, best: int) -> None:
        for size in (best, least):
            try:
                os.posix_fallocate(self._descriptor, 0, size)
                self._reserved = max(self._reserved, size)
                return
            except OSError as error:
                failure = error
        raise unwritable(self.name, failure) from failure


def _rows_of(first: Numbers, size: int) -> Numbers:
    """Return the rows of pages, in order."""
    rows: Numbers = (first[:, None] + np.arange(size)).reshape(-1)
    return rows


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(READERS, "lce-read")


os.register_at_fork(after_in_child=_readers.cache_clear)  # threads stay behind in the parent
