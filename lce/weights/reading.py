"""Stored tensors, read from their files into memory of our own.

Nothing here is a mapping of a file: a file that is cut short or overwritten later has no effect, and one that is cut
short while it is read is an error, never a signal. A `Stamp` tells whether a file is still the one whose header was
checked.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from lce.errors import CapacityError, ModelError, shown
from lce.files import named
from lce.sizes import size_text
from lce.weights.header import Damaged, TensorInfo

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
STORED = {**DTYPES, "I8": torch.int8, "U8": torch.uint8}  # with dtypes of quantised weights
NAMES = {dtype: name for name, dtype in STORED.items()}

PIECE = 8 << 20  # bytes of one read: long enough for disks, and still in the processor's cache when it is checked
READERS = 4  # threads: a disk answers several requests faster than one
_ALIGNED = 64  # bytes: where tensors begin in an arena

# The bits of the least positive number that is no finite number in the dtype that it is loaded in.
_TOO_LARGE = {
    ("F32", torch.float32): 0x7F80_0000,
    ("F32", torch.bfloat16): 0x7F7F_8000,  # rounds to infinity
    ("F32", torch.float16): 0x477F_F000,  # 65520
    ("BF16", torch.float16): 0x4780,  # 65536
    **{("BF16", dtype): 0x7F80 for dtype in (torch.float32, torch.bfloat16)},
    **{("F16", dtype): 0x7C00 for dtype in (torch.float32, torch.bfloat16, torch.float16)},
}


@dataclass(frozen=True)
class Stamp:
    """A file's identity, which changes when the file is written, truncated or replaced."""

    size: int
    inode: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, descriptor: int) -> Self:
        found = os.fstat(descriptor)
        return cls(found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True)
class Job:
    """A stored tensor to read: its name, its place, the open file, and the contiguous tensor to fill.

    `out` may be a part of a larger tensor, and may have another dtype or be on another device.
    """

    name: str
    info: TensorInfo
    descriptor: int
    out: Tensor


@dataclass(frozen=True)
class _Piece:
    """A piece of a job: bytes from `offset` of the file on go to `raw`, a part of `stage` or of the job's `out`.

    Numbers in a stage are then converted to `out`, a part of the job's `out`.
    """

    job: Job
    offset: int
    raw: Tensor
    out: Tensor
    stage: Tensor | None = None


def allocate(sizes: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device) -> list[Tensor]:
    """Allocate tensors of these shapes and dtypes. On the CPU they lie one behind the other in one block of huge pages.

    The block is returned to the system when its last tensor is gone. Raises `CapacityError` where memory runs out.
    """
    try:
        if device.type != "cpu":
            return [torch.empty(tuple(shape), dtype=dtype, device=device) for shape, dtype in sizes]
        lengths = [dtype.itemsize * int(np.prod(shape, dtype=np.int64)) for shape, dtype in sizes]
        starts = np.cumsum([0, *(-(-n // _ALIGNED) * _ALIGNED for n in lengths)]).tolist()
        block = _block(starts[-1])
        return [
            block[start : start + n].view(dtype).view(tuple(shape))
            for (shape, dtype), start, n in zip(sizes, starts, lengths, strict=False)
        ]
    except (OSError, MemoryError, RuntimeError) as error:
        needed = size_text(sum(dtype.itemsize * int(np.prod(shape, dtype=np.int64)) for shape, dtype in sizes))
        reason = " ".join(str(error).split())[:120]
        raise CapacityError(
            f"no memory for {needed} of weights ({reason}); free some, or use a smaller model"
        ) from None


def _block(n_bytes: int) -> Tensor:
    """Map private memory of the process, zeroed, in huge pages where the system has them."""
    if n_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def fill(jobs: Sequence[Job]) -> None:
    """Read every job's tensor. Peak memory beside the tensors: `2 * READERS` pieces, if numbers are converted.

    Time: that of the disk; from the page cache into fresh memory, some 0.2 s for 1.5 GiB.

    Raises ModelError for a file that ends too early or cannot be read, and for a number that is NaN or infinite, or
    becomes infinite in the dtype of `out`.
    """
    waiting: deque[tuple[Future[None], _Piece]] = deque()
    stages: list[Tensor] = []
    pool = ThreadPoolExecutor(READERS, "lce-weights")
    try:
        for piece in _pieces(jobs, stages):
            waiting.append((pool.submit(_read, piece), piece))
            if len(waiting) == 2 * READERS:
                _deliver(*waiting.popleft(), stages)
        while waiting:
            _deliver(*waiting.popleft(), stages)
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(jobs: Sequence[Job], stages: list[Tensor]) -> Iterator[_Piece]:
    """Yield all pieces of the jobs. `stages` are buffers that are free; a piece that is converted takes one of them."""
    for job in jobs:
        stored, out = STORED[job.info.dtype], job.out.view(-1)
        count, offset = PIECE // stored.itemsize, job.info.start
        for part in out.split(count) if len(out) else ():
            if out.dtype == stored and out.device.type == "cpu":
                yield _Piece(job, offset, part.view(torch.uint8), part)
            else:
                stage = stages.pop() if stages else _stage(out.device)
                yield _Piece(job, offset, stage[: len(part) * stored.itemsize], part, stage)
            offset += len(part) * stored.itemsize


def _stage(device: torch.device) -> Tensor:
    return torch.empty(PIECE, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _deliver(read: Future[None], piece: _Piece, stages: list[Tensor]) -> None:
    """Wait for a piece, and convert it if needed."""
    read.result()
    if piece.stage is not None:
        piece.out.copy_(piece.raw.view(DTYPES[piece.job.info.dtype]))
        stages.append(piece.stage)


def _read(piece: _Piece) -> None:
    job, array = piece.job, piece.raw.numpy()
    left, offset = memoryview(array), piece.offset  # type: ignore[arg-type]
    try:
        while left:
            n = os.preadv(job.descriptor, [left], offset)
            if n == 0:
                raise Damaged(job.info.file, "the file was cut short while it was read")
            left, offset = left[n:], offset + n
    except OSError as error:
        raise ModelError(f"{named(job.info.file)} cannot be read ({error.strerror}); check the disk") from None
    if job.info.dtype in DTYPES:
        _check_finite(array, job)


def _check_finite(raw: np.ndarray[Any, Any], job: Job) -> None:
    """Raise ModelError for a number that is not finite where it goes. Time: two passes over bytes in the cache.

    As whole numbers, positive floats are in order, and so are the negative ones from the first bit on.
    """
    bits = 8 * DTYPES[job.info.dtype].itemsize
    limit = _TOO_LARGE[job.info.dtype, job.out.dtype]
    if raw.view(f"i{bits // 8}").max() < limit and raw.view(f"u{bits // 8}").max() < limit + (1 << bits - 1):
        return
    if limit == _TOO_LARGE[job.info.dtype, torch.float32]:
        fault, remedy = "has NaN or infinite numbers", "the checkpoint is damaged: download it again"
    else:
        dtype = str(job.out.dtype).removeprefix("torch.")
        fault, remedy = f"has NaN, or numbers too large for {dtype}", "use another dtype, such as float32"
    raise ModelError(f"{named(job.info.file)}: tensor {shown(job.name)} {fault}; {remedy}")
