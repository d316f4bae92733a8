"""Products of a few input rows with a weight matrix, which is read once, at the speed of memory.

The kernel also does the operations around a product in a decoder layer: the norm of the input, the bias, the gate of an
MLP, and the sum with the hidden states.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lce.kernels.cpu import vectors
from lce.kernels.cpu.compiling import MOST_ROWS, ByDtype, Kernel, argument_of, by_dtype, features, inner, number_of
from lce.kernels.cpu.numbers import (
    GATES,
    Gate,
    exp,
    gate_power,
    itemsize,
    pointer,
    read,
    read_row,
    stored,
    sum_of_squares,
    write_row,
)
from lce.kernels.cpu.vectors import LANES

_ROWS = 64  # weight rows that a thread takes at a time
_CHAINS = 2  # partial sums of a dot product, kept apart so that no addition waits for the one before it
_COLUMNS = 2 if "avx512f" in features() else 1  # weight rows that are multiplied with four rows of x at a time
_APART = 80  # numbers of padding behind each row of x: rows that are 2^n apart compete for the same L1 cache lines


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Tensor | None = None, eps: float = 0.0,
    gate: Gate | None = None, onto: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return `x @ weight.T + bias`, `[T, out]`, for `x [T, in]`, T ≤ `MOST_ROWS`, `weight [out, in]`, `bias [out]`.

    With `norm [in]`, each row of x is first divided by its root mean square and multiplied by `norm`. With `gate`, the
    first half a and second half b of each result row are combined to `gate(a) * b`: `[T, out / 2]`. With `onto`, the
    result is added to that tensor in place.

    All tensors are contiguous, on the CPU and of one dtype, except that `out_dtype`, `onto` and an x with a norm may be
    float32. Arithmetic is float32, rounded once at the end. A row of the result has the same bits for any T and number
    of threads. Bytes moved: the weights once. Eight rows take two to four times as long as one row.
    """
    (n_rows, size), dtype = weight.shape, weight.dtype
    own, out, n_out, given = around_product(x, n_rows, size, bias, norm, eps, gate, onto, out_dtype)
    fits = weight.is_contiguous() and own is dtype
    assert fits, (weight.stride(), dtype, x.dtype)
    _product[dtype](-(-n_out // _ROWS), x.data_ptr(), weight.data_ptr(), *given)
    return out


def around_product(
    x: Tensor, n_rows: int, width: int, bias: Tensor | None = None, norm: Tensor | None = None, eps: float = 0.0,
    gate: Gate | None = None, onto: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> tuple[torch.dtype, Tensor, int, tuple[int, ...]]:  # fmt: skip
    """Check the arguments of `product` other than the matrix, whose shape is `[n_rows, width]`.

    Returns the model's dtype, which is that of `norm` if given, else of x; the output; its number of columns; and the
    kernel's arguments after the addresses of x and the matrix.
    """
    (n, size), dtype = x.shape, x.dtype if norm is None else norm.dtype
    n_out = n_rows // 2 if gate else n_rows
    fits = n <= MOST_ROWS and size == width and x.is_contiguous()
    assert fits, (x.shape, n_rows, width)
    assert onto is None or (onto.shape == (n, n_out) and onto.is_contiguous()), onto.shape
    assert bias is None or bias.dtype is dtype, bias.dtype
    out = torch.empty(n, n_out, dtype=out_dtype or dtype) if onto is None else onto
    wide = x.dtype is not dtype, out.dtype is not dtype
    assert all(y.dtype in (dtype, torch.float32) for y in (x, out)), (x.dtype, out.dtype, dtype)
    bias_at, norm_at = 0 if bias is None else bias.data_ptr(), 0 if norm is None else norm.data_ptr()
    sizes = n, n_out, width, GATES[gate], onto is not None, *wide, argument_of(eps)
    return dtype, out, n_out, (bias_at, norm_at, out.data_ptr(), *sizes)


@by_dtype(Kernel)
def _product(begin, end, x_at, weight_at, bias_at, norm_at, out_at, n, n_out, size, kind, adds, wide_x, wide_out, eps):
    n_parts = 2 if kind else 1
    norm = carray(pointer(norm_at, stored), (size,))
    x = np.empty((n if n <= 2 else (n + 3) // 4 * 4, size + _APART), np.float32)  # each thread has its own copy
    x[n:] = np.float32(0)
    for i in range(n):
        read_row(x_at, i * size, size, wide_x, x[i])
        if norm_at:
            scale = np.float32(1) / np.sqrt(_squares(x[i, :size]) / np.float32(size) + number_of(eps))
            for j in range(size):
                x[i, j] = x[i, j] * scale * read(norm[j])
    for task in range(begin, end):
        first = task * _ROWS
        n_here = min(n_out, first + _ROWS) - first
        sums = np.empty((2, MOST_ROWS, _ROWS + _COLUMNS), np.float32)
        for part in range(n_parts):
            row_at = part * n_out + first
            bias = carray(pointer(bias_at + row_at * itemsize, stored), (_ROWS,))
            _dots(x, n, weight_at + row_at * size * itemsize, size, n_here, sums[part])
            if bias_at:
                for i in range(n):
                    for row in range(n_here):
                        sums[part, i, row] += read(bias[row])
        for i in range(n):
            place = i * n_out + first
            if kind:
                for row in range(n_here):
                    gate = sums[0, i, row]
                    sums[0, i, row] = gate / (np.float32(1) + exp(gate_power(gate, kind))) * sums[1, i, row]
            if adds:
                read_row(out_at, place, n_here, wide_out, sums[1, i])
                for row in range(n_here):
                    sums[0, i, row] += sums[1, i, row]
            write_row(out_at, place, n_here, wide_out, sums[0, i])


_squares = sum_of_squares[torch.float32]
_dots_1 = ByDtype(lambda dtype: vectors.dots(False, dtype, {1: 1}, _CHAINS))
_dots_2 = ByDtype(lambda dtype: vectors.dots(False, dtype, {2: 1}, _CHAINS))
_dots_4 = ByDtype(lambda dtype: vectors.dots(False, dtype, {4: _COLUMNS}, _CHAINS))


@by_dtype(inner)
def _dots(x, n, weight_at, size, n_here, sums):
    """Write the dot products of n rows of x with the `n_here` weight rows at an address to `sums [n, n_here]`.

    The first `size` numbers of a row of x are used. Each weight row is read from memory once. If n > 2, four rows of x
    are multiplied with `_COLUMNS` weight rows at a time; x and `sums` then have padding up to a multiple of four rows,
    and `sums` has `_COLUMNS` spare columns. The order of a sum is the same for any n.
    """
    n_steps, x_row, sums_row = size // (_CHAINS * LANES), 4 * x.shape[1], 4 * sums.shape[1]
    whole, row = n_steps * _CHAINS * LANES, 0
    while row < n_here and n_steps:
        at, to = weight_at + row * size * itemsize, sums[0, row:].ctypes.data
        step = 1 if n <= 2 or n_here - row < _COLUMNS else _COLUMNS
        if n == 1:
            _dots_1(1, x.ctypes.data, x_row, at, 0, to, sums_row, n_steps)
        elif n == 2:
            _dots_2(2, x.ctypes.data, x_row, at, 0, to, sums_row, n_steps)
        else:
            weight_row = size * itemsize if step == _COLUMNS else 0  # stride 0: all columns are the same weight row
            for i in range(0, n, 4):
                _dots_4(4, x[i].ctypes.data, x_row, at, weight_row, to + i * sums_row, sums_row, n_steps)
        row += step
    for row in range(n_here if whole < size else 0):
        weight = carray(pointer(weight_at + row * size * itemsize, stored), (size,))
        for i in range(n):
            rest = sums[i, row] if n_steps else np.float32(0)
            for j in range(whole, size):
                rest += x[i, j] * read(weight[j])
            sums[i, row] = rest
