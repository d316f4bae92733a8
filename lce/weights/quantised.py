"""Matrices in 8 and 4 bits: which scheme, how they lie in memory and in files, and what a file says about them.

    int8   a scale for 128 inputs of a row, 8.1 bits a weight
    int4   a scale and a zero for 32 inputs of a row, 4.75 bits a weight, fitted by least squares

A matrix `NAME` of a quantised file is the tensors `NAME.codes`, `NAME.scales` and, in 4 bits, `NAME.zeros`, as
`lce.kernels.cpu.quantised` lays them out. The file's metadata has a `Manifest`.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lce.errors import ModelError, UsageError, nearest, shown
from lce.files import JsonError, named, parse_json
from lce.weights.header import MOST_TENSORS, TensorInfo
from lce.weights.reading import NAMES

FORMAT = 1
LANES = 16  # rows that lie together: parts of a joined matrix have whole multiples
METADATA = "lce.quantised"  # the key of the manifest in the file's metadata
SCRATCH = 64 << 20  # bytes of unpacked rows that a product of many rows takes at a time, kept by each thread
_thread = threading.local()
_LARGEST = 1 << 32  # rows or inputs of a matrix


@dataclass(frozen=True)
class Scheme:
    """How the weights of a matrix are rounded."""

    name: str
    bits: int

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each tensor of a matrix: codes, scales, zeros."""
        from lce.kernels.cpu import quantised

        return dict(quantised.parts(self.bits, *shape))

    def n_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a matrix in memory and on disk."""
        return sum(math.prod(part) * dtype.itemsize for part, dtype in self.parts(shape).values())


SCHEMES = {scheme.name: scheme for scheme in (Scheme("int8", 8), Scheme("int4", 4))}


def scheme_of(name: object) -> Scheme | None:
    """The scheme that a user names; None for "auto", the weights as they are stored. Raises `UsageError`."""
    if name is None or (isinstance(name, str) and name == "auto"):
        return None
    if not isinstance(name, str) or name not in SCHEMES:
        raise UsageError(f"unknown weights {shown(name)}; {nearest(str(name), ['auto', *SCHEMES])}")
    return SCHEMES[name]


def scratch_of(n_rows: int, n_in: int, dtype: torch.dtype) -> Tensor:
    """Memory of this thread for unpacked rows `[n_rows, n_in]`; it grows and stays, so that its pages are mapped."""
    needed = n_rows * n_in * dtype.itemsize
    memory: Tensor | None = getattr(_thread, "memory", None)
    if memory is None or len(memory) < needed:
        memory = _thread.memory = torch.empty(needed, dtype=torch.uint8)
    return memory[:needed].view(dtype).view(n_rows, n_in)


class QuantisedMatrix:
    """A matrix `[out, in]` of rounded weights, in memory. Never written after it was made."""

    def __init__(self, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> None:
        self.shape = shape
        self.parts = dict(parts)
        self.codes, self.scales, self.zeros = parts["codes"], parts["scales"], parts.get("zeros")

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def product(self, x: Tensor, bias: Tensor | None, **fused: Any) -> Tensor:
        """`x [T, in]` times the matrix transposed, for a few rows: see `lce.kernels.cpu.quantised.product`."""
        from lce.kernels.cpu import quantised

        return quantised.product(x, self.shape[0], self.codes, self.scales, self.zeros, bias, **fused)

    def unpacked(self, first: int, out: Tensor) -> Tensor:
        """`out [rows, in]` filled with the rows from `first` on, a multiple of 16."""
        from lce.kernels.cpu import quantised

        quantised.unpack(first, out, self.codes, self.scales, self.zeros)
        return out

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows `ids [T]`, `[T, in]`."""
        from lce.kernels.cpu import quantised

        out = torch.empty(len(ids), self.shape[1], dtype=dtype)
        quantised.rows_of(ids, out, self.codes, self.scales, self.zeros)
        return out

    def pack(self, weight: Tensor) -> None:
        """Round `weight [out, in]` into this matrix, whose tensors are new."""
        from lce.kernels.cpu import quantised

        quantised.pack(weight, self.codes, self.scales, self.zeros)


@dataclass(frozen=True)
class Manifest:
    """What a quantised file says of itself.

    `weights` is the scheme that was asked for, `matrices` the scheme and shape of each matrix. `dtype` is that of the
    checkpoint it was made of, and `source` its fingerprint. `samples` is the fingerprint of the file's own tensors.
    """

    weights: str
    dtype: str
    source: str
    samples: str
    matrices: Mapping[str, tuple[str, tuple[int, int]]]
    lce: str
    format: int = FORMAT

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {name: shape for name, (_, shape) in self.matrices.items()}

    @property
    def schemes(self) -> dict[str, Scheme]:
        return {name: SCHEMES[scheme] for name, (scheme, _) in self.matrices.items()}

    def text(self) -> str:
        """As JSON, for the file's metadata."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str, file: Path, tensors: Mapping[str, TensorInfo]) -> Self:
        """The manifest in a file's metadata. Raises ModelError where it is damaged, or contradicts the tensors."""
        try:
            raw = parse_json(text.encode(), most=MOST_TENSORS * 12, unique=True)
            if raw["format"] != FORMAT:
                raise _damaged(file, f"format {shown(raw['format'])}; this lce reads {FORMAT}")
            matrices = {
                name: (scheme, (n_out, n_in)) for name, (scheme, (n_out, n_in)) in sorted(raw["matrices"].items())
            }
            found = cls(raw["weights"], raw["dtype"], raw["source"], raw["samples"], matrices, raw["lce"])
        except (JsonError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(file, f"its manifest is incomplete ({shown(str(error), 60)})") from None
        texts = found.weights, found.dtype, found.source, found.samples, found.lce
        if not all(isinstance(text, str) and 0 < len(text) <= 100 for text in texts):
            raise _damaged(file, "its manifest has values that are no texts")
        if found.weights not in SCHEMES or found.dtype not in ("float32", "bfloat16", "float16"):
            raise _damaged(file, f"unknown weights {shown(found.weights)} of {shown(found.dtype)}")
        for name, (scheme, shape) in matrices.items():
            if not isinstance(scheme, str) or scheme not in SCHEMES:
                raise _damaged(file, f"unknown weights {shown(scheme)} of {shown(name)}")
            if not all(type(size) is int and 0 < size < _LARGEST for size in shape):
                raise _damaged(file, f"impossible shape {shown(shape)} of {shown(name)}")
            for part, (expected, dtype) in SCHEMES[scheme].parts(shape).items():
                info = tensors.get(f"{name}.{part}")
                if info is None or info.shape != expected or info.dtype != NAMES[dtype]:
                    got = "nothing" if info is None else f"{info.dtype} {list(info.shape)}"
                    expected_text = f"{NAMES[dtype]} {list(expected)}"
                    raise _damaged(file, f"{shown(f'{name}.{part}')} is {got}; expected {expected_text}")
        return found


def _damaged(file: Path, what: str) -> ModelError:
    return ModelError(f"{named(file)}: {what}; quantize the checkpoint again")
