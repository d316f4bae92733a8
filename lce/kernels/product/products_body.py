"""The kernel of `products`, and what it shares with that of quantised weights."""

import numpy as np
from numba import carray, float32, int64

from lce.kernels.runtime import numbers, tiles
from lce.kernels.runtime.compiling import ByDtype, by_dtype, features, inner, kernel, number_of
from lce.kernels.runtime.numbers import exp, gate_power, itemsize, pointer, read, read_row, stored, write_row
from lce.kernels.runtime.shared import BEGUN_BYTES, LANES, MOST_ROWS, PRODUCT_ROWS

_TOGETHER = 2 if "avx512f" in features() else 1  # weight rows that are multiplied at a time with four rows of x
_PIECE = 12  # steps that are done at a time with all rows of a task, so that x stays in the L1 cache
_CHAINS = 2  # partial sums of a dot product, kept apart so that no addition waits for the one before it
_APART = 80  # numbers of padding behind each row of x: rows that are 2^n apart compete for the same L1 cache lines


@by_dtype(kernel)
def product(begin, end, memory, x_at, weight_at, bias_at, norm_at, out_at, out_row, n, n_out, size, flags, eps):
    """Write `x [n, size] · weight [2·n_out or n_out, size]ᵀ + bias`, with what is around it; see `products`.

    A task is `PRODUCT_ROWS` rows of the weights, which are read once for all n rows: `n · size` multiplications each.
    """
    gate, adds, wide_x, wide_out = around_of(flags)
    n_parts = 2 if gate else 1
    x_at_first = memory + BEGUN_BYTES
    x = carray(pointer(x_at_first, float32), (n if n <= 2 else (n + 3) // 4 * 4, size + _APART))
    sums_at = x_at_first + 4 * MOST_ROWS * (size + _APART)
    sums = carray(pointer(sums_at, float32), (2, MOST_ROWS, PRODUCT_ROWS))
    held_at = sums_at + 4 * 2 * MOST_ROWS * PRODUCT_ROWS
    if begins(memory):
        norm = carray(pointer(norm_at, stored), (size,))
        x[n:] = np.float32(0)
        for i in range(n):
            read_row(x_at, i * size, size, wide_x, x[i])
            if norm_at:
                scale = np.float32(1) / np.sqrt(numbers.sum_of_squares(x[i, :size]) / np.float32(size) + number_of(eps))
                for j in range(size):
                    x[i, j] = x[i, j] * scale * read(norm[j])
    for task in range(begin, end):
        first = task * PRODUCT_ROWS
        n_here = min(n_out, first + PRODUCT_ROWS) - first
        for part in range(n_parts):
            row_at = part * n_out + first
            bias = carray(pointer(bias_at + row_at * itemsize, stored), (PRODUCT_ROWS,))
            _dots(x, n, weight_at + row_at * size * itemsize, size, n_here, sums[part], held_at)
            if bias_at:
                for i in range(n):
                    for row in range(n_here):
                        sums[part, i, row] += read(bias[row])
        for i in range(n):
            finish_row(out_at, i * out_row + first, n_here, gate, adds, wide_out, sums[0, i], sums[1, i])


@by_dtype(inner)
def finish_row(out_at, place, n, gate, adds, wide, row, other):
    """Write the first n numbers of a product's row to the places after `place` of the array at `out_at`, rounded.

    `other` is the row's second half if there is a `gate`, and is overwritten. What a product `adds` to is in the array.
    """
    if gate:
        for j in range(n):
            row[j] = row[j] / (np.float32(1) + exp(gate_power(row[j], gate))) * other[j]
    if adds:
        read_row(out_at, place, n, wide, other)
        for j in range(n):
            row[j] += other[j]
    write_row(out_at, place, n, wide, row)


@inner
def begins(memory):
    """Return whether a thread runs a kernel for the first of its pieces, and note in its memory that it did.

    The first 8 bytes of the memory are 0 before. What a thread prepares from x serves all its pieces.
    """
    began = carray(pointer(memory, int64), (1,))
    if began[0]:
        return False
    began[0] = 1
    return True


@inner
def around_of(flags):
    """Return the gate that `flags` name, whether the result is added, and whether x and the output are wide."""
    return flags & 3, flags & 4, flags & 8, flags & 16


_dots_of = ByDtype(lambda dtype: tiles.dots(dtype, {1: 1, 2: 1, 4: 1}, _CHAINS))
_add_dots = ByDtype(lambda dtype: tiles.dots(dtype, {4: _TOGETHER}, _CHAINS, begins=False, ends=False))
_end_dots = ByDtype(lambda dtype: tiles.dots(dtype, {4: _TOGETHER}, _CHAINS, begins=False))


@by_dtype(inner)
def _dots_in_pieces(x, n, weight_at, size, n_rows, n_steps, sums, held_at):
    """Do what `_dots` does for more than two rows of x, a multiple of `_TOGETHER` weight rows, and whole steps.

    The sums have the same order. The memory at `held_at` has them while other pieces of the inputs are multiplied.
    """
    n_sums = 4 * _TOGETHER * _CHAINS
    x_row, sums_row, w_row = 4 * x.shape[1], 4 * sums.shape[1], size * itemsize
    n_tiles, n_fours = n_rows // _TOGETHER, (n + 3) // 4
    held = carray(pointer(held_at, float32), (PRODUCT_ROWS // _TOGETHER, 2, n_sums * LANES))
    held[:n_tiles, :n_fours] = np.float32(0)
    for first in range(0, n_steps, _PIECE):
        n_here = min(_PIECE, n_steps - first)
        x_at, w_at = first * _CHAINS * LANES * 4, first * _CHAINS * LANES * itemsize
        for tile in range(n_tiles):
            at = weight_at + tile * _TOGETHER * w_row + w_at
            for i in range(n_fours):
                own_at, sums_at = x[4 * i].ctypes.data + x_at, held[tile, i].ctypes.data
                to = sums[4 * i, tile * _TOGETHER :].ctypes.data
                if first + n_here < n_steps:
                    _add_dots(4, own_at, x_row, at, w_row, to, sums_row, n_here, sums_at)
                else:
                    _end_dots(4, own_at, x_row, at, w_row, to, sums_row, n_here, sums_at)


@by_dtype(inner)
def _dots(x, n, weight_at, size, n_here, sums, held_at):
    """Write the dot products of n rows of x with the `n_here` weight rows at an address to `sums [n, n_here]`.

    The first `size` numbers of a row of x are used. If n > 2, x and `sums` have padding up to a multiple of four rows.
    The order of a sum is the same for any n. Weight rows are read one after the other: two at a time would come from
    memory at half the speed, because processors fetch ahead where addresses follow each other.
    """
    n_steps, x_row, sums_row = size // (_CHAINS * LANES), 4 * x.shape[1], 4 * sums.shape[1]
    whole, rows = n_steps * _CHAINS * LANES, min(n, 4) if n != 3 else 4
    done = n_here // _TOGETHER * _TOGETHER if n > 2 and n_steps else 0
    if done:
        _dots_in_pieces(x, n, weight_at, size, done, n_steps, sums, held_at)
    for row in range(done, n_here if n_steps else 0):
        at, to = weight_at + row * size * itemsize, sums[0, row:].ctypes.data
        for i in range(0, n, 4):
            _dots_of(rows, x[i].ctypes.data, x_row, at, 0, to + i * sums_row, sums_row, n_steps)
    for row in range(n_here if whole < size else 0):
        weight = carray(pointer(weight_at + row * size * itemsize, stored), (size,))
        for i in range(n):
            rest = sums[i, row] if n_steps else np.float32(0)
            for j in range(whole, size):
                rest += x[i, j] * read(weight[j])
            sums[i, row] = rest
