"""What a decoder layer does between its products: norms, gates, and rotations of queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba import carray
from torch import Tensor

from lce.kernels.compiling import kernel, n_threads
from lce.kernels.numbers import READ, STORED, WRITE, exp, pointer

ALONE = 1 << 15  # numbers that one thread computes sooner than others wake up
_ROWS = 64  # rows that a thread takes at a time, if there are several threads


def runs_on(x: Tensor) -> bool:
    """Whether these kernels take a tensor: on the CPU, of a dtype that they read, with nothing to differentiate."""
    return x.is_cpu and x.dtype in STORED and not x.requires_grad


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x [..., D]`, of two or three dimensions, over its root mean square, times `weight [D]`: contiguous.

    Computed in float32 and rounded once. Bytes: x once, the result once.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    heads, n, dim = (1, *x.shape) if x.ndim == 2 else x.shape
    assert weight.shape == (dim,) and weight.dtype is x.dtype and weight.is_contiguous(), (x.shape, weight.shape)
    if x.stride(-1) != 1:
        x = x.contiguous()
    _norm(x.dtype, _shared(out))(
        x.data_ptr(), x.stride(0) if x.ndim == 3 else 0, x.stride(-2), weight.data_ptr(), eps, out.data_ptr(),
        heads, n, dim,
    )  # fmt: skip
    return out


def silu_mul(x: Tensor) -> Tensor:
    """`x [T, 2·D]`, contiguous: its first half through the SiLU function, times its second half, `[T, D]`.

    Computed in float32 and rounded once. Bytes: x once, the result once.
    """
    n, dim = x.shape[0], x.shape[1] // 2
    assert x.is_contiguous() and x.shape[1] == 2 * dim, (x.shape, x.stride())
    out = torch.empty(n, dim, dtype=x.dtype)
    _silu_mul(x.dtype, _shared(out))(x.data_ptr(), out.data_ptr(), n, dim)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x [..., D]` rotated by angles `cos sin [..., D/2]` that broadcast against it, of up to three leading dimensions.

    Dimension i is paired with dimension i + D/2. Computed in float32 and rounded once. Bytes: x once, the result once.
    """
    shape = x.shape
    half = shape[-1] // 2
    if cos.shape[-1] != half or cos.dtype is not x.dtype or sin.shape != cos.shape or sin.dtype is not x.dtype:
        raise ValueError(f"angles {list(cos.shape)} {cos.dtype}, {list(sin.shape)} {sin.dtype} for {list(shape)}")
    if x.stride(-1) != 1:
        x = x.contiguous()
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    if len(shape) == 3 and cos.ndim == 2 and len(cos) == shape[1]:  # heads and tokens
        lead, x_strides, turn_strides = (1, *shape[:2]), (0, *x.stride()[:2]), (0, 0, cos.stride(0))
        out = torch.empty(shape, dtype=x.dtype)
    else:
        common = torch.broadcast_shapes(shape[:-1], cos.shape[:-1])
        assert len(common) <= 3, f"{list(common)}: more than three leading dimensions"
        lead = (1,) * (3 - len(common)) + tuple(common)
        x_strides, turn_strides = (_strides(each, common) for each in (x, cos))
        out = torch.empty(*common, shape[-1], dtype=x.dtype)
    _rotate(x.dtype, _shared(out))(
        x.data_ptr(), *x_strides, cos.data_ptr(), sin.data_ptr(), *turn_strides,
        out.data_ptr(), lead[1] * lead[2] * 2 * half, lead[2] * 2 * half, 2 * half, *lead, half,
    )  # fmt: skip
    return out


def put_rows(x: Tensor, into: Tensor, at: int, cos: Tensor | None, sin: Tensor | None) -> None:
    """`x [G, T, D]`, rotated if there are angles `cos sin [T, D/2]`, to rows `at..at+T-1` of `into [G, n, D]`.

    For the one token of a decode step: no view is made. Bytes: x once, the rows once.
    """
    heads, n, dim = x.shape
    assert at >= 0 and into.shape[1] >= at + n, (into.shape, at, n)
    assert into.shape[0] == heads and into.shape[2] == dim and into.dtype is x.dtype, (x.shape, into.shape)
    if x.stride(2) != 1:
        x = x.contiguous()
    assert into.is_contiguous()
    cos_at = sin_at = turn_stride = 0
    if cos is not None and sin is not None:
        assert cos.shape == (n, dim // 2) == sin.shape and cos.dtype is x.dtype is sin.dtype, (cos.shape, sin.shape)
        assert cos.is_contiguous() and sin.is_contiguous()
        cos_at, sin_at, turn_stride = cos.data_ptr(), sin.data_ptr(), dim // 2
    _rotate(x.dtype, _shared(x))(
        x.data_ptr(), 0, x.stride(0), x.stride(1), cos_at, sin_at, 0, 0, turn_stride,
        into.data_ptr() + at * dim * into.element_size(), 0, into.shape[1] * dim, dim, 1, heads, n, dim // 2,
    )  # fmt: skip


def _strides(x: Tensor, common: Sequence[int]) -> tuple[int, ...]:
    """The strides of x's leading dimensions once they are expanded to three, 0 where they are."""
    strides = x.expand(*common, x.shape[-1]).stride()[:-1]
    return (0,) * (3 - len(common)) + tuple(strides)


def _shared(out: Tensor) -> bool:
    """Whether several threads share the work."""
    if out.numel() < ALONE:
        return False
    return n_threads() > 1


@cache
def _norm(dtype: torch.dtype, parallel: bool) -> Callable[..., Any]:
    stored, read, write = STORED[dtype], READ[dtype], WRITE[dtype]

    @kernel("void(intp, intp, intp, intp, float32, intp, intp, intp, intp)", parallel=parallel)
    def compiled(x_at, head_stride, row_stride, weight_at, eps, out_at, n_heads, n, dim):  # type: ignore[no-untyped-def]
        weight = carray(pointer(weight_at, stored), (dim,))
        out = carray(pointer(out_at, stored), (n_heads * n, dim))
        n_rows = n_heads * n
        for task in numba.prange((n_rows + _ROWS - 1) // _ROWS):
            for row in range(task * _ROWS, min(n_rows, task * _ROWS + _ROWS)):
                offset = (row // n) * head_stride + (row % n) * row_stride
                x = carray(pointer(x_at + offset * out.itemsize, stored), (dim,))
                total = np.float32(0)
                for j in range(dim):
                    number = read(x[j])
                    total += number * number
                scale = np.float32(1) / np.sqrt(total / np.float32(dim) + eps)
                for j in range(dim):
                    out[row, j] = write(read(x[j]) * scale * read(weight[j]))

    return compiled


@cache
def _silu_mul(dtype: torch.dtype, parallel: bool) -> Callable[..., Any]:
    stored, read, write = STORED[dtype], READ[dtype], WRITE[dtype]

    @kernel("void(intp, intp, intp, intp)", parallel=parallel)
    def compiled(x_at, out_at, n, dim):  # type: ignore[no-untyped-def]
        x = carray(pointer(x_at, stored), (n, 2, dim))
        out = carray(pointer(out_at, stored), (n, dim))
        for row in numba.prange(n):
            for j in range(dim):
                gate = read(x[row, 0, j])
                sigmoid = np.float32(1) / (np.float32(1) + exp(min(-gate, np.float32(88))))
                out[row, j] = write(gate * sigmoid * read(x[row, 1, j]))

    return compiled


@cache
def _rotate(dtype: torch.dtype, parallel: bool) -> Callable[..., Any]:
    """Rows of three leading dimensions; without angles (`cos_at` 0) they are copied."""
    stored, read, write = STORED[dtype], READ[dtype], WRITE[dtype]
    size = dtype.itemsize

    @kernel(f"void({', '.join(['intp'] * 17)})", parallel=parallel)
    def compiled(  # type: ignore[no-untyped-def]
        x_at, x0, x1, x2, cos_at, sin_at, turn0, turn1, turn2, out_at, out0, out1, out2, n0, n1, n2, half
    ):
        n_rows = n0 * n1 * n2
        for task in numba.prange((n_rows + _ROWS - 1) // _ROWS):
            for row in range(task * _ROWS, min(n_rows, task * _ROWS + _ROWS)):
                a, b, c = row // (n1 * n2), row // n2 % n1, row % n2
                x = carray(pointer(x_at + (a * x0 + b * x1 + c * x2) * size, stored), (2, half))
                out = carray(pointer(out_at + (a * out0 + b * out1 + c * out2) * size, stored), (2, half))
                if cos_at == 0:
                    for j in range(half):
                        out[0, j] = x[0, j]
                        out[1, j] = x[1, j]
                    continue
                turn = (a * turn0 + b * turn1 + c * turn2) * size
                cos = carray(pointer(cos_at + turn, stored), (half,))
                sin = carray(pointer(sin_at + turn, stored), (half,))
                for j in range(half):
                    first, second = read(x[0, j]), read(x[1, j])
                    out[0, j] = write(first * read(cos[j]) - second * read(sin[j]))
                    out[1, j] = write(second * read(cos[j]) + first * read(sin[j]))

    return compiled
