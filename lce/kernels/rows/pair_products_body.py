"""Products of few rows of 16-bit integers with keys and values in 8 bits, which are widened to 16 bits in registers.

Products are added in pairs, without error. Keys and values that are read next are brought to the L2 cache meanwhile,
evenly: more requests at once stall the processor.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

from llvmlite import ir
from numba import carray, float32, types

from lce.kernels.runtime import vectors as emit
from lce.kernels.runtime.compiling import features, inner, intrinsic_of
from lce.kernels.runtime.numbers import pointer
from lce.kernels.runtime.shared import KEYS
from lce.kernels.runtime.tiles import by_shape, cells, dots, splats, tile
from lce.kernels.runtime.vectors import F32, I32, prefetch_far

_WIDE = "avx512bw" in features()
LANES = 16 if _WIDE else 8  # numbers of 32 bits in a vector
LEAST = LANES  # the least number of keys
COLUMNS = 2 * LANES  # a row's length is a multiple
MOST = 32767  # the largest integer of a row
_BYTES, _PAIRS = (ir.VectorType(ir.IntType(bits), 2 * LANES) for bits in (8, 16))
_FLOATS, _WORDS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
_VECTORS = 2 if _WIDE else 1  # vectors of 8-bit integers of a value that are summed at once
# Bytes of two rows are put side by side, in each half of a vector; a word of weights has those of both rows.
_HALVES = [[row + e for e in range(h, h + LANES) for row in (0, 2 * LANES)] for h in (0, LANES)]


def _emit_weighted(builder: Any, rows: int, columns: int, *args: Any) -> None:
    """Emit `C += factors · A · B`, as `tiles.multiply` has it, for A `[rows, 2n]` and B `[2n, 2 · LANES · columns]`.

    A has 16-bit integers, B integers of 8 bits; C and `factors [rows]` are float32. Sums of integers do not overflow up
    to 256 rows of B. As many lines are fetched, `next_row` bytes apart, as B has rows.
    """
    a, a_stride, b, b_stride, c, c_stride, n, factors, next_at, next_row = args

    def operands(step: Any) -> Iterator[Any]:
        here, right = builder.shl(step, step.type(1)), []
        for i in (0, 1):
            emit.fetch(builder, emit.at(builder, next_at, (here, next_row), (next_row, i)), 2)
        for j in range(columns):
            one, two = (emit.load(builder, _BYTES, b, (here, b_stride), (b_stride, i), 2 * LANES * j) for i in (0, 1))
            right += [builder.sext(emit.shuffle(builder, one, two, lanes), _PAIRS) for lanes in _HALVES]
        yield 0, splats(builder, _WORDS, rows, a, a_stride, step), right

    starts = cells(emit.const(_WORDS, 0), 1, rows, 2 * columns)
    for (_, i, j), total in tile(builder, n, starts, operands, partial(emit.multiply_add, builder, False)).items():
        factor, place = emit.load_splat(builder, _FLOATS, factors, 4 * i), (c, (c_stride, i), 4 * LANES * j)
        numbers = builder.sitofp(total, _FLOATS)
        emit.store(
            builder, emit.multiply_add(builder, False, numbers, factor, emit.load(builder, _FLOATS, *place)), *place
        )


def _emit_word(builder: Any, address: Any) -> Any:
    """Emit a load of a float32 that is not vectorised: vectors of strided numbers cost more than the loads."""
    return builder.bitcast(builder.load_atomic(emit.pointer_at(builder, I32, address), "monotonic", 4), F32)


_word_at = intrinsic_of("word", types.float32(types.intp), _emit_word)
_dots_with = dots("int8", {rows: LANES // rows for rows in (4, 3, 2, 1)}, 1, LANES)
_add_columns = by_shape("weighted integers", tuple(product((4, 3, 2, 1), (2, 1))), 10, _emit_weighted)


@inner
def scale_at(row_at, dim):
    """Read the scale of a row of `dim` numbers."""
    return _word_at(row_at + (dim + 3) // 4 * 4)


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
            for column in range(0, dim, 64):
                prefetch_far(v_at + (key + i) * v_row + column)
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
def add_values(rows, weights_at, w_row, v_at, v_row, n, sums_at, sums_row, factors_at, dim, k_at, k_row):
    """Add n weighted values to sums, and fetch as many next keys."""
    column, even = 0, n // 2 * 2
    while column < dim:
        columns = _VECTORS if dim - column >= 2 * LANES * _VECTORS else 1
        values_at, next_at, to = v_at + column, k_at + column, sums_at + 4 * column
        _add_columns(
            rows, columns, weights_at, w_row, values_at, v_row, to, sums_row, even // 2, factors_at, next_at, k_row
        )
        if n % 2:  # the last value makes a pair with itself, whose weight is 0
            last_at, value_at = weights_at + 2 * even, values_at + even * v_row
            _add_columns(rows, columns, last_at, w_row, value_at, 0, to, sums_row, 1, factors_at, next_at, 0)
        column += columns * 2 * LANES
