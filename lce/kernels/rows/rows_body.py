"""Attention of query rows to blocks of keys that fit in the processor's caches (FlashAttention, Dao et al., 2022).

A row is one query of one head. `KEYS` keys at a time are packed: then a vector holds the same word of 16 keys, and
scores are products of whole vectors. A word has four bytes: a float32 number or, with AVX512_BF16, a pair of bfloat16
numbers. Scores, softmax and sums are float32. For up to `FEW_ROWS` rows, keys are not packed but read in place.
`k_row`, `v_row` and `q_row` are the bytes from one key, value or query to the next.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import carray, float32, int64, uint32

from lce.kernels.runtime import numbers, tiles, vectors
from lce.kernels.runtime.compiling import ByDtype, arguments, by_dtype, inner, kernel, number_of, separate
from lce.kernels.runtime.numbers import bits_of_float, float_of_bits, following, itemsize, pointer, read, stored, write
from lce.kernels.runtime.shared import KEYS
from lce.kernels.runtime.vectors import largest, prefetch_far

FEW_ROWS = 8  # the largest number of query rows for which keys are not packed
LOWEST = np.float32(-3.0e38)  # stands for the largest score of a row that has seen no key; -inf would give NaN
NEAR = np.float32(8)  # weights are 2^NEAR at most
PANEL = 64 if vectors.WIDE else 16  # columns of a panel of packed keys or values: a product's columns at once


@cache
def panel_product(kind: str, heights: tuple[int, ...]) -> Callable[..., Any]:
    """Return a compiled function, which kernels call to compute columns of `C += A [rows, n] · B`.

    The columns are `first..stop-1`, both multiples of 16. `rows` is one of `heights`. `a`, `b` and `c` are the
    addresses of the matrices, each followed by the bytes between its rows. B consists of panels of `PANEL` columns,
    `b_panel` bytes from one to the next. `tiles.multiply` explains `kind`.
    """
    widths = (4, 2, 1) if vectors.WIDE else (1,)
    multiply = tiles.multiply(kind, tuple((rows, width) for rows in heights for width in widths))
    itemsize = vectors.WORD_BYTES[kind]

    @separate
    def product(rows, a, a_stride, b, b_stride, b_panel, c, c_stride, n, first, stop):
        column = first
        while column < stop:
            behind = column % PANEL
            left = min(stop - column, PANEL - behind)
            vectors = 4 if left >= 64 else 2 if left >= 32 and PANEL > 16 else 1
            b_at = b + column // PANEL * b_panel + behind * itemsize
            multiply(rows, vectors, a, a_stride, b_at, b_stride, c + 4 * column, c_stride, n)
            column += 16 * vectors

    return product


@cache
def rows_product(kind: str) -> Callable[..., Any]:
    """Return a compiled function that does what `panel_product` does from column 0 on, for any number of rows."""
    product = panel_product(kind, (6, 2, 1))

    @inner
    def all_rows(n_rows, a, a_stride, b, b_stride, b_panel, c, c_stride, n, stop):
        for column in range(0, stop, PANEL):  # a panel stays in the L1 cache
            last, i = min(column + PANEL, stop), 0
            while i < n_rows:
                rows = 6 if n_rows - i >= 6 else 2 if n_rows - i >= 2 else 1
                at, to = a + i * a_stride, c + i * c_stride
                product(rows, at, a_stride, b, b_stride, b_panel, to, c_stride, n, column, last)
                i += rows

    return all_rows


# For each dtype: whether numbers are multiplied in pairs, how many numbers a word has, how many numbers of a query one
# step of `_dots` takes, and the compiled products and transposition.
_pairs = ByDtype(lambda dtype: vectors.PAIRS and dtype == "bfloat16")
packed_kind = ByDtype(lambda dtype: "pairs" if _pairs[dtype] else "float32")  # of words that are packed
per_word = ByDtype(lambda dtype: 2 if _pairs[dtype] else 1)
_together = ByDtype(lambda dtype: 32 if _pairs[dtype] else 16)  # packed values that are multiplied at once
_step = ByDtype(lambda dtype: 32 if _pairs[dtype] else 8)  # values that few rows read while as many keys are fetched
_lanes = 16 if vectors.WIDE else 8
_chunk = ByDtype(lambda dtype: _lanes * per_word[dtype])
_transpose = ByDtype(vectors.transpose)
_query = ByDtype(lambda dtype: stored[dtype if _pairs[dtype] else "float32"])
_write_query = ByDtype(lambda dtype: write[dtype if _pairs[dtype] else "float32"])
_product = ByDtype(lambda dtype: panel_product(packed_kind[dtype], (6,)))
_direct = ByDtype(lambda dtype: panel_product(dtype, (4, 3, 2, 1)))
_columns = {1: _lanes, 2: _lanes // 2, 3: _lanes // 4, 4: _lanes // 4}
_add_pairs = tiles.add_pairs((4, 8, 16))
_dots = ByDtype(lambda dtype: tiles.dots("pairs" if _pairs[dtype] else dtype, _columns, 1, _lanes))


@by_dtype(separate)
def pack_words(at, row, n, words, packed):
    """Pack n rows of words of a dtype, as float32: `packed[i, w, j]` has word w of row `panel·i + j`.

    `packed` is `[panels, words, panel]`; words that a row does not have stay as they are. Bytes moved: rows and panels.
    """
    panel, packed_at = packed.shape[2], packed.ctypes.data
    whole_rows, whole_words = n // 16 * 16, words // 16 * 16
    for first in range(0, whole_rows, 16):
        for word in range(0, whole_words, 16):
            target = packed_at + 4 * ((first // panel * packed.shape[1] + word) * panel + first % panel)
            _transpose(at + first * row + word * itemsize, row, target, 4 * panel)
    for i in range(n):
        first = whole_words if i < whole_rows else 0
        source = carray(pointer(at + i * row + first * itemsize, stored), (words - first,))
        for word in range(words - first):
            packed[i // panel, first + word, i % panel] = read(source[word])


pack_keys = ByDtype(lambda dtype: pack_words["float32" if _pairs[dtype] else dtype])  # pairs are words as they lie


@by_dtype(separate)
def _pack_values(v_at, row, n, dim, packed):
    """Pack values `[n, D]` at an address into panels, with zeros up to a multiple of `_together`.

    `packed` is `[panels, KEYS/per_word, PANEL]`. With `_pairs`, a word has the same dimension of two values: values i
    and i + 16 of each 32 values.
    """
    for key in range((n + _together - 1) // _together * _together):
        source = carray(pointer(v_at + key * row, stored), (dim,))
        other = carray(pointer(v_at + min(key + 16, n - 1) * row, stored), (dim,))
        above = uint32(0xFFFF_0000) if key + 16 < n else uint32(0)  # the bits of the other value, if there is one
        if _pairs and key & 16:
            continue
        for panel in range(len(packed)):
            first, target = panel * PANEL, packed[panel, key // 32 * 16 + key % 16 if _pairs else key]
            width = min(dim - first, PANEL)
            if key >= n:
                target[:] = np.float32(0)
            elif _pairs:
                for d in range(width):
                    bits = uint32(source[first + d]) | ((uint32(other[first + d]) << uint32(16)) & above)
                    target[d] = float_of_bits(bits)
            else:
                for d in range(width):
                    target[d] = read(source[first + d])


@by_dtype(inner)
def _soften(scores, first, stop, together, scale, state, sums, dim):
    """Turn a row's scores of keys `first..stop-1` into softmax weights `2^(scale · score - top)`, in place.

    `state` has the row's `top` and the sum of its weights. No `scale · score` so far exceeds `top` by more than `NEAR`:
    if one does, it becomes the top, and the sum of weights and `sums [D]`, the sum of weighted values so far, are
    scaled down. This is rare, so a processor goes on with the old top before it knows the largest score. Keys outside
    the range get the weight 0 if they are in the same block of `together` keys as a key of the range; `together` is a
    multiple of 16.
    """
    begin, end = first // together * together, (stop + together - 1) // together * together
    for unseen in (scores[begin:first], scores[stop:end]):
        for i in range(len(unseen)):
            unseen[i] = LOWEST
    peak = largest(scores[begin:].ctypes.data, end - begin) * scale
    if peak > state[0] + NEAR:
        shrink = numbers.exp2(state[0] - peak)
        state[0], state[1] = peak, state[1] * shrink
        for d in range(dim):
            sums[d] *= shrink
    top, total, seen = state[0], np.float32(0), scores[begin:end]
    for i in range(len(seen)):
        weight = numbers.exp2(seen[i] * scale - top)
        seen[i] = weight
        total += weight
    state[1] += total


@by_dtype(inner)
def weigh(scores, span, start, size, begin, end, together, scale, state, sums, dim):
    """Do what `_soften` does for the keys of a row's span among the `size` keys from key `start` on.

    Other keys from `begin` to `end` get the weight 0. Returns whether the span has such keys.
    """
    low, high = max(span[0] - start, 0), min(span[1] - start, size)
    seen = low < high
    if seen:
        _soften(scores, low, high, together, scale, state, sums, dim)
    else:
        low = high = end
    scores[begin : low // together * together] = np.float32(0)
    scores[high:end] = np.float32(0)
    return seen


@by_dtype(inner)
def _fetch(at, row, n, dim):
    """Ask for n rows `[D]` of an array, which are `row` bytes apart, before they are read."""
    for i in range(n):
        for byte in range(0, dim * itemsize, 64):
            prefetch_far(at + i * row + byte)


@by_dtype(separate)
def _score_keys(rows, q_at, q_row, k_at, k_row, n, out_at, v_at, v_row, dim):
    """Write the dot products of 1 to 4 queries with n keys, read in place, to rows of scores at `out_at`.

    Fetches the keys' values, which are read next.
    """
    n_chunks, at_once, key = dim // _chunk, _lanes // (4 if rows == 3 else rows), 0
    while key < n:
        key = min(key, n - at_once)  # the last step computes some scores again
        _fetch(v_at + key * v_row, v_row, at_once, dim)
        _dots(rows, q_at, q_row, k_at + key * k_row, k_row, out_at + 4 * key, 4 * KEYS, n_chunks)
        key += at_once


@by_dtype(inner)
def _put_pairs(lower, upper, packed):
    """Write a word for each number of two rows: of both numbers, rounded to bfloat16."""
    for e in range(len(lower)):
        low_bits = uint32(bits_of_float(lower[e]) + uint32(0x8000)) >> uint32(16)
        high_bits = uint32(bits_of_float(upper[e]) + uint32(0x8000)) & uint32(0xFFFF0000)
        packed[e] = float_of_bits(uint32(low_bits) | uint32(high_bits))


@by_dtype(separate)
def _add_values(n, scores, weights, v_at, v_row, n_values, spare_at, sums_at, sums_row, dim):
    """Add up to 32 values in pairs, with n rows of weights, to sums. `spare_at` is memory for 32 values."""
    half = 4 if n_values <= 8 else 8 if n_values <= 16 else 16
    if n_values < 2 * half:  # values beyond the last one are zeros
        for i in range(2 * half):
            value, copied = carray(pointer(v_at + i * v_row, stored), (dim,)), spare_at + i * dim * itemsize
            to = carray(pointer(copied, stored), (dim,))
            for d in range(dim):
                to[d] = value[d] if i < n_values else 0
        v_at, v_row = spare_at, dim * itemsize
    for row in range(n):
        _put_pairs(scores[row, :half], scores[row, half : 2 * half], weights[row, :half])
    at, row = weights.ctypes.data, weights.strides[0]
    for column in range(0, dim, 64):
        columns = 2 if dim - column >= 64 else 1
        source, to = v_at + column * itemsize, sums_at + 4 * column
        _add_pairs(half, n, columns, at, row, source, v_row, to, sums_row)


@by_dtype(inner)
def few_fit(dim, n, rows):
    """Return whether `_attend_few` takes n keys `[D]` for a number of rows: at once 16 for one row, 8 for two."""
    return dim % 16 == 0 and dim % _chunk == 0 and n >= (16 if rows % 4 == 1 else 8)


@by_dtype(inner)
def _attend_few(memory, n, k_at, k_row, v_at, v_row, first, stop, dim, scale):
    """Do what `attend_rows` does, for few rows: read keys and values in place, because packing would cost more."""
    queries, spans, state, sums, _, spare, scores, weights = memory
    q_row, sums_row, panel, start = 4 * queries.shape[1], 4 * sums.shape[1], PANEL * itemsize, first
    while start < stop:
        left = stop - start
        size = left if left <= KEYS else KEYS if left >= KEYS + 16 else KEYS - 16  # leaves 0 keys or at least 16
        wide, keys_at, values_at = (size + 15) // 16 * 16, k_at + start * k_row, v_at + start * v_row
        for row in range(0, n, 4):
            q_at, to = queries[row:].ctypes.data, scores[row:].ctypes.data
            _score_keys(min(4, n - row), q_at, q_row, keys_at, k_row, size, to, values_at, v_row, dim)
        for row in range(n):
            weigh(scores[row], spans[row], start, size, 0, wide, 16, scale, state[row], sums[row], dim)
        start += size
        for key in range(0, size, _step):
            here = min(_step, size - key)
            _fetch(k_at + (start + key) * k_row, k_row, min(here, stop - start - key), dim)
            for row in range(0, n, 4):
                at, to = values_at + key * v_row, sums[row].ctypes.data
                some, rows = scores[row:, key:], min(4, n - row)
                if _pairs:
                    _add_values(rows, some, weights, at, v_row, here, spare.ctypes.data, to, sums_row, dim)
                else:
                    _direct(rows, some.ctypes.data, 4 * KEYS, at, v_row, panel, to, sums_row, here, 0, dim)


@by_dtype(kernel)
def attend_rows(first, stop, _memory, args):
    """Add attention to keys `first..stop-1` to the results of a task's n rows; row i sees the keys of `spans[i]`.

    `args` is the address of integers. The first eleven: the address of the memory that `scratch` divides, and the
    number of rows it is divided for; D; n; the address of the keys and the bytes between keys; the address of the
    values and the bytes between values; the encoded scale from dot products to scores; whether few rows read keys in
    place; and the place of key 0 in a block of `KEYS` keys. Queries, spans and results are in the memory.

    Blocks of keys end at multiples of `KEYS` from that place on, so a row's bits do not depend on other rows.
    """
    memory_at, n_rows, dim, n, k_at, k_row, v_at, v_row, steepness, few, place = arguments(args, 11)
    memory, scale = scratch(memory_at, n_rows, dim), number_of(steepness)
    queries, spans, state, sums, keys, values, scores, weights = memory
    if few and n <= FEW_ROWS and few_fit(dim, stop - first, n):
        _attend_few(memory, n, k_at, k_row, v_at, v_row, first, stop, dim, scale)
        return
    for row in range(n, (n + 5) // 6 * 6):  # rows that are multiplied beside the others
        queries[row], sums[row] = np.float32(0), np.float32(0)
        spans[row, 0], spans[row, 1] = 0, 0
    words, sums_row, wide = dim // per_word, 4 * sums.shape[1], sums.shape[1]
    start = first
    while start < stop:
        size = min(KEYS - (place + start) % KEYS, stop - start)
        pack_keys(k_at + start * k_row, k_row, size, words, keys)
        for key in range(size, (size + 15) // 16 * 16):  # multiplied, too: what lay here may be slow denormal numbers
            keys[key // PANEL, :words, key % PANEL] = np.float32(0)
        _pack_values(v_at + start * v_row, v_row, size, dim, values)
        for row in range(0, n, 6):
            begin, last = size, int64(0)
            for i in range(row, row + 6):
                low, high = max(spans[i, 0] - start, 0), min(spans[i, 1] - start, size)
                if low < high:
                    begin, last = min(begin, low // _together * _together), max(last, high)
            if begin < last:
                end, last = (last + _together - 1) // _together * _together, (last + 15) // 16 * 16
                for i in range(6):
                    scores[i, begin:end] = np.float32(0)
                q_at, to = queries[row:].ctypes.data, scores.ctypes.data
                panel = keys.strides[0]
                _product(6, q_at, 4 * words, keys.ctypes.data, 4 * PANEL, panel, to, 4 * KEYS, words, begin, last)
                for i in range(6):
                    r = row + i
                    weigh(scores[i], spans[r], start, size, begin, end, _together, scale, state[r], sums[r], dim)
                if _pairs:
                    for i in range(6):
                        for j in range(begin, end, 32):
                            packed = weights[i, j // 2 : j // 2 + 16]
                            _put_pairs(scores[i, j : j + 16], scores[i, j + 16 : j + 32], packed)
                    left_at, left_row = weights[0, begin // 2 :].ctypes.data, weights.strides[0]
                else:
                    left_at, left_row = scores[0, begin:].ctypes.data, scores.strides[0]
                right_at, to, panel = values[0, begin // per_word].ctypes.data, sums[row].ctypes.data, values.strides[0]
                n_words = (end - begin) // per_word
                _product(6, left_at, left_row, right_at, 4 * PANEL, panel, to, sums_row, n_words, 0, wide)
        start += size


@by_dtype(inner)
def put_query(q_at, cos_at, sin_at, dim, turned, to):
    """Copy a query `[D]` to the address `to`, rotated by `cos sin [D/2]` if `turned`.

    The copy is bfloat16 with `_pairs`, else float32.
    """
    half = dim // 2
    left, right = carray(pointer(q_at, stored), (half,)), carray(pointer(q_at + half * itemsize, stored), (half,))
    cos, sin = carray(pointer(cos_at, stored), (half,)), carray(pointer(sin_at, stored), (half,))
    out_left, end = following(to, _query, (half,))
    out_right = carray(pointer(end, _query), (half,))
    # One output a loop: LLVM vectorises no loop with more than eight pairs of arrays that might overlap.
    for i in range(half):
        a = read(left[i])
        out_left[i] = _write_query(a * read(cos[i]) - read(right[i]) * read(sin[i]) if turned else a)
    for i in range(half):
        b = read(right[i])
        out_right[i] = _write_query(b * read(cos[i]) + read(left[i]) * read(sin[i]) if turned else b)


@by_dtype(inner)
def finish(state, sums, out, lse, at, dim):
    """Write a row's output `out[at]` and log-sum-exp `lse[at]`: 0 and -inf if the row saw no key."""
    seen = state[1] != 0  # true also if the sum is NaN
    share = np.float32(1) / state[1] if seen else np.float32(0)
    for d in range(dim):
        out[at, d] = write(sums[d] * share)
    lse[at] = (state[0] + numbers.log2(state[1])) * np.float32(math.log(2)) if seen else np.float32(-np.inf)


@by_dtype(inner)
def scratch(at, n_rows, dim):
    """Divide a thread's memory into queries, spans, states, sums, packed keys and values, scores and packed weights.

    The arrays are views of an address: if Numba allocated the arrays itself, Numba would count references at each use.
    """
    wide, words, n_rows = (dim + 15) // 16 * 16, dim // per_word, (n_rows + 5) // 6 * 6
    n_panels = (wide + PANEL - 1) // PANEL
    spans, at = following(at, int64, (n_rows, 2))
    keys, at = following(at, float32, (KEYS // PANEL, words, PANEL))
    values, at = following(at, float32, (n_panels, KEYS // per_word, PANEL))
    scores, at = following(at, float32, (8, KEYS))
    weights, at = following(at, float32, (6, KEYS // 2))
    sums, at = following(at, float32, (n_rows, wide))
    queries, at = following(at, float32, (n_rows, words))
    state, _ = following(at, float32, (n_rows, 2))
    return queries, spans, state, sums, keys, values, scores, weights
