"""Safetensors files: checks their headers in full, and reads tensors into memory.

A file has eight bytes of header length, the header (a JSON object: name -> dtype, shape, data_offsets), and the data.
The tensors must fill the data exactly: no overlap, no hole, nothing left over. The header's size is limited before the
header is parsed, so that a hostile file takes little time and memory. No file is memory-mapped, so a file that is
truncated while it is read raises an error, never a signal.
"""

import hashlib
import math
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, cycle
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.errors import CapacityError, ModelError, shown
from lce.files import named, object_of, open_regular
from lce.sizes import size_text
from lce.system import executor

LARGEST_HEADER = 8 << 20  # The most bytes of a header. The largest published headers are below 1 MiB.
MOST_TENSORS = 50_000  # The most tensors of a checkpoint. The largest supported models have about 1,200.
MOST_VALUES = 12 * MOST_TENSORS  # The most JSON values and names in a header. A matrix takes 12.

ITEM_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
_LARGEST_SIZE = 2**48  # The largest size of one dimension.
_MOST_DIMENSIONS = 64

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
STORED = {**DTYPES, "I8": torch.int8, "U8": torch.uint8}  # also the dtypes of quantised weights
NAMES = {dtype: name for name, dtype in STORED.items()}

# The bytes of one read, and of one checksum: enough for a disk's full speed, and still in the CPU's cache when checked.
PIECE = 8 << 20
READERS = 4  # The number of threads that read: a disk answers several requests faster than one.
AGAIN = "quantize the checkpoint again"  # the remedy for a damaged file that lce wrote
_ALIGNED = 64  # Tensors in memory begin at multiples of this number of bytes.

# Key: the stored and the loaded dtype. Value: the bits of the least positive stored number that is loaded as infinity.
_TOO_LARGE = {
    ("F32", torch.float32): 0x7F80_0000,
    ("F32", torch.bfloat16): 0x7F7F_8000,  # the least float32 that bfloat16 rounds to infinity
    ("F32", torch.float16): 0x477F_F000,  # the bits of 65520, which float16 rounds to infinity
    ("BF16", torch.float16): 0x4780,  # the bits of 65536, which float16 cannot hold
    **dict.fromkeys((("BF16", torch.float32), ("BF16", torch.bfloat16)), 0x7F80),
    **{("F16", dtype): 0x7C00 for dtype in DTYPES.values()},
}

Copies = list[tuple[Tensor, Tensor]]  # pairs of a tensor to write and what to copy there
Files = Mapping[Path, int]  # the descriptors of open files


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor: bytes `start` to `stop` of `file`, and the checksums of their `PIECE`s, if the file has them."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    checks: tuple[str, ...] = ()


class Damaged(ModelError):
    """The error for a damaged file of weights."""

    def __init__(self, path: Path, what: str, remedy: str = "") -> None:
        super().__init__(f"{named(path)}: {what}; {remedy or 'the file is damaged or incomplete: download it again'}")


def few(names: Sequence[str]) -> str:
    """Return text for a message: the first three names, and how many more there are."""
    return ", ".join(map(shown, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str], tuple[int, ...]]:
    """Return a file's tensors in the header's order, its metadata and stamp. Raises ModelError for a wrong header."""
    with open(open_regular(path, ModelError), "rb") as file:
        file_size, *_ = stamp = stamp_of(file.fileno())  # before the rest, so that a change is noticed later
        prefix = pread(file.fileno(), min(8, file_size), 0, path)
        length = int.from_bytes(prefix, "little")
        if prefix == b"version ":
            raise ModelError(f"{named(path)} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
        if len(prefix) < 8 or length + 8 > file_size:
            raise Damaged(path, f"a header of {length} bytes does not fit in a file of {file_size}")
        if length > LARGEST_HEADER:
            raise Damaged(path, f"a header of {length} bytes; expected at most {LARGEST_HEADER}")
        raw = pread(file.fileno(), length, 8, path)
    if raw[:1] != b"{":
        raise Damaged(path, "the header does not begin with '{'")
    entries = object_of(raw, path, MOST_VALUES, unique=True)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Damaged(path, "__metadata__ is not an object of strings")
    end = data_start = 8 + length
    tensors = {name: _tensor(path, name, entry, data_start) for name, entry in entries.items()}
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != end:
            fault = "overlaps the one before it" if info.start < end else "leaves a hole before it"
            raise Damaged(path, f"tensor {shown(name)} {fault}")
        end = info.stop
    if end != file_size:
        fault = "is cut short" if end > file_size else "has bytes that belong to no tensor"
        raise Damaged(path, f"the file {fault}: {file_size} bytes, expected {end}")
    return tensors, metadata, stamp


def pread(descriptor: int, count: int, offset: int, path: Path) -> bytes:
    """Read `count` bytes of an open file. Raises ModelError as `read_into` does."""
    found = bytearray(count)
    read_into(memoryview(found), descriptor, offset, path)
    return bytes(found)


def read_into(out: memoryview, descriptor: int, offset: int, path: Path) -> None:
    """Fill `out` from an open file. Raises ModelError for a file that ends too early or cannot be read."""
    try:
        while out:
            n = os.preadv(descriptor, [out], offset)
            if n == 0:
                raise Damaged(path, "the file was cut short while it was read")
            out, offset = out[n:], offset + n
    except OSError as error:
        raise ModelError(f"{named(path)} cannot be read ({error.strerror}); check the disk") from None


def _tensor(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    def damaged(what: str) -> Damaged:
        return Damaged(path, f"tensor {shown(name)} {what}")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise damaged("is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise damaged(f"has the unknown dtype {shown(dtype)}")
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        raise damaged(f"has the impossible shape {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged(f"has the impossible data_offsets {shown(offsets)}")
    start, stop = offsets
    expected = math.prod(shape) * ITEM_SIZES[dtype]
    if stop - start != expected:
        raise damaged(f"has {stop - start} bytes; its shape and dtype take {expected}")
    return TensorInfo(path, dtype, tuple(shape), data_start + start, data_start + stop)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < _LARGEST_SIZE for size in value)


def stamp_of(descriptor: int) -> tuple[int, ...]:
    """Return an open file's stamp, which changes when the file is written, truncated or replaced."""
    found = os.fstat(descriptor)
    return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


@contextmanager
def opened(stamps: Mapping[Path, tuple[int, ...]]) -> Iterator[Files]:
    """Open files. Raises ModelError if the stamp of one is not that of `stamps`, now or when the files are closed."""

    def check() -> None:
        for file, descriptor in files.items():
            if stamp_of(descriptor) != stamps[file]:
                fault = "changed while it was loaded; load it again when nothing writes to it"
                raise ModelError(f"{named(file)} {fault}")

    with ExitStack() as at_end:
        found = ((file, os.fdopen(open_regular(file, ModelError), "rb")) for file in stamps)
        files = {file: at_end.enter_context(each).fileno() for file, each in found}
        check()
        at_end.callback(check)  # after an error, too: a changed file may be the cause
        yield files


def allocate(sizes: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device) -> list[Tensor]:
    """Allocate tensors, on the CPU in one block of huge pages, freed with the last one. Raises `CapacityError`."""
    lengths = [dtype.itemsize * math.prod(shape) for shape, dtype in sizes]
    try:
        if device.type != "cpu":
            return [torch.empty(tuple(shape), dtype=dtype, device=device) for shape, dtype in sizes]
        starts = [0, *accumulate(-(-n // _ALIGNED) * _ALIGNED for n in lengths)]
        memory = mmap.mmap(-1, starts[-1] or 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # the system may have no huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        block, places = torch.frombuffer(memory, dtype=torch.uint8), zip(sizes, starts, lengths, strict=False)
        return [block[start : start + n].view(dtype).view(tuple(shape)) for (shape, dtype), start, n in places]
    except (OSError, MemoryError, RuntimeError) as error:
        what = f"{size_text(sum(lengths))} of weights ({' '.join(str(error).split())[:120]})"
        raise CapacityError(f"no memory for {what}; free some, or use a smaller model") from None


def fill(outs: Mapping[str, Tensor], infos: Mapping[str, TensorInfo], files: Files) -> None:
    """Read stored tensors from open files into the tensors `outs` of the same names, in the order of the files.

    A tensor of `outs` must be contiguous; it may be a part of a larger one, of another dtype, on any device. Peak
    memory beside `outs` is `2 * READERS` pieces of `PIECE` bytes. Raises ModelError for a file that ends too early or
    cannot be read, for wrong checksums, and for numbers that are NaN or infinite, or become so.
    """
    pinned = any(out.is_cuda for out in outs.values())
    # Pieces to convert are first read into `stages`, in turn. A stage's earlier piece has been delivered by then.
    stages = cycle(torch.empty(2 * READERS, PIECE, dtype=torch.uint8, pin_memory=pinned))

    def reads() -> Iterator[Callable[[], Copies]]:
        for name in sorted(outs, key=lambda name: (infos[name].file, infos[name].start)):
            info, out = infos[name], outs[name].view(-1)
            stored = STORED[info.dtype]
            for number, part in enumerate(out.split(PIECE // stored.itemsize) if len(out) else ()):
                raw = part
                if out.dtype != stored or out.device.type != "cpu":
                    raw = next(stages).view(stored)[: len(part)]
                yield partial(_read, raw, part, name, info, files[info.file], number)

    read_ahead(reads())


def read_ahead(reads: Iterable[Callable[[], Copies]]) -> None:
    """Run `reads` in `READERS` threads, and make the copies that each returns, in order. At most `2 * READERS` wait."""
    pool, reading = executor(READERS, "lce-weights"), deque[Future[Copies]]()

    def deliver() -> None:
        for place, values in reading.popleft().result():
            place.copy_(values)

    try:
        for read in reads:
            reading.append(pool.submit(read))
            if len(reading) == 2 * READERS:
                deliver()
        while reading:
            deliver()
    finally:
        pool.shutdown(cancel_futures=True)


def checksums(data: NDArray[np.uint8]) -> list[str]:
    """Return the checksum of each `PIECE` of bytes: a hash of the sums of the 64-bit words in its rows and columns.

    A row has 4 KiB. Any change within a row changes the sum of a column; exchanged rows change the order of sums.
    """
    found = []
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        whole = len(piece) // 4096 * 4096
        words = piece[:whole].view("<u8").reshape(-1, 512)
        sums = words.sum(0).tobytes() + words.sum(1).tobytes() + piece[whole:].tobytes()
        found.append(hashlib.blake2b(sums, digest_size=8).hexdigest())
    return found


def _read(raw: Tensor, part: Tensor, name: str, info: TensorInfo, descriptor: int, number: int) -> Copies:
    """Read piece `number` of a stored tensor into `raw`. Return what to copy to `part`, unless `raw` is `part`."""
    array = raw.view(torch.uint8).numpy()
    read_into(memoryview(array), descriptor, info.start + number * PIECE, info.file)  # type: ignore[arg-type]
    if info.checks and [info.checks[number]] != checksums(array):
        raise Damaged(info.file, f"tensor {shown(name)} disagrees with its checksum", AGAIN)
    if info.dtype in DTYPES:
        # As an integer, a float's bits grow with its magnitude: signed for positive floats, unsigned for negative ones.
        bits, limit = 8 * raw.itemsize, _TOO_LARGE[info.dtype, part.dtype]
        if array.view(f"i{bits // 8}").max() >= limit or array.view(f"u{bits // 8}").max() >= limit + (1 << bits - 1):
            raise unfit(info, name, part.dtype, limit != _TOO_LARGE[info.dtype, torch.float32])
    return [] if raw is part else [(part, raw)]


def unfit(info: TensorInfo, name: str, dtype: torch.dtype, too_large: bool) -> ModelError:
    """Return the error for a tensor with NaN or infinite numbers, or with `too_large`, numbers that `dtype` lacks."""
    fault, remedy = "has NaN or infinite numbers", "the checkpoint is damaged: download it again"
    if too_large:
        wanted = str(dtype).removeprefix("torch.")
        fault, remedy = f"has NaN, or numbers too large for {wanted}", "use another dtype, such as float32"
    return ModelError(f"{named(info.file)}: tensor {shown(name)} {fault}; {remedy}")


def too_large(dtype: torch.dtype) -> float:
    """Return the least positive float32 number that is infinite in a dtype."""
    return float(np.uint32(_TOO_LARGE["F32", dtype]).view(np.float32))
