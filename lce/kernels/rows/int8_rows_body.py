"""Attention to keys and values in 8 bits, and the making of such rows: `lce.attention.int8_rows` describes a row.

For few query rows, keys and values are read in place. A query, and the weights of `KEYS` values times the values'
scales, are rounded to 16 bits, so that products are sums of integers, which no order changes. For more rows, `KEYS`
keys and values at a time are widened to the queries' dtype, and attended as other keys are.
"""

import numpy as np
from numba import carray, float32, int8, int16, int64

from lce.kernels.rows.pair_products_body import COLUMNS, LEAST, MOST, add_values, scale_at, score_keys
from lce.kernels.rows.rows_body import FEW_ROWS, _pairs, scratch, weigh
from lce.kernels.runtime.compiling import arguments, by_dtype, call, inner, kernel, number_of
from lce.kernels.runtime.numbers import itemsize, pointer, read, read_row, stored, write
from lce.kernels.runtime.shared import KEYS
from lce.kernels.runtime.vectors import largest


@inner
def _put_integers(numbers, magnitudes, to):
    """Write numbers as a row of 16-bit integers; return their scale, which is NaN if a number is not finite."""
    total, most, integers = np.float32(0), np.float32(MOST), carray(pointer(to, int16), (len(numbers),))
    for i in range(len(numbers)):
        magnitudes[i] = abs(numbers[i])
        total += numbers[i]
    peak = largest(magnitudes.ctypes.data, len(numbers))
    per = most / peak if peak > 0 else np.float32(0)
    for i in range(len(numbers)):
        integers[i] = int16(np.rint(numbers[i] * per))
    return peak / most + np.float32(0) * total


@by_dtype(inner)
def _attend_few(memory, n, k_at, k_row, v_at, v_row, first, stop, dim, scale):
    """Do what `attend_rows` does, for few rows. Sums over keys are in the order of keys, whatever the rows."""
    queries, spans, state, sums, spare, _, scores, _ = memory
    at = spare.ctypes.data  # for few rows, nothing is packed there
    v_scales = carray(pointer(at, float32), (KEYS,))
    q_scales = carray(pointer(at + 4 * KEYS, float32), (FEW_ROWS,))
    factors = carray(pointer(at + 4 * KEYS + 32, float32), (FEW_ROWS,))
    q_at, q_row = at + 4 * KEYS + 64, 2 * dim
    weights_at, w_row = q_at + FEW_ROWS * q_row, 2 * KEYS
    sums_row, start = 4 * sums.shape[1], first
    query = scores[0, :dim]
    for row in range(n):
        read_row(queries[row].ctypes.data, 0, dim, not _pairs, query)
        q_scales[row] = _put_integers(query, scores[1, :dim], q_at + row * q_row)
    while start < stop:
        left = stop - start
        size = left if left <= KEYS else KEYS if left >= KEYS + LEAST else KEYS - LEAST  # leaves 0 keys or enough
        wide, keys_at, values_at = (size + 15) // 16 * 16, k_at + start * k_row, v_at + start * v_row
        for row in range(0, n, 4):
            rows, scales_at, to = min(n - row, 4), q_scales[row:].ctypes.data, scores[row:].ctypes.data
            own_at = q_at + row * q_row
            score_keys(rows, own_at, q_row, scales_at, keys_at, k_row, size, to, dim, values_at, v_row, at)
        for key in range(size):
            v_scales[key] = scale_at(values_at + key * v_row, dim)
        for row in range(n):
            own, to = scores[row], weights_at + row * w_row
            if weigh(own, spans[row], start, size, 0, wide, 16, scale, state[row], sums[row], dim):
                for key in range(size):
                    own[key] *= v_scales[key]
            factors[row] = _put_integers(own[:wide], own[:wide], to)
        start += size
        for row in range(0, n, 4):
            rows, to, factors_at = min(n - row, 4), sums[row].ctypes.data, factors[row:].ctypes.data
            own_at, next_at = weights_at + row * w_row, k_at + start * k_row
            add_values(rows, own_at, w_row, values_at, v_row, size, to, sums_row, factors_at, dim, next_at, k_row)


@by_dtype(inner)
def _widen_row(row_at, dim, to):
    """Write the numbers of a row to an address, in the dtype."""
    scale, numbers = scale_at(row_at, dim), carray(pointer(row_at, int8), (dim,))
    out = carray(pointer(to, stored), (dim,))
    for i in range(dim):
        out[i] = write(np.float32(numbers[i]) * scale)


@by_dtype(kernel)
def attend_rows(first, stop, _memory, args):
    """Do what `rows.attend_rows` does, for rows of 8 bits. The twelfth argument is the address of `rows.attend_rows`.

    The memory goes on behind what `scratch` divides, with space for `2 · KEYS · D` numbers of the dtype.
    """
    memory_at, n_rows, dim, n, k_at, k_row, v_at, v_row, steepness, few, place, plain_at = arguments(args, 12)
    if few and n <= FEW_ROWS and dim <= KEYS and dim % COLUMNS == 0 and stop - first >= LEAST:
        memory = scratch(memory_at, n_rows, dim)
        _attend_few(memory, n, k_at, k_row, v_at, v_row, first, stop, dim, number_of(steepness))
        return
    state = scratch(memory_at, n_rows, dim)[2]  # the last of what is divided
    k_to = (state.ctypes.data + 8 * len(state) + 63) // 64 * 64
    v_to, given = k_to + KEYS * dim * itemsize, carray(pointer(args, int64), (9,))
    given[5] = given[7] = dim * itemsize
    start = first
    while start < stop:
        size = min(KEYS - (place + start) % KEYS, stop - start)
        for key in range(size):
            _widen_row(k_at + (start + key) * k_row, dim, k_to + key * dim * itemsize)
            _widen_row(v_at + (start + key) * v_row, dim, v_to + key * dim * itemsize)
        given[4], given[6] = k_to - start * dim * itemsize, v_to - start * dim * itemsize
        call(plain_at, start, start + size, args)
        start += size
    given[4], given[5], given[6], given[7] = k_at, k_row, v_at, v_row


@by_dtype(kernel)
def widen(begin, end, _memory, rows_at, out_at, n, group, row, dim):
    """Write rows `[G, n, …]` as vectors `[G, n, D]`; `group` and `row` are the bytes between groups and rows."""
    for i in range(begin, end):
        _widen_row(rows_at + i // n * group + i % n * row, dim, out_at + i * dim * itemsize)


@by_dtype(kernel)
def narrow(begin, end, _memory, x_at, into_at, group, row, into_group, into_row, n, dim):
    """Write vectors `[G, n, D]` as rows; `group`, `row` and so on are the bytes between groups and rows."""
    for i in range(begin, end):
        vector = carray(pointer(x_at + i // n * group + i % n * row, stored), (dim,))
        to = into_at + i // n * into_group + i % n * into_row
        numbers, peak = carray(pointer(to, int8), (dim,)), np.float32(0)
        for d in range(dim):
            peak = max(peak, abs(read(vector[d])))
        for d in range(dim):
            if read(vector[d]) != read(vector[d]):
                peak = np.float32(np.nan)
        scale = peak / np.float32(127)
        divisor = scale if scale > 0 else np.float32(1)
        for d in range(dim):
            x = np.rint(read(vector[d]) / divisor)
            numbers[d] = int8(min(max(x, np.float32(-127)), np.float32(127)))
        carray(pointer(to + (dim + 3) // 4 * 4, float32), (1,))[0] = scale
