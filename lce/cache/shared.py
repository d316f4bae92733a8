"""Memory that forks share: one copy of the rows that a context had when it was forked, for all contexts.

A buffer moves to a file in memory when its context is first forked: one copy. The context goes on writing to the file,
after the shared rows. Each fork maps the file privately: the operating system copies a page of 4 KiB when the fork
first writes to that page. A context that is about to overwrite shared rows maps the file privately, too.

The file has no name, so no other process can open it, and is sealed against shrinking, so access to a mapping cannot
fail. On systems without such files, and on devices other than the CPU, each fork gets a copy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import WeakSet

import torch
from torch import Tensor

from lce.cache.row_file import Descriptor

SPARE = 8192  # tokens of space after shared rows, which take no memory until written
PAGE = mmap.PAGESIZE
UNRESERVED = 0x4000  # MAP_NORESERVE of Linux
ALL = 1 << 62  # rows


class MemoryFile:
    """A file in memory, of a fixed size; holes take no memory. `holders` are the contexts that map the file."""

    def __init__(self, n_bytes: int) -> None:
        self._descriptor = Descriptor(os.memfd_create("lce", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(self._descriptor, n_bytes)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.holders: WeakSet[Holder] = WeakSet()
        self._size = n_bytes

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that the file takes."""
        return os.fstat(self._descriptor).st_blocks * 512

    def map(self, *, private: bool) -> mmap.mmap:
        """Map the whole file. Writes to a private mapping are seen only there."""
        flags = mmap.MAP_PRIVATE | UNRESERVED if private else mmap.MAP_SHARED
        return mmap.mmap(self._descriptor, self._size, flags, mmap.PROT_READ | mmap.PROT_WRITE)


class Holder:
    """The mappings of a file that the buffers of one context use, each made once: a mapping holds a descriptor."""

    def __init__(self, file: MemoryFile) -> None:
        self.file = file
        self._made: dict[bool, mmap.mmap] = {}
        file.holders.add(self)

    def mapped(self, *, private: bool) -> mmap.mmap:
        """Return the private mapping, or the shared one that writes to the file."""
        if private not in self._made:
            self._made[private] = self.file.map(private=private)
        return self._made[private]


class SharedRows:
    """A tensor `[*shape]` from byte `start` on of a file. Its first `frozen` rows never change."""

    def __init__(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.start = start
        self.shape = tuple(shape)
        self.dtype = dtype
        self.frozen = 0
        _living.add(self)

    def tensor(self, holder: Holder, *, private: bool) -> Tensor:
        """Return the tensor in a mapping of a holder."""
        count = torch.Size(self.shape).numel()
        data = torch.frombuffer(holder.mapped(private=private), dtype=self.dtype, count=count, offset=self.start)
        return data.view(self.shape)


_living: WeakSet[SharedRows] = WeakSet()


def _freeze_all() -> None:
    """Before a fork of the process, stop all contexts from writing to files that the child will map too."""
    for rows in list(_living):
        rows.frozen = ALL


os.register_at_fork(before=_freeze_all)


class RowBuffer:
    """A tensor whose rows, along `axis`, are written one after another: in memory of its own, or shared with forks.

    `prepare` must be called before rows are written.
    """

    def __init__(self, tensor: Tensor, axis: int) -> None:
        self.tensor = tensor
        self.axis = axis
        self._shared: SharedRows | None = None
        self._holder: Holder | None = None
        self._private = False
        self._clean = 0  # rows before this one are as in the file
        self._stop = 0  # rows from this one on were never written

    @property
    def capacity(self) -> int:
        """Rows that there is space for."""
        return self.tensor.shape[self.axis]

    def prepare(self, start: int, stop: int) -> None:
        """Prepare to write rows `start..stop-1`: no other context may see the new values."""
        if self._shared is None or self._holder is None:
            return
        if not self._private and start < self._shared.frozen:
            tensor = self._shared.tensor(self._holder, private=True)
            self.tensor, self._private, self._clean = tensor, True, start
        self._clean, self._stop = min(self._clean, start), max(self._stop, stop)

    def can_share(self, n_rows: int) -> bool:
        """Return whether a fork can map the first `n_rows` rows without a move."""
        return self._shared is not None and (not self._private or n_rows <= self._clean)

    def move(self, holder: Holder, start: int, n_rows: int, shape: Sequence[int]) -> None:
        """Move the first `n_rows` rows to byte `start` of a file; later writes go there. Bytes: one copy."""
        shared = SharedRows(start, shape, self.tensor.dtype)
        tensor = shared.tensor(holder, private=False)
        tensor.narrow(self.axis, 0, n_rows).copy_(self.tensor.narrow(self.axis, 0, n_rows))
        self.tensor, self._shared, self._holder, self._private = tensor, shared, holder, False
        self._clean, self._stop = ALL, n_rows

    def fork(self, n_rows: int, holder_of: Callable[[MemoryFile], Holder]) -> RowBuffer:
        """Return a buffer for another context with the first `n_rows` rows: shared if possible, else copied."""
        if not self.can_share(n_rows) or self._shared is None or self._holder is None:
            return RowBuffer(self.tensor.narrow(self.axis, 0, n_rows).clone(), self.axis)
        holder = holder_of(self._holder.file)
        other = RowBuffer(self._shared.tensor(holder, private=True), self.axis)
        other._shared, other._holder, other._private = self._shared, holder, True
        other._clean = other._stop = n_rows
        if not self._private:
            self._shared.frozen = max(self._shared.frozen, n_rows)
        return other

    @property
    def file(self) -> MemoryFile | None:
        """The file in memory with the rows; None: own memory."""
        return None if self._holder is None else self._holder.file

    @property
    def n_bytes(self) -> int:
        """Bytes held; only written rows count in a file."""
        return self.tensor.nbytes if self._shared is None else self._bytes_of(self._stop)

    @property
    def own_bytes(self) -> int:
        """Bytes held outside a file: all, or the written pages of a private mapping."""
        if self._shared is None:
            return self.tensor.nbytes
        if not self._private or self._clean >= self._stop:
            return 0
        runs = self.tensor[..., 0, 0].numel() if self.axis else 1  # the pieces of a row
        return self._bytes_of(self._stop - self._clean) + runs * PAGE

    def _bytes_of(self, n_rows: int) -> int:
        return self.tensor.nbytes // max(self.capacity, 1) * n_rows


def share(buffers: Sequence[tuple[RowBuffer, int, int]]) -> None:
    """Move buffers whose rows cannot be shared yet to a file in memory. Each comes with its rows and a capacity.

    Does nothing if the system has no such files. Bytes: one copy of the moved rows.
    """
    moving = [(x, n, m) for x, n, m in buffers if n and not x.can_share(n) and x.tensor.device.type == "cpu"]
    if not moving or not _available():
        return
    shapes = [(*x.tensor.shape[: x.axis], m, *x.tensor.shape[x.axis + 1 :]) for x, _, m in moving]
    starts, end = [], 0
    for (x, _, _), shape in zip(moving, shapes, strict=True):
        starts.append(end)
        end += -(-torch.Size(shape).numel() * x.tensor.dtype.itemsize // PAGE) * PAGE
    try:
        holder = Holder(MemoryFile(end))
        holder.mapped(private=False)
        holder.file.map(private=True).close()  # fails here rather than in a fork
    except OSError:
        return
    for (x, n, _), start, shape in zip(moving, starts, shapes, strict=True):
        x.move(holder, start, n, shape)


def _available() -> bool:
    """Return whether this system has files in memory, with pages guaranteed on writing."""
    if not hasattr(os, "memfd_create"):
        return False
    try:  # 2: memory is committed at once; a refused page would be a signal
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2"
    except OSError:
        return False
