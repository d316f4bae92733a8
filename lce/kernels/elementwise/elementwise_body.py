"""The operations of a decoder layer between matrix products: norms, gates, rotations, and copies of keys and values."""

from __future__ import annotations

import numpy as np
from numba import carray, float32, int64, uint32

from lce.kernels.runtime.compiling import by_dtype, inner, kernel, number_of
from lce.kernels.runtime.numbers import (
    exp,
    gate_power,
    itemsize,
    pointer,
    read,
    read_row,
    stored,
    sum_of_squares,
    write,
    write_row,
)
from lce.kernels.runtime.shared import TAKEN_ROWS, WORD


@by_dtype(kernel)
def norm(first, stop, memory, x_at, weight_at, out_at, head_stride, row_stride, n, dim, flags, eps):
    """Normalise rows; without a weight, convert them. Loops are apart, so that no product and sum are fused.

    `flags` has 1 if x is float32, 2 if the weight is, 4 if `out` is, and 8 if results, rounded, are added to `out`.
    """
    row, weight = carray(pointer(memory, float32), (dim,)), carray(pointer(memory + 4 * dim, float32), (dim,))
    if weight_at:
        read_row(weight_at, 0, dim, flags & 2, weight)
    for i in range(first, stop):
        read_row(x_at, i // n * head_stride + i % n * row_stride, dim, flags & 1, row)
        if weight_at:
            scale = np.float32(1) / np.sqrt(sum_of_squares(row) / np.float32(dim) + number_of(eps))
            for j in range(dim):
                row[j] = row[j] * scale * weight[j]
        if flags & 8:
            out = carray(pointer(out_at + 4 * i * dim, float32), (dim,))
            for j in range(dim):
                out[j] += row[j] if flags & 2 else read(write(row[j]))
        else:
            write_row(out_at, i * dim, dim, flags & 4, row)


@by_dtype(kernel)
def gate_mul(first, stop, _memory, x_at, out_at, dim, kind):
    x = carray(pointer(x_at, stored), (stop, 2, dim))
    out = carray(pointer(out_at, stored), (stop, dim))
    for row in range(first, stop):
        for j in range(dim):
            gate = read(x[row, 0, j])
            sigmoid = np.float32(1) / (np.float32(1) + exp(gate_power(gate, kind)))
            out[row, j] = write(gate * sigmoid * read(x[row, 1, j]))


@by_dtype(kernel)
def rotate(first, stop, _memory, x_at, cos_at, sin_at, out_at, x0, x1, x2, turn0, turn1, turn2, n1, n2, half):
    """Rotate rows `x [..., n1, n2, 2·half]`; `x0`.. and `turn0`.. are strides, in numbers, of x and of the cosines."""
    for row in range(first, stop):
        a, b, c = row // (n1 * n2), row // n2 % n1, row % n2
        x = carray(pointer(x_at + (a * x0 + b * x1 + c * x2) * itemsize, stored), (2, half))
        out = carray(pointer(out_at + row * 2 * half * itemsize, stored), (2, half))
        angle = (a * turn0 + b * turn1 + c * turn2) * itemsize
        cos = carray(pointer(cos_at + angle, stored), (half,))
        sin = carray(pointer(sin_at + angle, stored), (half,))
        _turn(x, cos, sin, out, half)


@by_dtype(kernel)
def append(
    first, stop, _memory, k_at, v_at, cos_at, sin_at, into_k_at, into_v_at, k0, k1, v0, v1, at, capacity, n, dim
):
    half = dim // 2
    for row in range(first, stop):
        head, i = row // n, row % n
        to = (head * capacity + at + i) * dim * itemsize
        k = carray(pointer(k_at + (head * k0 + i * k1) * itemsize, stored), (2, half))
        v = carray(pointer(v_at + (head * v0 + i * v1) * itemsize, stored), (dim,))
        into_k = carray(pointer(into_k_at + to, stored), (2, half))
        into_v = carray(pointer(into_v_at + to, stored), (dim,))
        if cos_at:
            cos = carray(pointer(cos_at + i * half * itemsize, stored), (half,))
            sin = carray(pointer(sin_at + i * half * itemsize, stored), (half,))
            _turn(k, cos, sin, into_k, half)
        else:
            for j in range(half):
                into_k[0, j] = k[0, j]
                into_k[1, j] = k[1, j]
        for j in range(dim):
            into_v[j] = v[j]


@by_dtype(inner)
def _turn(x, cos, sin, out, half):
    """Rotate one vector `x [2, D/2]` by `cos sin [D/2]` and write the result to `out`."""
    left, right, out_left, out_right = x[0], x[1], out[0], out[1]
    for j in range(half):  # one output a loop, so that LLVM vectorises it: see `rows.put_query`
        out_left[j] = write(read(left[j]) * read(cos[j]) - read(right[j]) * read(sin[j]))
    for j in range(half):
        out_right[j] = write(read(right[j]) * read(cos[j]) + read(left[j]) * read(sin[j]))


@kernel
def take_rows(begin, end, _memory, one_at, two_at, index_at, taken_at, n_groups, n, words, stride):
    index = carray(pointer(index_at, int64), (n,))
    n_pieces = (n + TAKEN_ROWS - 1) // TAKEN_ROWS
    for task in range(begin, end):
        which, piece = task // n_pieces, task % n_pieces
        source = (one_at if which < n_groups else two_at) + which % n_groups * stride
        for i in range(piece * TAKEN_ROWS, min(n, piece * TAKEN_ROWS + TAKEN_ROWS)):
            row = carray(pointer(source + index[i] * words * WORD, uint32), (words,))
            out = carray(pointer(taken_at + (which * n + i) * words * WORD, uint32), (words,))
            for w in range(words):
                out[w] = row[w]
