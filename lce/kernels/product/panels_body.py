"""Products of many rows: x is packed to panels, and the rows of the weight matrix are read where they lie.

A panel has `PANEL` rows of x side by side: for each word, that word of all rows. A word has the bytes of a float32: one
number in float32, or with AVX512_BF16 two bfloat16 numbers. Weights of another dtype are widened to float32, some rows
and inputs at a time, in a core's L1 cache. Six rows of the matrix are multiplied with a panel in registers.
"""

from __future__ import annotations

import numpy as np
from numba import carray, float32

from lce.kernels.product.products_body import finish_row
from lce.kernels.rows.rows_body import PANEL, _pairs, pack_keys, packed_kind, rows_product
from lce.kernels.runtime import vectors
from lce.kernels.runtime.compiling import ByDtype, by_dtype, kernel
from lce.kernels.runtime.numbers import following, pointer, read_row
from lce.kernels.runtime.shared import LANES, PACKED_ROWS, PANEL_COLUMNS, PANEL_INPUTS, PANEL_ROWS

# The kinds of `product`: the dtype of weights, and that of a bias and a narrow result. Unpacked weights are float32.
PRODUCT_KINDS = (
    *(("float32", dtype) for dtype in ("float32", "bfloat16", "float16")),
    *((dtype, dtype) for dtype in ("bfloat16", "float16")),
)

_in_pairs = ByDtype(lambda kind: _pairs[kind[0]])
_widens = ByDtype(lambda kind: kind[0] != "float32" and not _pairs[kind[0]])
_product = ByDtype(lambda kind: rows_product(packed_kind[kind[0]]))
_read_weight, _read_bias = ByDtype(lambda kind: read_row[kind[0]]), ByDtype(lambda kind: read_row[kind[1]])
_finish_row = ByDtype(lambda kind: finish_row[kind[1]])
_transpose = vectors.transpose("float32")


@by_dtype(kernel)
def pack(begin, end, _memory, x_at, packed_at, n, size, matrix, row):
    """Pack matrices `x [n, size]` to panels `[-, words, PANEL]`, with zeros up to a multiple of `PACKED_ROWS` rows.

    A task is `PACKED_ROWS` rows. `matrix` and `row` are the bytes between matrices and between rows.
    """
    words, n_blocks = size // 2 if _pairs else size, (n + PACKED_ROWS - 1) // PACKED_ROWS
    for task in range(begin, end):
        first, number = task % n_blocks * PACKED_ROWS, task // n_blocks
        packed = carray(
            pointer(packed_at + 4 * task * PACKED_ROWS * words, float32), (PACKED_ROWS // PANEL, words, PANEL)
        )
        if n - first < PACKED_ROWS:
            packed[:] = np.float32(0)
        pack_keys(x_at + number * matrix + first * row, row, min(PACKED_ROWS, n - first), words, packed)


@by_dtype(kernel)
def product(
    begin, end, memory, packed_at, weight_at, half, bias_at, out_at, n, n_out, first, n_rows, size, gate, adds, wide
):
    """Multiply packed x `[n, size]` with `n_rows` weight rows; write columns `first..` of the result `[n, n_out]`.

    With `gate`, as many rows of the second half of the matrix begin `half` bytes behind those of the first half. A task
    is `PANEL_ROWS` weight rows times `PANEL_COLUMNS` rows of x. The memory has space for sums, for a part of them that
    is transposed, for a bias, and for widened weights. If `packed_at` is 0, the matrix has the products of n ≤ 16 rows
    already, as sums `[n, size]`.
    """
    words = size // 2 if _in_pairs else size
    panel_bytes, n_parts = 4 * words * PANEL, 2 if gate else 1
    n_blocks, n_slices = (n + PANEL_COLUMNS - 1) // PANEL_COLUMNS, (words + PANEL_INPUTS - 1) // PANEL_INPUTS
    per_slice = (words + n_slices - 1) // n_slices
    sums, memory = following(memory, float32, (2, PANEL_ROWS, PANEL_COLUMNS))
    turned, memory = following(memory, float32, (2, LANES, PANEL_ROWS))
    bias, memory = following(memory, float32, (2, PANEL_ROWS))
    widened, _ = following(memory, float32, (PANEL_ROWS, PANEL_INPUTS))
    for task in range(begin, end):
        row, column = task // n_blocks * PANEL_ROWS, task % n_blocks * PANEL_COLUMNS
        n_here, n_columns = min(PANEL_ROWS, n_rows - row), min(PANEL_COLUMNS, n - column)
        for part in range(n_parts):
            bias[part] = np.float32(0)
            if bias_at:
                _read_bias(bias_at, part * n_out + first + row, n_here, False, bias[part])
            sums[part, :n_here] = np.float32(0)
            for number in range(n_slices if packed_at else 0):  # a range with a variable step could raise
                word, weights_at = number * per_slice, weight_at + part * half
                n_words = min(per_slice, words - word)
                if _widens:
                    for i in range(n_here):
                        _read_weight(weights_at, (row + i) * size + word, n_words, False, widened[i])
                    weights_at, weight_row = widened.ctypes.data, 4 * PANEL_INPUTS
                else:
                    weight_row = 4 * words
                    weights_at += row * weight_row + 4 * word
                x_at = packed_at + column // PANEL * panel_bytes + 4 * PANEL * word
                to, last = sums[part].ctypes.data, (n_columns + LANES - 1) // LANES * LANES
                _product(
                    n_here, weights_at, weight_row, x_at, 4 * PANEL, panel_bytes, to, 4 * PANEL_COLUMNS, n_words, last
                )
        for start in range(0, n_columns, LANES):
            for part in range(n_parts):
                for i in range(0 if packed_at else n):
                    given = carray(pointer(weight_at + part * half + 4 * (i * size + row), float32), (n_here,))
                    for lane in range(n_here):
                        turned[part, i, lane] = given[lane]
                for lane in range(0, PANEL_ROWS if packed_at else 0, LANES):
                    source, to = sums[part, lane, start:].ctypes.data, turned[part, 0, lane:].ctypes.data
                    _transpose(source, 4 * PANEL_COLUMNS, to, 4 * PANEL_ROWS)
            for i in range(min(LANES, n_columns - start)):
                for part in range(n_parts):
                    for lane in range(PANEL_ROWS):
                        turned[part, i, lane] += bias[part, lane]
                place = (column + start + i) * n_out + first + row
                _finish_row(out_at, place, n_here, gate, adds, wide, turned[0, i], turned[1, i])
