"""Dot products of a few queries with many keys, which are read once, and reductions of the scores of many queries."""

from __future__ import annotations

import numpy as np
from numba import carray, float32

from lce.kernels.choose.choices_body import key_of_score, score_of_key
from lce.kernels.rows.rows_body import PANEL, packed_kind, panel_product, per_word, rows_product
from lce.kernels.runtime.compiling import ByDtype, by_dtype, inner, kernel, number_of
from lce.kernels.runtime.numbers import exp, itemsize, pointer, read, read_row, stored
from lce.kernels.runtime.shared import LANES, PACKED_ROWS, SCORED_COLUMNS, SCORED_KEYS, SCORED_TOKENS

_TALL = 6  # keys whose products with a panel of queries stay in registers
_all_rows = ByDtype(lambda dtype: rows_product(packed_kind[dtype]))
_product = ByDtype(lambda dtype: panel_product(packed_kind[dtype], (_TALL, 1)))


@by_dtype(inner)
def _dot(q, key):
    total = np.float32(0)
    for d in range(len(q)):
        total += q[d] * read(key[d])
    return total


@by_dtype(kernel)
def scores_of_few(
    begin, end, memory, q_at, keys_at, out_at, rep, n, n_keys, dim, q_head, q_row, group_stride, wide, bounds, together
):
    """Write dot products of n queries of `rep` heads with each key of their group, summed over `together` heads.

    With `bounds`, a key has two rows: the minimum of each channel, for its negative factors, and the maximum. `q_head`
    and `q_row` are the numbers between heads and queries, float32 if `wide`. The memory has space for all queries.
    """
    width = 2 * dim if bounds else dim
    q = carray(pointer(memory, float32), (rep, n, width))
    n_sums, n_pieces = rep // together, (n_keys + SCORED_KEYS - 1) // SCORED_KEYS
    for task in range(begin, end):
        group, first = task // n_pieces, task % n_pieces * SCORED_KEYS
        for head in range(rep):
            for t in range(n):
                row = q[head, t]
                read_row(q_at, (group * rep + head) * q_head + t * q_row, dim, wide, row)
                if bounds:
                    for d in range(dim):
                        row[dim + d] = row[d] if row[d] > 0 else np.float32(0)
                        row[d] = np.float32(0) if row[d] > 0 else row[d]
        keys = carray(pointer(keys_at + group * group_stride * itemsize, stored), (n_keys, width))
        out = carray(pointer(out_at + 4 * group * n_sums * n * n_keys, float32), (n_sums, n, n_keys))
        for i in range(first, min(n_keys, first + SCORED_KEYS)):
            for number in range(n_sums):
                for t in range(n):
                    total = np.float32(0)
                    for head in range(number * together, number * together + together):
                        total += _dot(q[head, t], keys[i])
                    out[number, t, i] = total


@by_dtype(inner)
def _readable(keys_at, row, n, dim, wide):
    """Return the address of n keys and the bytes between them; keys that are not multiplied as they lie are widened."""
    if dim // per_word != dim or itemsize == 4:
        return keys_at, row
    for i in range(n):
        read_row(keys_at + i * row, 0, dim, False, wide[i])
    return wide.ctypes.data, 4 * dim


@by_dtype(kernel)
def scores_of_many(begin, end, memory, packed_at, keys_at, out_at, n, n_keys, dim):
    """Write dot products `[n_keys, n]` of keys `[n_keys, dim]` with packed queries; n is a multiple of 16.

    The memory has space for `SCORED_TOKENS` keys in float32, which is what other half-precision keys are read as.
    """
    words = dim // per_word
    panel_bytes = 4 * words * PANEL
    wide = carray(pointer(memory, float32), (SCORED_TOKENS, dim))
    for task in range(begin, end):
        first, stop = task * SCORED_TOKENS, min(n_keys, task * SCORED_TOKENS + SCORED_TOKENS)
        at, row = keys_at + first * dim * itemsize, dim * itemsize
        rows_at, row = _readable(at, row, stop - first, dim, wide)
        out_here = out_at + 4 * first * n
        carray(pointer(out_here, float32), ((stop - first) * n,))[:] = np.float32(0)
        _all_rows(stop - first, rows_at, row, packed_at, 4 * PANEL, panel_bytes, out_here, 4 * n, words, n)


@by_dtype(kernel)
def tops_of(begin, end, _memory, scores_at, tops_at, n_tokens, n, row):
    """Write the largest score of each query in `SCORED_COLUMNS` rows of `scores [n_tokens, n]`: `tops [tasks, n]`."""
    scores = carray(pointer(scores_at, stored), (n_tokens, row))
    tops = carray(pointer(tops_at, float32), (end, n))
    for task in range(begin, end):
        first = task * SCORED_COLUMNS
        for t in range(n):
            tops[task, t] = read(scores[first, t])
        for i in range(first + 1, min(n_tokens, first + SCORED_COLUMNS)):
            for t in range(n):
                tops[task, t] = max(tops[task, t], read(scores[i, t]))


@by_dtype(kernel)
def best_of(begin, end, _memory, scores_at, best_at, n_tokens, n, row, top_at):
    """Write `best[i] = max_t (scores[i, t] - top[t])` for `scores [n_tokens, n]`; NaN counts as the largest."""
    scores = carray(pointer(scores_at, stored), (n_tokens, row))
    top, best = carray(pointer(top_at, float32), (n,)), carray(pointer(best_at, float32), (n_tokens,))
    for i in range(begin * SCORED_COLUMNS, min(n_tokens, end * SCORED_COLUMNS)):
        largest = np.int32(-0x8000_0000)
        for t in range(n):
            largest = max(largest, key_of_score(read(scores[i, t]) - top[t]))
        best[i] = score_of_key(largest)


@by_dtype(kernel)
def weight_sums(
    begin, end, memory, packed_at, keys_at, lse_at, into_at, rep, n, n_keys, dim, group, row, behind, window, scale
):
    """Write each key's attention weights `e^(scale · score - lse)`, summed over the n packed queries of each head.

    A task is `SCORED_TOKENS` keys of a head. Query t sees the keys `behind + t - window + 1 .. behind + t`. `group` and
    `row` are the bytes between KV heads and between keys. The memory has space for the keys in float32, and for `_TALL`
    rows of scores.
    """
    words, columns = dim // per_word, (n + LANES - 1) // LANES * LANES
    n_pieces, head_columns = (
        (n_keys + SCORED_TOKENS - 1) // SCORED_TOKENS,
        (n + PACKED_ROWS - 1) // PACKED_ROWS * PACKED_ROWS,
    )
    panel_bytes = 4 * words * PANEL
    wide = carray(pointer(memory, float32), (SCORED_TOKENS, dim))
    scores = carray(pointer(memory + 4 * SCORED_TOKENS * dim, float32), (_TALL, columns))
    lse, factor = carray(pointer(lse_at, float32), (end, n)), number_of(scale)
    for task in range(begin, end):
        head, first = task // n_pieces, task % n_pieces * SCORED_TOKENS
        stop = min(n_keys, first + SCORED_TOKENS)
        into = carray(pointer(into_at + 4 * head * n_keys, float32), (n_keys,))
        at, key_row = _readable(keys_at + head // rep * group + first * row, row, stop - first, dim, wide)
        queries_at, key = packed_at + 4 * head * head_columns * words, first
        while key < stop:
            rows = _TALL if stop - key >= _TALL else 1
            left = max(0, key - behind) // LANES * LANES
            right = min(columns, (min(n, key + rows - 1 - behind + window) + LANES - 1) // LANES * LANES)
            if left < right:
                for i in range(rows):
                    scores[i, left:right] = np.float32(0)
                here, to = at + (key - first) * key_row, scores.ctypes.data
                _product(rows, here, key_row, queries_at, 4 * PANEL, panel_bytes, to, 4 * columns, words, left, right)
            for i in range(rows):
                begin_t, end_t = max(0, key + i - behind), min(n, key + i - behind + window)
                total, some, shift = np.float32(0), scores[i, begin_t:], lse[head, begin_t:]
                for t in range(end_t - begin_t):
                    total += exp(some[t] * factor - shift[t])
                into[key + i] = total
            key += rows


@by_dtype(kernel)
def add_weights(
    begin_task, end_task, memory, logits_at, lse_at, into_at, n_heads, n, n_keys, stride, first_behind, window, scale
):
    """Add weights for n queries: `into[h, j] += Σ_t e^(scale · logits[h, t, j] - lse[h, t])`; `logits [H, n, N]`.

    A task is `SCORED_KEYS` keys of a head. Query t sees the keys `first_behind + t - window + 1 .. first_behind + t`.
    """
    lse = carray(pointer(lse_at, float32), (n_heads, n))
    into = carray(pointer(into_at, float32), (n_heads, stride))
    factor = number_of(scale)
    n_pieces, total = (n_keys + SCORED_KEYS - 1) // SCORED_KEYS, carray(pointer(memory, float32), (SCORED_KEYS,))
    for task in range(begin_task, end_task):
        head, begin = task // n_pieces, task % n_pieces * SCORED_KEYS
        stop = min(n_keys, begin + SCORED_KEYS)
        total[:] = 0
        for t in range(max(0, begin - first_behind), n):
            own = first_behind + t
            if own - window + 1 >= stop:
                break
            shift = lse[head, t]
            first = max(begin, own - window + 1)
            some = carray(pointer(logits_at + ((head * n + t) * n_keys + first) * itemsize, stored), (SCORED_KEYS,))
            weights = total[first - begin :]
            for j in range(min(stop, own + 1) - first):
                weights[j] += exp(read(some[j]) * factor - shift)
        for j in range(begin, stop):
            into[head, j] += total[j - begin]
