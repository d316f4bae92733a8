"""The header of a safetensors file, parsed from its raw bytes and checked in full.

A file is eight bytes of header length, the header (a JSON object: name -> dtype, shape, data_offsets), and the data,
which the tensors must tile exactly: no overlap, no hole, nothing left over. A file that passes can be read without
further checks. Its header is bounded before it is parsed, far above any published one, so that a hostile file takes
neither time nor memory.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from lce.errors import ModelError, shown
from lce.files import JsonError, named, open_regular, parse_json

LARGEST_HEADER = 8 << 20  # bytes; the largest published headers are below 1 MiB
MOST_TENSORS = 50_000  # of a checkpoint; the largest models of our families have about 1,200
_VALUES = 12  # JSON values and names in the entry of a matrix

ITEM_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
_LARGEST_SIZE = 2**48  # of one dimension
_MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's place: bytes `start` to `stop` of `file`, counted from the beginning of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Damaged(ModelError):
    """The error for a damaged file; `what` describes the damage."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{named(path)}: {what}; the file is damaged or incomplete: download it again")
        self.what = what


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read every tensor's entry, in the header's order. Reads the header alone. Raises ModelError if it is wrong."""
    return read_all(path)[0]


def read_all(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Read the entries of the tensors, and the metadata of the header; otherwise as `read_header`."""
    descriptor = open_regular(path, ModelError)
    try:
        return read_open(descriptor, path)
    finally:
        os.close(descriptor)


def read_open(descriptor: int, path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Read as `read_all` a file that is open already."""
    raw, file_size = _header_bytes(descriptor, path)
    entries = parse_object(raw, path)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Damaged(path, "__metadata__ is not an object of strings")
    if len(entries) > MOST_TENSORS:
        raise Damaged(path, f"{len(entries)} tensors; expected at most {MOST_TENSORS}")
    data_start = 8 + len(raw)
    tensors = {name: _tensor(path, name, entry, data_start) for name, entry in entries.items()}
    end = data_start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != end:
            fault = "overlaps the one before it" if info.start < end else "leaves a hole before it"
            raise Damaged(path, f"tensor {shown(name)} {fault}")
        end = info.stop
    if end != file_size:
        fault = "is cut short" if end > file_size else "has bytes that belong to no tensor"
        raise Damaged(path, f"the file {fault}: {file_size} bytes, expected {end}")
    return tensors, metadata


def parse_object(raw: bytes, path: Path) -> dict[str, object]:
    """Parse the JSON object in `raw`. Raises ModelError for anything else, and for a name that appears twice."""
    try:
        value = parse_json(raw, most=MOST_TENSORS * _VALUES, unique=True)
    except JsonError as error:
        raise Damaged(path, str(error)) from None
    if not isinstance(value, dict):
        raise Damaged(path, f"a JSON {type(value).__name__} where an object is expected")
    return value


def read_bytes(path: Path, count: int, offset: int = 0) -> bytes:
    """Read up to `count` bytes of the file. Raises ModelError if it cannot be read."""
    descriptor = open_regular(path, ModelError)
    try:
        return pread(descriptor, count, offset, path)
    finally:
        os.close(descriptor)


def pread(descriptor: int, count: int, offset: int, path: Path) -> bytes:
    """Read up to `count` bytes of an open file: fewer only at its end. Raises ModelError if it cannot be read."""
    parts, left = [], count
    try:
        while left and (part := os.pread(descriptor, left, offset + count - left)):
            parts.append(part)
            left -= len(part)
    except OSError as error:
        raise ModelError(f"{named(path)} cannot be read ({error.strerror}); check the disk") from None
    return b"".join(parts)


def _header_bytes(descriptor: int, path: Path) -> tuple[bytes, int]:
    """Return the header's JSON and the size of the file."""
    file_size, prefix = os.fstat(descriptor).st_size, pread(descriptor, 8, 0, path)
    length = int.from_bytes(prefix, "little")
    if prefix == b"version ":
        raise ModelError(f"{named(path)} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
    if len(prefix) < 8 or length + 8 > file_size:
        raise Damaged(path, f"a header of {length} bytes does not fit in a file of {file_size}")
    if length > LARGEST_HEADER:
        raise Damaged(path, f"a header of {length} bytes; expected at most {LARGEST_HEADER}")
    raw = pread(descriptor, length, 8, path)
    if len(raw) != length or raw[:1] != b"{":
        raise Damaged(path, "the header does not begin with '{'")
    return raw, file_size


def _tensor(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    label = f"tensor {shown(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Damaged(path, f"{label} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise Damaged(path, f"{label} has the unknown dtype {shown(dtype)}")
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        raise Damaged(path, f"{label} has the impossible shape {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Damaged(path, f"{label} has the impossible data_offsets {shown(offsets)}")
    start, stop = offsets
    expected = math.prod(shape) * ITEM_SIZES[dtype]
    if stop - start != expected:
        raise Damaged(path, f"{label} has {stop - start} bytes; its shape and dtype take {expected}")
    return TensorInfo(path, dtype, tuple(shape), data_start + start, data_start + stop)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < _LARGEST_SIZE for size in value)
