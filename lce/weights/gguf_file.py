"""GGUF files: checks the header of a file in full, and finds the shards of a split file. Reads no weights.

A file has the magic `GGUF`, the version, the numbers of tensors and of metadata keys, the metadata, a description of
each tensor, and the data, which begins at a multiple of the alignment. Every count, length, dimension, type and offset
is compared with the file's size before anything is built of it. As in llama.cpp, the offset of a tensor must be the sum
of the padded sizes of the tensors before it, so tensors neither overlap nor leave holes. Only padding may follow the
last one. Other bytes there would mean that the count of tensors is wrong, and with it the place of the data.

`LARGEST_HEADER` and `MOST_VALUES` limit what is built of a header, whatever size the file claims: reading takes at most
0.4 GB and a second. The header of SmolLM2, with 49,152 tokens, takes 0.05 s. No file is memory-mapped.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import unpack
from typing import Any

import numpy as np

from lce.errors import ModelError, shown
from lce.files import named, open_regular
from lce.weights.gguf_types import TYPES, UNREAD
from lce.weights.safetensors_file import MOST_TENSORS, Damaged, TensorInfo, few, pread, stamp_of

LARGEST_HEADER = 64 << 20  # The most bytes of the headers of a model. Those of the largest vocabularies have 20 MB.
MOST_VALUES = 1 << 21  # The most elements of all arrays of a header: a vocabulary of 256k takes about 1.3 million.
MOST_KEYS = 10_000  # The most keys of a file. Published files have below 100.
PIECE = 1 << 20  # The least bytes of one read.

_LONGEST_KEY = 65_535  # bytes, by the specification
_LONGEST_NAME = 63  # bytes of a tensor's name, as in llama.cpp
_LARGEST_SIZE = 2**48  # The largest size of one dimension.
_ALIGNMENT, _LEAST_ALIGNMENT, _MOST_ALIGNMENT = 32, 8, 1 << 20

_U16, _U32, _I32, _BOOL, _STRING, _ARRAY = 2, 4, 5, 7, 8, 9
# The NumPy types of the numbers in metadata. A bool is a byte, 0 or 1.
_NUMBERS = dict(enumerate(("u1", "i1", "u2", "i2", "u4", "i4", "f4", "u1"))) | {10: "u8", 11: "i8", 12: "f8"}
# Keys that decide how the file is read, and the type of each.
_TYPED = {"general.alignment": _U32, "split.no": _U16, "split.count": _U16, "split.tensors.count": _I32}

SHARD = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf\Z)")  # what the name of a shard has more than that of a whole file
_OTHER = "download another quantisation of the model, such as Q4_K_M or Q8_0"


@dataclass(frozen=True)
class GgufFile:
    """The checked header of a GGUF checkpoint, single or split.

    `path` is the file, or the first shard. `metadata` maps a key to a number, a bool, a string, or a list of these; a
    split file's is that of its first shard. `tensors` are by their names in the file; a shape has the outermost
    dimension first, and `TensorInfo.dtype` is the name of a `GgufType`. `stamps` are taken before the files are read.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    stamps: Mapping[Path, tuple[int, ...]]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file or of all shards. Raises ModelError if it is wrong, or a shard is missing."""
    file, header_bytes = _read_file(path)
    count = file.metadata.get("split.count", 0)  # 0 in a file that was merged of shards
    if count < 2:
        return file
    match = SHARD.search(path.name)
    if not match or int(match[1]) != count:
        expected = f"a name that ends in -{file.metadata.get('split.no', 0) + 1:05}-of-{count:05}.gguf"
        raise ModelError(f"{named(path)} is one of {count} shards; expected {expected}: give each shard its name back")
    shards = [path.with_name(SHARD.sub(f"-{i:05}-of-{count:05}", path.name)) for i in range(1, count + 1)]
    if missing := [shard.name for shard in shards if not os.path.lexists(shard)]:
        raise ModelError(f"{named(path)}: {len(missing)} of {count} shards are missing ({few(missing)}); download them")
    first, tensors, stamps = file, dict[str, TensorInfo](), dict[Path, tuple[int, ...]]()
    for number, shard in enumerate(shards):
        found, header_bytes = (file, header_bytes) if shard == path else _read_file(shard, header_bytes)
        first = first if number else found
        if (own := found.metadata.get("split.no")) != number:
            raise Damaged(shard, f"split.no is {own}, expected {number} by the file's name")
        for key, value in found.metadata.items():
            if key != "split.no" and first.metadata.get(key, value) != value:
                raise Damaged(shard, f"{shown(key)} is not as in the first shard, so it is of another model")
        if twice := [name for name in found.tensors if name in tensors]:
            raise Damaged(shard, f"tensor {shown(twice[0])} is in another shard too")
        tensors.update(found.tensors)
        stamps.update(found.stamps)
        if len(tensors) > MOST_TENSORS:
            raise Damaged(shard, f"the shards have more than {MOST_TENSORS} tensors")
    total = first.metadata.get("split.tensors.count")
    if total != len(tensors):
        raise Damaged(shards[0], f"the shards have {len(tensors)} tensors, expected {total} by split.tensors.count")
    return GgufFile(shards[0], first.metadata, tensors, stamps)


def _read_file(path: Path, before: int = 0) -> tuple[GgufFile, int]:
    """Read and check the header of one file. Return it, and its bytes plus the `before` bytes of other headers."""
    with open(open_regular(path, ModelError), "rb") as file:
        stamp = stamp_of(file.fileno())  # taken first: a later change is noticed when the tensors are read
        header = _Header(path, file.fileno(), stamp[0], LARGEST_HEADER - before)
        n_tensors, n_keys = header.counts()
        metadata = header.metadata(n_keys)
        described = [header.tensor(number) for number in range(n_tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if alignment & (alignment - 1) or not _LEAST_ALIGNMENT <= alignment <= _MOST_ALIGNMENT:
        limits = f"a power of two from {_LEAST_ALIGNMENT} to {_MOST_ALIGNMENT}"
        raise Damaged(path, f"general.alignment is {alignment}, expected {limits}")
    data_start = header.at + (-header.at % alignment if n_tensors else 0)
    tensors: dict[str, TensorInfo] = {}
    end = offset = 0
    for name, kind, shape, found in described:
        if name in tensors:
            raise Damaged(path, f"tensor {shown(name)} appears twice")
        if found != offset:
            raise Damaged(path, f"tensor {shown(name)} has the offset {found}, expected {offset}")
        end = offset + math.prod(shape) // TYPES[kind].size * TYPES[kind].n_bytes
        tensors[name] = TensorInfo(path, TYPES[kind].name, shape, data_start + offset, data_start + end)
        offset = end + -end % alignment
    end += data_start
    if not end <= stamp[0] <= end + -end % alignment:
        fault = "is cut short" if end > stamp[0] else "has bytes that belong to no tensor"
        raise Damaged(path, f"the file {fault}: {stamp[0]} bytes, expected {end}")
    return GgufFile(path, metadata, tensors, {path: stamp}), before + header.at


class _Header:
    """The header of an open file of `file_size` bytes, read from the front to the back, and `most` bytes at most.

    `raw` has the bytes so far; the next to decode is at `at`. `n_values` counts array elements so far.
    """

    def __init__(self, path: Path, descriptor: int, file_size: int, most: int) -> None:
        self.path, self.descriptor, self.file_size, self.most = path, descriptor, file_size, most
        self.raw, self.at, self.n_values = b"", 0, 0

    def need(self, count: int) -> None:
        """Have the next `count` bytes in `raw`. Raises ModelError if the file or the largest header ends before."""
        end, done = self.at + count, len(self.raw)
        if end <= done:
            return
        if end > self.file_size:
            raise Damaged(self.path, f"the header has {count} bytes at {self.at}, but the file has {self.file_size}")
        if end > self.most:
            raise Damaged(self.path, f"the model's headers have more than {LARGEST_HEADER} bytes")
        stop = min(max(end, done + PIECE, 2 * done), self.file_size, self.most)
        self.raw += pread(self.descriptor, stop - done, done, self.path)

    def numbers(self, kinds: str, size: int) -> tuple[Any, ...]:
        """Read numbers of the `kinds` of `struct`, which take `size` bytes."""
        self.need(size)
        self.at += size
        return unpack(f"<{kinds}", self.raw[self.at - size : self.at])

    def counts(self) -> tuple[int, int]:
        """Read the magic and the version. Return the numbers of tensors and of keys."""
        start = pread(self.descriptor, min(8, self.file_size), 0, self.path)
        if start == b"version ":
            raise ModelError(f"{named(self.path)} is a Git LFS pointer, not the model; fetch it with `git lfs pull`")
        if start[:4] != b"GGUF":
            raise ModelError(f"{named(self.path)} begins with {shown(start)}; expected GGUF: download the file again")
        _, version, n_tensors, n_keys = self.numbers("IIQQ", 24)
        if version not in (2, 3):
            fault, remedy = f"is GGUF of version {version}", "download a newer file of the model"
            if version and not version % 65_536:
                fault, remedy = "is a big-endian GGUF file", "download a little-endian one"
            raise ModelError(f"{named(self.path)} {fault}; expected little-endian version 2 or 3: {remedy}")
        for what, count, most, least in (("tensors", n_tensors, MOST_TENSORS, 25), ("keys", n_keys, MOST_KEYS, 14)):
            if count > min(most, self.file_size // least):
                limit = f"expected at most {min(most, self.file_size // least)}"
                raise Damaged(self.path, f"{count} {what} in a file of {self.file_size} bytes, {limit}")
        return n_tensors, n_keys

    def name(self, what: str, number: int, most: int) -> tuple[str, str]:
        """Read the name of a key or a tensor, and return it with its label for errors."""
        (name,) = self.strings(1, f"the name of {what} {number}")
        if not 0 < len(name.encode()) <= most:
            raise Damaged(self.path, f"{what} {number} has a name of {len(name)} characters, expected 1 to {most}")
        if not name.isprintable():
            raise Damaged(self.path, f"{what} {shown(name)} has characters that cannot be printed")
        return name, f"{what} {shown(name)}"

    def metadata(self, n_keys: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number in range(n_keys):
            (key, label), count = self.name("key", number, _LONGEST_KEY), 1
            if key in found:
                raise Damaged(self.path, f"{label} appears twice")
            kind = kind_of_key = self.numbers("I", 4)[0]
            if kind == _ARRAY:
                kind, count = self.numbers("IQ", 12)
                self.n_values += count
                if self.n_values > MOST_VALUES:
                    raise Damaged(self.path, f"{label}: more than {MOST_VALUES} elements in arrays, with {count} here")
            if kind != _STRING and kind not in _NUMBERS:
                fault = "has arrays in an array" if kind == _ARRAY else f"has the unknown type {kind}"
                raise Damaged(self.path, f"{label} {fault}")
            if _TYPED.get(key, kind_of_key) != kind_of_key:
                raise Damaged(self.path, f"{label} has the type {kind_of_key}, expected {_TYPED[key]}")
            values = self.strings(count, label) if kind == _STRING else self.values(kind, count, label)
            found[key] = values if kind_of_key == _ARRAY else values[0]
        return found

    def strings(self, count: int, label: str) -> list[str]:
        """Read `count` strings. `label` says what they are in an error."""
        self.need(8 * count)  # the least that they take
        found, raw, at, number_of = [], self.raw, self.at, int.from_bytes
        try:
            for _ in range(count):
                start = at + 8
                stop = start + number_of(raw[at:start], "little")
                if stop > len(raw):  # also if `raw` ends within the length
                    self.at = at
                    self.need(8)
                    self.need(8 + number_of(self.raw[self.at : self.at + 8], "little"))
                    raw = self.raw
                    stop = start + number_of(raw[at:start], "little")
                found.append(raw[start:stop].decode())
                at = stop
        except UnicodeDecodeError as error:
            raise Damaged(self.path, f"{label}: byte {error.start} of string {len(found)} is not UTF-8") from None
        self.at = at
        return found

    def values(self, kind: int, count: int, label: str) -> list[Any]:
        """Read `count` numbers of one type of metadata. Raises ModelError for NaN, and for bools other than 0 and 1."""
        dtype = np.dtype(f"<{_NUMBERS[kind]}")
        self.need(count * dtype.itemsize)
        found = np.frombuffer(self.raw, dtype, count, self.at)
        self.at += found.nbytes
        if dtype.kind == "f" and np.isnan(found).any():
            raise Damaged(self.path, f"{label} has NaN")
        if kind == _BOOL:
            if count and found.max() > 1:
                raise Damaged(self.path, f"{label} has the bool {found.max()}, expected 0 or 1")
            found = found.astype(bool)
        return list(found.tolist())

    def tensor(self, number: int) -> tuple[str, int, tuple[int, ...], int]:
        """Read the description of tensor `number`: its name, the type's number, the shape, and the data's offset."""
        name, label = self.name("tensor", number, _LONGEST_NAME)
        (n_dims,) = self.numbers("I", 4)
        if n_dims > 4:
            raise Damaged(self.path, f"{label} has {n_dims} dimensions, expected at most 4")
        *sizes, kind, offset = self.numbers(f"{n_dims}QIQ", 8 * n_dims + 12)
        shape = tuple(reversed(sizes))  # a file has the innermost dimension first
        if kind in UNREAD:
            raise ModelError(f"{named(self.path)}: {label} is {UNREAD[kind]}, which lce does not read; {_OTHER}")
        if kind not in TYPES:
            raise Damaged(self.path, f"{label} has the unknown type {kind}")
        if any(size >= _LARGEST_SIZE for size in sizes):
            raise Damaged(self.path, f"{label} has the impossible shape {shown(shape)}")
        if (sizes or [1])[0] % TYPES[kind].size:
            block = f"{TYPES[kind].name} has blocks of {TYPES[kind].size}"
            raise Damaged(self.path, f"{label} has the shape {shown(shape)}, but {block}")
        return name, kind, shape, offset
