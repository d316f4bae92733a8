"""Attention to keys and values in 8 bits, and the making of such rows: `lce.attention.int8_rows` describes a row.

For few query rows, keys and values are read in place: a query is rounded to 16 bits, so that its products with a key
are sums of integers, and weights are float32. For more rows, `KEYS` keys and values at a time are widened to the
queries' dtype, and attended as other keys are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, float32, int8, int16, int64, types

from lce.kernels.code.compiling import arguments, by_dtype, call, features, inner, intrinsic_of, kernel, number_of
from lce.kernels.code.numbers import itemsize, pointer, read, stored, write
from lce.kernels.code.rows import FEW_ROWS, _pairs, _soften, scratch
from lce.kernels.code.shared import KEYS
from lce.kernels.code.vectors import _at, call_llvm, i64, loop, prefetch, switch

_WIDE = "avx512bw" in features()
LANES = 16 if _WIDE else 8  # numbers of 32 bits in a vector
_MADD = "llvm.x86.avx512.pmaddw.d.512" if _WIDE else "llvm.x86.avx2.pmadd.wd"
_HAS_MADD = "avx2" in features()
_I8, _I16, _I32 = (ir.IntType(bits) for bits in (8, 16, 32))
_F32 = ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_COLUMNS = 2 if _WIDE else 1  # vectors of 8-bit integers of a value that are summed at once


def _lanes(numbers: list[int]) -> Any:
    return ir.Constant(ir.VectorType(_I32, len(numbers)), numbers)


def _pair_products(builder: Any, x: Any, y: Any) -> Any:
    """Emit the sums `x[2i]·y[2i] + x[2i+1]·y[2i+1]` of two vectors of 16-bit integers, as 32-bit integers."""
    if _HAS_MADD:
        return call_llvm(builder, _MADD, _WORDS, [x, y])
    wide = ir.VectorType(_I32, 2 * LANES)
    products = builder.mul(builder.sext(x, wide), builder.sext(y, wide))
    even, odd = (_lanes(list(range(first, 2 * LANES, 2))) for first in (0, 1))
    return builder.add(*(builder.shuffle_vector(products, products, order) for order in (even, odd)))


def _folded(builder: Any, x: Any, y: Any, distance: int) -> Any:
    """Emit the sums of lanes `distance` apart: of x in the lower half of each block of lanes, of y in the upper."""
    low = [e if not e & distance else LANES + e - distance for e in range(LANES)]
    high = [e + distance if not e & distance else LANES + e for e in range(LANES)]
    return builder.add(*(builder.shuffle_vector(x, y, _lanes(order)) for order in (low, high)))


def _dots(n_keys: dict[int, int]) -> Callable[..., Any]:
    """Return the intrinsic `(rows, q, q_stride, k, k_stride, out, out_stride, n)`, as `vectors.dots` has it.

    Q has 16-bit integers, K 8-bit integers, and the result is float32. A step takes `2 · LANES` numbers of each row.
    """
    queries, keys = ir.VectorType(_I16, 2 * LANES), ir.VectorType(_I8, 2 * LANES)

    def emit(builder: Any, rows: int, n_keys: int, args: Any) -> None:
        q, q_stride, k, k_stride, out, out_stride, n = args

        def turn(step: Any, sums: Any) -> Any:
            left, after = {}, {}
            for i in range(rows):
                offset = builder.add(builder.mul(q_stride, i64(i)), builder.mul(step, i64(4 * LANES)))
                left[i] = builder.load(_at(builder, q, offset, queries), align=2)
            for j in range(n_keys):
                offset = builder.add(builder.mul(k_stride, i64(j)), builder.mul(step, i64(2 * LANES)))
                right = builder.sext(builder.load(_at(builder, k, offset, keys), align=1), queries)
                for i in range(rows):
                    after[i, j] = builder.add(sums[i, j], _pair_products(builder, left[i], right))
            return after

        cells = [(i, j) for i in range(rows) for j in range(n_keys)]
        after = loop(builder, n, dict.fromkeys(cells, ir.Constant(_WORDS, [0] * LANES)), turn)
        sums = [after[cell] for cell in cells]
        sums += sums[-1:] * (LANES - len(sums))
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [_folded(builder, sums[i], sums[i + half], half) for i in range(half)]
        found = builder.sitofp(sums[0], _FLOATS)
        for i in range(rows):
            part = builder.shuffle_vector(found, found, _lanes(list(range(i * n_keys, (i + 1) * n_keys))))
            place = _at(builder, out, builder.mul(out_stride, i64(i)), ir.VectorType(_F32, n_keys))
            builder.store(part, place, align=4)

    def emit_all(builder: Any, n_rows: Any, *args: Any) -> None:
        switch(builder, n_rows, {rows: partial(emit, builder, rows, n, args) for rows, n in n_keys.items()})

    return intrinsic_of(f"dots of integers {n_keys}", types.void(*[types.intp] * 8), emit_all)


def _weighted() -> Callable[..., Any]:
    """Return the intrinsic `(rows, columns, a, a_stride, b, b_stride, c, c_stride, n, factors)`: `C += factors · AB`.

    A `[rows, 2n]` has 16-bit integers, B `[2n, 2 · LANES · columns]` integers of 8 bits. C, `factors [rows]`: float32.
    There are 4, 3, 2 or 1 rows, and 2 or 1 columns. Sums of integers do not overflow up to 256 rows of B.
    """
    numbers, pairs = ir.VectorType(_I8, 2 * LANES), ir.VectorType(_I16, 2 * LANES)
    # Bytes of two rows are put side by side, in each half of a vector; a word of A has the weights of both rows.
    halves = [_lanes([row + e for e in range(h, h + LANES) for row in (0, 2 * LANES)]) for h in (0, LANES)]

    def emit(builder: Any, rows: int, columns: int, args: Any) -> None:
        a, a_stride, b, b_stride, c, c_stride, n, factors = args
        cells = [(i, j) for i in range(rows) for j in range(2 * columns)]

        def turn(step: Any, sums: Any) -> Any:
            here, right, after = builder.mul(step, builder.shl(b_stride, i64(1))), [], {}
            for j in range(columns):
                offset = builder.add(here, i64(2 * LANES * j))
                first = builder.load(_at(builder, b, offset, numbers), align=1)
                second = builder.load(_at(builder, b, builder.add(offset, b_stride), numbers), align=1)
                right += [builder.sext(builder.shuffle_vector(first, second, half), pairs) for half in halves]
            for i in range(rows):
                offset = builder.add(builder.mul(a_stride, i64(i)), builder.mul(step, i64(4)))
                word = builder.load(_at(builder, a, offset, _I32), align=4)
                one = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, ir.Constant(_I32, 0))
                left = builder.bitcast(builder.shuffle_vector(one, one, _lanes([0] * LANES)), pairs)
                for j in range(2 * columns):
                    after[i, j] = builder.add(sums[i, j], _pair_products(builder, left, right[j]))
            return after

        sums = loop(builder, n, dict.fromkeys(cells, ir.Constant(_WORDS, [0] * LANES)), turn)
        for i, j in cells:
            one = builder.load(_at(builder, factors, i64(4 * i), _F32), align=4)
            one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), one, ir.Constant(_I32, 0))
            factor = builder.shuffle_vector(one, one, _lanes([0] * LANES))
            place = _at(builder, c, builder.add(builder.mul(c_stride, i64(i)), i64(4 * LANES * j)), _FLOATS)
            found = [builder.sitofp(sums[i, j], _FLOATS), factor, builder.load(place, align=4)]
            builder.store(call_llvm(builder, f"llvm.fma.v{LANES}f32", _FLOATS, found), place, align=4)

    def emit_all(builder: Any, n_rows: Any, n_columns: Any, *args: Any) -> None:
        shapes = [(rows, columns) for rows in (4, 3, 2, 1) for columns in (2, 1)]
        cases = {8 * rows + columns: partial(emit, builder, rows, columns, args) for rows, columns in shapes}
        switch(builder, builder.add(builder.mul(n_rows, i64(8)), n_columns), cases)

    return intrinsic_of("weighted integers", types.void(*[types.intp] * 10), emit_all)


def _emit_word(builder: Any, address: Any) -> Any:
    """Emit a load of a float32 that is not vectorised: vectors of strided numbers cost more than the loads."""
    return builder.bitcast(builder.load_atomic(_at(builder, address, i64(0), _I32), "monotonic", 4), _F32)


_word_at = intrinsic_of("word", types.float32(types.intp), _emit_word)
_score = _dots({rows: LANES // rows for rows in (4, 3, 2, 1)})
_add_values = _weighted()


@inner
def _scale_at(row_at, dim):
    """Read the scale of a row of `dim` numbers."""
    return _word_at(row_at + (dim + 3) // 4 * 4)


@inner
def _put_integers(numbers, into):
    """Round numbers to 16-bit integers; return their scale, which is NaN if a number is not finite."""
    peak, total = np.float32(0), np.float32(0)
    for i in range(len(numbers)):
        peak = max(peak, abs(numbers[i]))
        total += numbers[i]
    per = np.float32(32767) / peak if peak > 0 else np.float32(0)
    for i in range(len(numbers)):
        into[i] = int16(np.rint(numbers[i] * per))
    return peak / np.float32(32767) + np.float32(0) * total


@by_dtype(inner)
def _attend_few(memory, n, k_at, k_row, v_at, v_row, first, stop, dim, scale):
    """Do what `attend_rows` does, for few rows. Sums over keys are in the order of keys, whatever the rows."""
    queries, spans, state, sums, spare, _, scores, _ = memory
    at = spare.ctypes.data  # for few rows, nothing is packed there
    k_scales, v_scales = carray(pointer(at, float32), (KEYS,)), carray(pointer(at + 4 * KEYS, float32), (KEYS,))
    q_scales = carray(pointer(at + 8 * KEYS, float32), (FEW_ROWS,))
    integers = carray(pointer(at + 8 * KEYS + 64, int16), (FEW_ROWS, dim))
    weights = carray(pointer(at + 8 * KEYS + 64 + 2 * FEW_ROWS * dim, int16), (FEW_ROWS, KEYS))
    factors = carray(pointer(at + 8 * KEYS + 32, float32), (FEW_ROWS,))
    sums_row, start = 4 * sums.shape[1], first
    query = scores[0, :dim]
    for row in range(n):
        words, halves = queries[row], carray(pointer(queries[row].ctypes.data, stored), (dim,))
        for d in range(dim):
            query[d] = read(halves[d]) if _pairs else words[d]
        q_scales[row] = _put_integers(query, integers[row])
    while start < stop:
        left = stop - start
        size = left if left <= KEYS else KEYS if left >= KEYS + LANES else KEYS - LANES  # leaves 0 keys or enough
        for row in range(0, n, 4):
            rows, q_at, key = min(n - row, 4), integers[row].ctypes.data, 0
            at_once = LANES // rows
            while key < size:
                key = min(key, size - at_once)  # the last step computes some scores again
                for i in range(at_once if row == 0 else 0):
                    prefetch(v_at + (start + key + i) * v_row)
                to, keys_at = scores[row, key:].ctypes.data, k_at + (start + key) * k_row
                _score(rows, q_at, 2 * dim, keys_at, k_row, to, 4 * KEYS, dim // (2 * LANES))
                key += at_once
        for key in range(size):
            k_scales[key] = _scale_at(k_at + (start + key) * k_row, dim)
        for key in range(size):
            v_scales[key] = _scale_at(v_at + (start + key) * v_row, dim)
        for key in range(start + size, min(stop, start + size + KEYS)):
            prefetch(k_at + key * k_row)
        for row in range(n):
            own, q_scale = scores[row], q_scales[row]
            low, high = max(spans[row, 0] - start, 0), min(spans[row, 1] - start, size)
            if low < high:
                for key in range(size):
                    own[key] *= k_scales[key] * q_scale
                _soften(own, low, high, scale, state[row], sums[row], dim)
                own[: low // 32 * 32] = np.float32(0)
                own[high:size] = np.float32(0)
                for key in range(size):
                    own[key] *= v_scales[key]
                factors[row] = _put_integers(own[:size], weights[row])
                if size % 2:
                    weights[row, size] = 0
            else:
                weights[row] = 0
                factors[row] = 0
        row = 0
        while row < n:
            rows, column, even = min(n - row, 4), 0, size // 2 * 2
            while column < dim:
                columns = _COLUMNS if dim - column >= 2 * LANES * _COLUMNS else 1
                values_at, weights_at = v_at + start * v_row + column, weights[row].ctypes.data
                to, factors_at = sums[row, column:].ctypes.data, factors[row:].ctypes.data
                _add_values(rows, columns, weights_at, 2 * KEYS, values_at, v_row, to, sums_row, even // 2, factors_at)
                if size % 2:  # the last value makes a pair with itself, whose weight is 0
                    weights_at, values_at = weights_at + 2 * even, values_at + even * v_row
                    _add_values(rows, columns, weights_at, 2 * KEYS, values_at, 0, to, sums_row, 1, factors_at)
                column += columns * 2 * LANES
            row += rows
        start += size


@by_dtype(inner)
def _widen_row(row_at, dim, to):
    """Write the numbers of a row to an address, in the dtype."""
    scale, numbers = _scale_at(row_at, dim), carray(pointer(row_at, int8), (dim,))
    out = carray(pointer(to, stored), (dim,))
    for i in range(dim):
        out[i] = write(np.float32(numbers[i]) * scale)


@by_dtype(kernel)
def attend_rows(first, stop, _memory, args):
    """Do what `rows.attend_rows` does, for rows of 8 bits. The tenth argument is the address of `rows.attend_rows`.

    The memory goes on behind what `scratch` divides, with space for `2 · KEYS · D` numbers of the dtype.
    """
    memory_at, n_rows, dim, n, k_at, k_row, v_at, v_row, steepness, plain_at = arguments(args, 10)
    if n <= FEW_ROWS and dim <= KEYS and dim % (2 * LANES) == 0 and stop - first >= LANES:
        memory = scratch(memory_at, n_rows, dim)
        _attend_few(memory, n, k_at, k_row, v_at, v_row, first, stop, dim, number_of(steepness))
        return
    state = scratch(memory_at, n_rows, dim)[2]  # the last of what is divided
    k_to = (state.ctypes.data + 8 * len(state) + 63) // 64 * 64
    v_to, given = k_to + KEYS * dim * itemsize, carray(pointer(args, int64), (9,))
    given[5] = given[7] = dim * itemsize
    for start in range(first, stop, KEYS):
        size = min(KEYS, stop - start)
        for key in range(size):
            _widen_row(k_at + (start + key) * k_row, dim, k_to + key * dim * itemsize)
            _widen_row(v_at + (start + key) * v_row, dim, v_to + key * dim * itemsize)
        given[4], given[6] = k_to - start * dim * itemsize, v_to - start * dim * itemsize
        call(plain_at, start, start + size, args)
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
