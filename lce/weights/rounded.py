"""Matrices rounded to 8 and 4 bits, in the layout of `lce.kernels.cpu.quantised`.

int8   each 128 weights of a row share a scale: 8.1 bits a weight
int4   each 32 weights of a row share a scale and a zero, fitted by least squares: 4.75 bits a weight
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lce.kernels.cpu import quantised
from lce.weights.packed import PackedMatrix, Scheme, register


class RoundedMatrix:
    """A matrix `[out, in]` that is stored as codes, scales and, for 4 bits, zeros."""

    def __init__(self, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> None:
        self.shape = shape[0], shape[1]
        self.parts = parts
        self._parts = parts["codes"], parts["scales"], parts.get("zeros")

    def product(self, x: Tensor, bias: Tensor | None = None, **around: Any) -> Tensor:
        return quantised.product(x, self.shape[0], *self._parts, bias, **around)

    def unpacked(self, first: int, out: Tensor) -> Tensor:
        quantised.unpack(first, out, *self._parts)
        return out

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(len(ids), self.shape[1], dtype=dtype)
        quantised.rows_of(ids, out, *self._parts)
        return out


@dataclass(frozen=True)
class Rounded(Scheme):
    """The scheme of weights that are rounded to `bits` bits."""

    name: str
    bits: int

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return dict(quantised.parts(self.bits, *shape))

    def matrix(self, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> PackedMatrix:
        return RoundedMatrix(shape, parts)

    def pack(self, weight: Tensor, parts: Mapping[str, Tensor]) -> None:
        quantised.pack(weight, parts["codes"], parts["scales"], parts.get("zeros"))


register(Rounded("int8", 8))
register(Rounded("int4", 4))
