"""GGUF files: reads the metadata and the places of the tensors. Nothing is memory-mapped."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lce.errors import ModelError
from lce.files import open_regular
from lce.weights.gguf_types import TYPES
from lce.weights.safetensors_file import TensorInfo, stamp_of

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF checkpoint, single or split.

    `metadata` maps a key to a number, a bool, a string, or a list of these. `tensors` are by their names in the file;
    a shape has the outermost dimension first, as in PyTorch, and `TensorInfo.dtype` is the name of a `GgufType`.
    `stamps` has the stamp of each file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    stamps: Mapping[Path, tuple[int, ...]]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file. Raises ModelError for a file that is no GGUF."""
    with open(open_regular(path, ModelError), "rb") as file:
        stamp = stamp_of(file.fileno())
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is no GGUF file")
        _, n_tensors, n_keys = _numbers(file, "IQQ")
        metadata = {_string(file): _value(file, *_numbers(file, "I")) for _ in range(n_keys)}
        found = {}
        for _ in range(n_tensors):
            name, (n_dims,) = _string(file), _numbers(file, "I")
            found[name] = _numbers(file, "Q" * n_dims)[::-1], *_numbers(file, "IQ")
        alignment = metadata.get("general.alignment", 32)
        start, tensors = -(-file.tell() // alignment) * alignment, {}
        for name, (shape, number, offset) in found.items():
            kind = TYPES[number]
            first = start + offset
            n_bytes = math.prod(shape) // kind.size * kind.n_bytes
            tensors[name] = TensorInfo(path, kind.name, tuple(shape), first, first + n_bytes)
    return GgufFile(path, metadata, tensors, {path: stamp})


def _numbers(file: BinaryIO, kinds: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{kinds}", file.read(struct.calcsize(f"<{kinds}")))


def _string(file: BinaryIO) -> str:
    return file.read(*_numbers(file, "Q")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        kind, count = _numbers(file, "IQ")
        return (
            [_string(file) for _ in range(count)]
            if kind == _STRING
            else list(_numbers(file, f"{count}{_NUMBERS[kind]}"))
        )
    return _numbers(file, _NUMBERS[kind])[0]
