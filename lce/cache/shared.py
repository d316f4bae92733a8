"""A context's own memory, and memory that forks share: all of them read one copy of the rows that they began with.

Large tensors of a context are in mappings of their own. The allocator would keep freed tensors for later use, and a
process that closed its contexts would stay as large as it was. Memory of which half or more will surely be written is
in huge pages, which neighbouring mappings share: without them attention waits for page tables, most of all in virtual
machines. Other memory takes pages of 4 KiB as they are written.

A buffer is copied to a file in memory (Linux' memfd) when its context is first forked. From then on the context writes
to the file, after the shared rows. Each fork maps the file privately: the operating system copies a page of 4 KiB when
the fork first writes to that page. A context that is about to overwrite shared rows maps the file privately, too.

A process has one such file, and each forked context gets a part of it, so that contexts hold no file descriptors. When
nobody has a part any more, its memory is freed. The file has no name, so no other process can open it. A seal
(F_SEAL_SHRINK) keeps it from being truncated, so access to a mapping cannot fail. On systems without such files, and on
devices other than the CPU, a fork gets a copy.
"""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from lce.cache.row_file import Descriptor

SPARE = 8192  # free space after shared rows, in tokens; it takes no memory until it is written
PAGE = mmap.PAGESIZE
UNRESERVED = 0x4000  # Linux' flag MAP_NORESERVE of mmap
ALL = 1 << 62  # a number of rows larger than any cache has
MAPPED = 64 << 10  # a tensor of so many bytes has a mapping of its own
PUNCH_HOLE = 3  # Linux' mode of fallocate that frees memory of a file: FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_lock = Lock()
_file: Descriptor | None = None  # this process's file in memory


@torch.inference_mode(mode=False)  # so that code outside inference mode can write to the tensor, too
def own_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device, huge: bool = False) -> Tensor:
    """Return an uninitialised tensor for a context, in `huge` pages if asked. On a CPU the system gets freed memory."""
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    if device.type == "cpu" and n_bytes >= MAPPED:
        with suppress(OSError):  # too many mappings; if memory is short, the allocator says so
            found = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            x = torch.frombuffer(found, dtype=dtype).view(*shape)
            if huge:
                enlarge(x.data_ptr(), n_bytes)
            return x
    return torch.empty(shape, dtype=dtype, device=device)


def enlarge(address: int, n_bytes: int) -> None:
    """Have the system take huge pages, if it has any, for what is not written yet of `own_memory`."""
    if n_bytes >= MAPPED and hasattr(mmap, "MADV_HUGEPAGE"):
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), mmap.MADV_HUGEPAGE)


class MemoryFile:
    """A part of the file in memory, and one context's mappings of it: one whose writes change the file, one private.

    All contexts that have the part have one object `_shared`. When it is freed, the part's memory is freed.
    """

    def __init__(self, n_bytes: int) -> None:
        global _file
        with _lock:
            file = Descriptor(os.memfd_create("lce", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)) if _file is None else _file
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._place = file, os.fstat(file).st_size, n_bytes
            os.ftruncate(file, sum(self._place[1:]))
            _file = file
        self._shared = self._mapped(mmap.MAP_SHARED)
        finalize(self._shared, _free, *self._place).atexit = False
        self._private = self._mapped(mmap.MAP_PRIVATE | UNRESERVED)

    def for_fork(self) -> "MemoryFile":
        """Return a new `MemoryFile` for another context, with a private mapping of its own of the same part."""
        other = copy(self)
        other._private = self._mapped(mmap.MAP_PRIVATE | UNRESERVED)
        return other

    def _mapped(self, flags: int) -> Any:
        """Map the part, without Python's `mmap`, of which each object holds a file descriptor."""
        (file, start, n_bytes), access = self._place, mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, ctypes.c_size_t(n_bytes), access, flags, file, ctypes.c_long(start))
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "cannot map memory")
        memory: Any = (ctypes.c_uint8 * n_bytes).from_address(address)
        memory.whole = getattr(self, "_shared", None)
        finalize(memory, _libc.munmap, ctypes.c_void_p(address), ctypes.c_size_t(n_bytes)).atexit = False
        return memory

    def tensor(self, start: int, shape: Sequence[int], dtype: torch.dtype, *, private: bool) -> Tensor:
        """Return a tensor over the part from its byte `start` on. If `private`, writes do not change the file."""
        memory, count = self._private if private else self._shared, torch.Size(shape).numel()
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(*shape)


def _free(file: Descriptor, start: int, n_bytes: int) -> None:
    if file is _file:  # else a child process may read the part
        _libc.fallocate(file, PUNCH_HOLE, ctypes.c_long(start), ctypes.c_long(n_bytes))


ForFork = Callable[[MemoryFile], MemoryFile]  # `MemoryFile.for_fork`, called only once per file and fork


@dataclass(eq=False)
class RowBuffer:
    """A buffer of `capacity` rows along `axis` of `tensor`, in the buffer's own memory or in memory shared with forks.

    `prepare` must be called before rows are written. `place` is the tensor's address and its number of bytes.
    """

    tensor: Tensor
    axis: int
    # The part that has the rows, and their first byte; None if the rows are in the buffer's own memory.
    _shared: tuple[MemoryFile, int] | None = None
    _private: bool = False  # whether writes go to a private mapping
    _clean: int = 0  # this many first rows are the same in `tensor` and in the file
    _stop: int = 0  # the index of the first row that was never written
    _frozen: int = 0  # forks see this many first rows of the file

    def __post_init__(self) -> None:
        self._use(self.tensor)

    def _use(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.capacity, self.place = tensor.shape[self.axis], (tensor.data_ptr(), tensor.nbytes)

    @property
    def n_bytes(self) -> int:
        """The bytes that the buffer takes; if it is in a file, only rows that were written count."""
        return self.place[1] // max(self.capacity, 1) * (self.capacity if self._shared is None else self._stop)

    def prepare(self, start: int, stop: int) -> None:
        """Prepare to write rows `start..stop-1`. If forks see some of the rows, map the file privately from now on."""
        if self._shared is None:
            return
        if not self._private and start < self._frozen:
            file, first = self._shared
            self._use(file.tensor(first, self.tensor.shape, self.tensor.dtype, private=True))
            self._private, self._clean = True, start
        self._clean, self._stop = min(self._clean, start), max(self._stop, stop)

    def enlarge(self) -> None:
        """Take huge pages for what is not written yet, unless forks share the memory."""
        if self._shared is None and self.tensor.device.type == "cpu":
            enlarge(*self.place)

    def can_share(self, n_rows: int) -> bool:
        """Return whether forks can map the first `n_rows` rows where they are, without `move`."""
        return self._shared is not None and (not self._private or n_rows <= self._clean)

    def move(self, file: MemoryFile, start: int, n_rows: int, shape: Sequence[int]) -> None:
        """Move the first `n_rows` rows to byte `start` of a file; later writes go to the file. Bytes: one copy."""
        tensor = file.tensor(start, shape, self.tensor.dtype, private=False)
        tensor.narrow(self.axis, 0, n_rows).copy_(self.tensor.narrow(self.axis, 0, n_rows))
        _living.add(self)
        self._use(tensor)
        self._shared, self._private, self._frozen = (file, start), False, 0
        self._clean, self._stop = ALL, n_rows

    def fork(self, n_rows: int, for_fork: ForFork) -> "RowBuffer":
        """Return a buffer for another context with the first `n_rows` rows: shared if possible, else copied."""
        if not self.can_share(n_rows) or self._shared is None:
            rows = self.tensor.narrow(self.axis, 0, n_rows)
            return RowBuffer(own_memory(rows.shape, rows.dtype, rows.device).copy_(rows), self.axis)
        file, start = for_fork(self._shared[0]), self._shared[1]
        self._frozen = max(self._frozen, n_rows)
        tensor = file.tensor(start, self.tensor.shape, self.tensor.dtype, private=True)
        return RowBuffer(tensor, self.axis, (file, start), True, n_rows, n_rows)


_living: WeakSet[RowBuffer] = WeakSet()


def _freeze_all() -> None:
    """Make all contexts write to private mappings, and to a new file, because a child process will have the old one."""
    global _file, _lock
    _file, _lock = None, Lock()
    for rows in list(_living):
        rows._frozen = ALL


os.register_at_fork(before=_freeze_all)


def share(buffers: Sequence[tuple[RowBuffer, int, int]]) -> None:
    """Move buffers to the file in memory, unless forks can map them already. Each has rows to share, and a capacity."""
    moving, end = [], 0
    for x, n, capacity in buffers:
        if n and not x.can_share(n) and x.tensor.device.type == "cpu":
            shape = (*x.tensor.shape[: x.axis], capacity, *x.tensor.shape[x.axis + 1 :])
            moving.append((x, end, n, shape))
            end += -(-torch.Size(shape).numel() * x.tensor.dtype.itemsize // PAGE) * PAGE
    if moving and _available():
        with suppress(OSError):
            file = MemoryFile(end)
            for x, start, n, shape in moving:
                x.move(file, start, n, shape)


def _available() -> bool:
    """Return whether this system has files in memory, and never refuses memory when a mapped page is written."""
    if not hasattr(os, "memfd_create"):
        return False
    try:  # in overcommit mode 2, the system may refuse a page by a signal
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2"
    except OSError:
        return False
