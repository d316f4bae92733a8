"""Products of few rows with keys and values in 8 bits, as pairs of 16-bit integers; also see `quad_products`.

A row of integers is int16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, float32, int16, types

from lce.kernels.code.compiling import features, inner, intrinsic_of
from lce.kernels.code.numbers import pointer
from lce.kernels.code.shared import KEYS
from lce.kernels.code.vectors import _at, call_llvm, i64, loop, prefetch, switch

_WIDE = "avx512bw" in features()
LANES = 16 if _WIDE else 8  # numbers of 32 bits in a vector
LEAST = LANES  # the least number of keys
COLUMNS = 2 * LANES  # a row's length is a multiple
MOST_SIGNED, MOST_UNSIGNED = 32767, 32767
_MADD = "llvm.x86.avx512.pmaddw.d.512" if _WIDE else "llvm.x86.avx2.pmadd.wd"
_HAS_MADD = "avx2" in features()
_I8, _I16, _I32 = (ir.IntType(bits) for bits in (8, 16, 32))
_F32 = ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_VECTORS = 2 if _WIDE else 1  # vectors of 8-bit integers of a value that are summed at once


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
_word_at = intrinsic_of("word", types.float32(types.intp), _emit_word)
_dots_with = _dots({rows: LANES // rows for rows in (4, 3, 2, 1)})
_add_columns = _weighted()


@inner
def scale_at(row_at, dim):
    """Read the scale of a row of `dim` numbers."""
    return _word_at(row_at + (dim + 3) // 4 * 4)


@inner
def write_integers(numbers, per, to, _signed):
    """Write `per` times numbers, rounded to 16-bit integers, as a row at the address `to`."""
    integers = carray(pointer(to, int16), (len(numbers),))
    for i in range(len(numbers)):
        integers[i] = int16(np.rint(numbers[i] * per))


@inner
def score_keys(rows, q_at, q_row, scales_at, k_at, k_row, n, out_at, dim, v_at, v_row, spare_at):
    """Write the scores of n ≥ LANES keys to rows of `KEYS` numbers, and fetch the keys' values.

    `spare_at` is memory for `KEYS` float32 numbers.
    """
    scores, q_scales = carray(pointer(out_at, float32), (rows, KEYS)), carray(pointer(scales_at, float32), (rows,))
    scales, key, at_once = carray(pointer(spare_at, float32), (KEYS,)), 0, LANES // rows
    while key < n:
        key = min(key, n - at_once)  # the last step computes some scores again
        for i in range(at_once):
            prefetch(v_at + (key + i) * v_row)
        to, keys_at = out_at + 4 * key, k_at + key * k_row
        _dots_with(rows, q_at, q_row, keys_at, k_row, to, 4 * KEYS, dim // (2 * LANES))
        key += at_once
    for key in range(n):
        scales[key] = scale_at(k_at + key * k_row, dim)
    for row in range(rows):
        q_scale = q_scales[row]
        for key in range(n):
            scores[row, key] *= scales[key] * q_scale


@inner
def add_values(rows, weights_at, w_row, v_at, v_row, n, sums_at, sums_row, factors_at, dim, k_at, k_row, n_next):
    """Add n weighted values to sums, and fetch the next keys."""
    for key in range(n_next):
        prefetch(k_at + key * k_row)
    column, even = 0, n // 2 * 2
    while column < dim:
        columns = _VECTORS if dim - column >= 2 * LANES * _VECTORS else 1
        values_at, to = v_at + column, sums_at + 4 * column
        _add_columns(rows, columns, weights_at, w_row, values_at, v_row, to, sums_row, even // 2, factors_at)
        if n % 2:  # the last value makes a pair with itself, whose weight is 0
            last_at, value_at = weights_at + 2 * even, values_at + even * v_row
            _add_columns(rows, columns, last_at, w_row, value_at, 0, to, sums_row, 1, factors_at)
        column += columns * 2 * LANES
