"""Vectors as rows of 8 bits, and back: `lce.attention.int8_rows` describes a row."""

from __future__ import annotations

import torch
from torch import Tensor

from lce.kernels.runtime.kernel import Kernels

_narrow, _widen = Kernels("int8_rows.narrow"), Kernels("int8_rows.widen")
_SHARE = 256  # the smallest number of vectors that a thread takes


def row_bytes(dim: int) -> int:
    """Return the bytes of the row of a vector of `dim` numbers: the numbers, padded to whole words, and a float32."""
    return -(-dim // 4) * 4 + 4


def narrow(x: Tensor, into: Tensor) -> None:
    """Write vectors `x [G, n, D]` as rows `into [G, n, row_bytes]`. Bytes moved: x and the rows."""
    (heads, n, dim), size = x.shape, x.itemsize
    assert into.shape == (heads, n, row_bytes(dim)), (x.shape, into.shape)
    assert x.stride(2) == into.stride(2) == 1, (x.stride(), into.stride())
    assert into.dtype is torch.uint8, into.dtype
    strides = x.stride(0) * size, x.stride(1) * size, into.stride(0), into.stride(1)
    _narrow[x.dtype](heads * n, x.data_ptr(), into.data_ptr(), *strides, n, dim, least=_SHARE)


def widen(rows: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the vectors `[G, n, D]` of rows `[G, n, row_bytes]`, in a new tensor. Bytes moved: rows and vectors."""
    heads, n, n_bytes = rows.shape
    assert n_bytes == row_bytes(dim), (rows.shape, dim)
    assert rows.stride(2) == 1, rows.stride()
    out = torch.empty(heads, n, dim, dtype=dtype)
    at = rows.data_ptr(), out.data_ptr()
    _widen[dtype](heads * n, *at, n, rows.stride(0), rows.stride(1), dim, least=_SHARE)
    return out
