"""Packed matrices: weights that are stored in quantised blocks and multiplied without unpacking.

A `Scheme` is a way to quantise; `ROUNDED` has those of lce. A quantised checkpoint stores a matrix `NAME` as several
tensors, which its scheme's layout names, such as `NAME.codes`. The `Manifest` in the metadata lists these matrices.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lce.errors import UsageError, nearest, shown
from lce.files import JsonError, parse_json
from lce.kernels.elementwise import elementwise
from lce.kernels.product.blocks import BlockMatrix, BlockType
from lce.kernels.product.products import product
from lce.kernels.product.quantised import QuantisedMatrix, parts_of
from lce.kernels.runtime.shared import INT4, INT8, Gate, Layout
from lce.weights.safetensors_file import AGAIN, MOST_VALUES, NAMES, PIECE, Damaged, TensorInfo

ROW_BLOCK = 16  # The number of rows in one block of a packed matrix.
METADATA = "lce.quantised"  # the key of the `Manifest` in a safetensors file's metadata
FORMAT = 2
LARGEST = 256 << 20  # the largest size, in bytes, of a tokenizer or config file beside the weights

PackedMatrix = QuantisedMatrix | BlockMatrix  # weights on the CPU, or on a GPU; a loaded matrix never changes


@dataclass(frozen=True)
class Scheme:
    """A way to quantise a matrix. The first dimension of each stored tensor counts blocks of `row_block` rows."""

    name: str
    layout: Layout | BlockType

    @property
    def row_block(self) -> int:
        return 1 if isinstance(self.layout, BlockType) else ROW_BLOCK

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the name, shape and dtype of each stored tensor, for a matrix of this shape."""
        return self.layout.parts(*shape) if isinstance(self.layout, BlockType) else parts_of(self.layout, *shape)

    def matrix(self, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> PackedMatrix:
        """Return the quantised matrix of this shape whose stored tensors are `parts`."""
        if isinstance(self.layout, BlockType):
            return BlockMatrix(self.layout, shape, parts)
        return QuantisedMatrix(self.layout, shape, parts)

    def n_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes that a quantised matrix of this shape takes, in memory and on disk alike."""
        return sum(math.prod(part) * dtype.itemsize for part, dtype in self.parts(shape).values())


ROUNDED: Mapping[str, Scheme] = {
    "int8": Scheme("int8", INT8),  # each 128 weights of a row share a scale: 8.1 bits per weight
    "int4": Scheme("int4", INT4),  # each 32 share a scale and a zero point, fitted by least squares: 4.75 bits
}


def scheme_of(name: object) -> Scheme | None:
    """Return the scheme that a user names; None for "auto" (weights as stored). Raises `UsageError` for other names."""
    if name is None or (isinstance(name, str) and name == "auto"):
        return None
    if not isinstance(name, str) or name not in ROUNDED:
        raise UsageError(f"unknown weights {shown(name)}; {nearest(str(name), ['auto', *ROUNDED])}")
    return ROUNDED[name]


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """The manifest of a quantised checkpoint's file.

    `weights` is the name of the scheme that the user chose; `matrices` has the scheme and shape of each quantised
    matrix. `dtype` and `source` are the dtype and the fingerprint of the checkpoint that was quantised. `checks` has
    the checksums of each tensor, `files` the SHA-256 of each file beside the weights.
    """

    weights: str
    dtype: str
    source: str
    matrices: Mapping[str, tuple[str, tuple[int, int]]]
    checks: Mapping[str, Sequence[str]]
    files: Mapping[str, str]
    format: int = FORMAT

    def text(self) -> str:
        """Return the manifest as JSON, with a SHA-256 of the rest."""
        raw = asdict(self)
        return json.dumps(raw | {"sha256": sha256_of(json.dumps(raw).encode())})

    @classmethod
    def read(cls, text: str, file: Path, tensors: Mapping[str, TensorInfo]) -> Self:
        """Read the manifest in a file's metadata. Raises ModelError if it is damaged or contradicts the tensors."""
        try:
            raw = parse_json(text.encode(), most=MOST_VALUES, unique=True)
            if raw["format"] != FORMAT:
                raise Damaged(file, f"format {shown(raw['format'])}; this lce reads {FORMAT}", AGAIN)
            if raw.pop("sha256") != sha256_of(json.dumps(raw).encode()):
                raise Damaged(file, "its manifest is not as it was written", AGAIN)
            matrices = {name: (scheme, (n_out, n_in)) for name, (scheme, (n_out, n_in)) in raw["matrices"].items()}
            found = cls(raw["weights"], raw["dtype"], raw["source"], matrices, raw["checks"], dict(raw["files"]))
            n_checks = {name: len(checks) for name, checks in found.checks.items()}
        except (JsonError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(file, f"its manifest is incomplete ({shown(str(error), 60)})", AGAIN) from None
        if n_checks != {name: -(-(info.stop - info.start) // PIECE) for name, info in tensors.items()}:
            raise Damaged(file, "its manifest has the checksums of other tensors", AGAIN)
        texts = found.weights, found.dtype, found.source, *found.files, *found.files.values()
        is_text = all(isinstance(text, str) and 0 < len(text) <= 100 for text in texts)
        if not is_text or found.weights not in ROUNDED or found.dtype not in ("float32", "bfloat16", "float16"):
            raise Damaged(file, f"unknown weights {shown(found.weights)} of {shown(found.dtype)}, or no texts", AGAIN)
        for name, (scheme, shape) in matrices.items():
            if not isinstance(scheme, str) or scheme not in ROUNDED or not all(type(n) is int for n in shape):
                raise Damaged(file, f"unknown weights {shown(scheme)} of {shown(name)}, {shown(shape)}", AGAIN)
            for part, (size, dtype) in ROUNDED[scheme].parts(shape).items():
                info, expected = tensors.get(f"{name}.{part}"), (NAMES[dtype], size)
                got = None if info is None else (info.dtype, info.shape)
                if got != expected:
                    raise Damaged(file, f"{shown(f'{name}.{part}')} is {got}; expected {expected}", AGAIN)
        return found


class Stacked:
    """A matrix made of matrices of equal width, joined along dimension 0. Each may be plain or of any scheme."""

    def __init__(self, parts: Sequence[Tensor | PackedMatrix]) -> None:
        self.parts = tuple(parts)
        self.shape = sum(part.shape[0] for part in parts), parts[0].shape[1]

    def with_biases(self, bias: Tensor | None) -> Iterator[tuple[Tensor | PackedMatrix, Tensor | None]]:
        """Return pairs of a part and its slice of `bias [out]`; None in place of the slice if there is no bias."""
        rows = [part.shape[0] for part in self.parts]
        return zip(self.parts, [None] * len(rows) if bias is None else bias.split(rows), strict=True)

    def product(
        self, x: Tensor, bias: Tensor | None = None, *, gate: Gate | None, onto: Tensor | None, **how: Any
    ) -> Tensor:
        """Multiply rows `x [T, in]` with the transposed matrix, as `PackedMatrix.product` does.

        Each part writes its columns of the result, so that a step has no operator of PyTorch and can be recorded.
        """
        norm: Tensor | None = how.get("norm")
        dtype = how.get("out_dtype") or (x if norm is None else norm).dtype
        out = torch.empty(len(x), self.shape[0], dtype=dtype)
        columns = out.split([part.shape[0] for part in self.parts], dim=1)
        for (part, b), into in zip(self.with_biases(bias), columns, strict=True):
            product(x, part, b, into=into, **how) if isinstance(part, Tensor) else part.product(x, b, into=into, **how)
        out = elementwise.gate_mul(out, gate) if gate else out
        return out if onto is None else onto.add_(out)


Matrix = Tensor | PackedMatrix | Stacked
