"""Matrices quantised to 8 and 4 bits, in the layout of `lce.kernels.cpu.quantised`.

int8   each 128 weights of a row share a scale: 8.1 bits per weight
int4   each 32 weights of a row share a scale and a zero point, fitted by least squares: 4.75 bits per weight
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lce.kernels.code.shared import INT4, INT8, Layout
from lce.kernels.cpu.quantised import QuantisedMatrix, parts_of
from lce.weights.packed import PackedMatrix, Scheme, register


@dataclass(frozen=True)
class Rounded(Scheme):
    """A scheme that quantises weights to a layout by rounding."""

    name: str
    layout: Layout

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return parts_of(self.layout, *shape)

    def matrix(self, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> PackedMatrix:
        return QuantisedMatrix(self.layout, shape, parts)

    def pack(self, weight: Tensor, parts: Mapping[str, Tensor]) -> None:
        QuantisedMatrix(self.layout, weight.shape, parts).pack(weight)


register(Rounded("int8", INT8))
register(Rounded("int4", INT4))
