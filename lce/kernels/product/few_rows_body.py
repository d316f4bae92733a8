"""Products of a few rows with the bits of `panels`: each number is one sum over the inputs in order, from 0 on.

Lanes of vectors are rows of the weight matrix, not of x. The words of `ROWS` weight rows, some inputs at a time, are
put side by side in a core's L1 cache, as `[words, ROWS]`. A word is a float32 number or, with AVX512_BF16 and x in
bfloat16, two bfloat16 numbers. The results `[n, rows]` are float32 sums, which `panels.product` finishes.
"""

from __future__ import annotations

import numpy as np
from numba import carray, float32

from lce.kernels.rows.rows_body import pack_words
from lce.kernels.runtime import tiles, vectors
from lce.kernels.runtime.compiling import ByDtype, by_dtype, inner, kernel
from lce.kernels.runtime.numbers import itemsize, pointer
from lce.kernels.runtime.shared import FEW_INPUTS, FEW_ROWS, ITEMSIZE, LANES, MOST_ROWS

# The kinds of `plain`: the dtype of weights, and that of x.
PLAIN_KINDS = (*((dtype, "float32") for dtype in ITEMSIZE), ("bfloat16", "bfloat16"))

_TOGETHER = MOST_ROWS if vectors.WIDE else 2  # rows of x that are multiplied at a time: their sums stay in registers
_shapes = tuple((rows, FEW_ROWS // LANES) for rows in range(1, _TOGETHER + 1))
_BYTES = 4 * FEW_ROWS  # of a word of all weight rows

# Values and functions for each kind: the matrix's dtype or layout, and the dtype of x.
in_pairs = ByDtype(lambda kind: vectors.PAIRS and kind[1] == "bfloat16")
_multiply = ByDtype(lambda kind: tiles.multiply("pairs" if in_pairs[kind] else "float32", _shapes))
_word = ByDtype(lambda kind: "float32" if in_pairs[kind] else kind[0])
_pack_words = ByDtype(lambda kind: pack_words[_word[kind]])
_word_bytes = ByDtype(lambda kind: itemsize[_word[kind]])


@by_dtype(kernel)
def plain(begin, end, memory, x_at, weight_at, sums_at, n, n_rows, size):
    """Multiply `x [n, size]` with `weight [n_rows, size]`. A task is `FEW_ROWS` weight rows.

    Each row of sums has a place for each row of all tasks. The memory has space for `FEW_INPUTS` words of a task.
    """
    n_words, sums_row = size // 2 if in_pairs else size, (n_rows + FEW_ROWS - 1) // FEW_ROWS * FEW_ROWS
    weight_row = n_words * _word_bytes
    words = carray(pointer(memory, float32), (1, FEW_INPUTS, FEW_ROWS))
    sums = carray(pointer(sums_at, float32), (n, sums_row))
    for task in range(begin, end):
        row = task * FEW_ROWS
        sums[:, row : row + FEW_ROWS] = np.float32(0)
        for first in range(0, n_words, FEW_INPUTS):
            n_here = min(FEW_INPUTS, n_words - first)
            at = weight_at + row * weight_row + first * _word_bytes
            _pack_words(at, weight_row, min(FEW_ROWS, n_rows - row), n_here, words)
            add_words(x_at + 4 * first, 4 * n_words, memory, sums_at + 4 * row, 4 * sums_row, n, n_here)


@by_dtype(inner)
def add_words(x_at, x_row, words_at, sums_at, sums_row, n, n_words):
    """Add the products of some words of x's n rows and of a task's weight rows, `[words, FEW_ROWS]`, to its sums."""
    for i in range(0, n, _TOGETHER):
        rows, at, to = min(_TOGETHER, n - i), x_at + i * x_row, sums_at + i * sums_row
        _multiply(rows, FEW_ROWS // LANES, at, x_row, words_at, _BYTES, to, sums_row, n_words)
