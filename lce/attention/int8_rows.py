"""Keys and values in 8 bits: a row of bytes is a vector's D numbers in int8, padded to whole words, and their scale.

A number x of a vector becomes `round(x / scale)`, where `scale`, a float32, is `peak / 127` and `peak` is the vector's
largest magnitude. So each token and KV head has a scale of its own, and a row is never written again. If a number is
infinite or NaN, so is the scale.
"""

import torch
from torch import Tensor

from lce.attention.turn import Turn, rotate
from lce.kernels.elementwise.elementwise import runs_on
from lce.kernels.rows import int8_rows
from lce.kernels.rows.int8_rows import row_bytes as row_bytes
from lce.kernels.runtime.kernel import DTYPES

ROW = torch.uint8  # the dtype of tensors whose last dimension is such a row


def row_scales(rows: Tensor) -> Tensor:
    """Return the scales of rows `[…, row_bytes]`: `[…, 1]`, float32."""
    return rows[..., -4:].contiguous().view(torch.float32)


def widened(rows: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the vectors `[..., dim]` of rows, in a new tensor. Time: O(size of the result)."""
    if rows.is_cpu and rows.ndim == 3 and rows.stride(2) == 1 and dtype in DTYPES:
        return int8_rows.widen(rows, dim, dtype)
    return (rows[..., :dim].view(torch.int8) * row_scales(rows)).to(dtype)


def readable(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values as vectors: rows of 8 bits are copied to the dtype of the queries."""
    return (k, v) if k.dtype is not ROW else (widened(k, q.shape[-1], q.dtype), widened(v, q.shape[-1], q.dtype))


def append_rows(k: Tensor, v: Tensor, into_k: Tensor, into_v: Tensor, at: int, turn: Turn | None = None) -> None:
    """Do what `append` does, into rows of 8 bits."""
    for x, into in ((k if turn is None else rotate(k, turn), into_k), (v, into_v)):
        rows = into[:, at : at + x.shape[1]]
        if runs_on(x) and x.stride(2) == 1:
            int8_rows.narrow(x, rows)
        else:
            x = x.float()
            scale = x.abs().amax(-1, keepdim=True) / 127
            numbers = (x / scale.masked_fill(scale == 0, 1.0)).round().nan_to_num()
            rows[..., : x.shape[-1]] = numbers.to(torch.int8).view(ROW)
            rows[..., -4:] = scale.view(ROW)
