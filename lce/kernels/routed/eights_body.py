"""Tiles of eight keys that all heads of a KV head chose: a query attends one after another, and packs none.

Softmax and sums are those of `rows_body.weigh`, tile by tile, so a query's bits do not depend on rounds of tiles. With
so few keys a tile's own cost counts: sizes are constants, and the scores of all heads are one row of numbers.
"""

import numpy as np

from lce.kernels.rows.rows_body import NEAR, _add_pairs, _chunk, _dots, _put_pairs, put_query
from lce.kernels.runtime.compiling import by_dtype, inner
from lce.kernels.runtime.numbers import exp2, itemsize
from lce.kernels.runtime.vectors import prefetch

EIGHT = 8  # keys of a tile


@by_dtype(inner)
def _score(rows, queries, k_at, k_row, dim, scores):
    """Write the dot products of queries with a tile's keys to `scores [rows · 8]`."""
    q_row, n_chunks = 4 * queries.shape[1], dim // _chunk
    for row in range(0, rows, 4):
        some = min(4, rows - row)
        at, to = queries[row:].ctypes.data, scores[EIGHT * row :].ctypes.data
        at_once = 8 if some == 2 else 4
        for key in range(0, EIGHT, at_once):
            _dots(some, at, q_row, k_at + key * k_row, k_row, to + 4 * key, 4 * EIGHT, n_chunks)


@by_dtype(inner)
def _weigh(rows, scores, tops, scale, state, sums, dim):
    """Turn scores into weights in place, as `rows_body.weigh` does. `tops [rows · 8]` has a row's top eight times."""
    exceeds = np.int64(0)
    for i in range(EIGHT * rows):
        exceeds |= np.int64(scores[i] * scale > tops[i] + NEAR)
    if exceeds:
        for row in range(rows):
            peak = state[row, 0]
            for i in range(EIGHT * row, EIGHT * row + EIGHT):
                peak = max(peak, scores[i] * scale)
            if peak > state[row, 0] + NEAR:
                shrink = exp2(state[row, 0] - peak)
                state[row, 0], state[row, 1] = peak, state[row, 1] * shrink
                for d in range(dim):
                    sums[row, d] *= shrink
                for i in range(EIGHT * row, EIGHT * row + EIGHT):
                    tops[i] = peak
    for i in range(EIGHT * rows):
        scores[i] = exp2(scores[i] * scale - tops[i])
    for row in range(rows):
        total = np.float32(0)
        for i in range(EIGHT):
            total += scores[EIGHT * row + i]
        state[row, 1] += total


@by_dtype(inner)
def attend_eights(own, turns, tiles, vectors, stored_at, rows_of, memory, scale):
    """Attend one query's tiles `own` with the rows of all heads, which chose alike; slots and turns as in `routed`."""
    (q_at, q_head, cos_at, sin_at), (k_at, k_tile, v_at, v_tile) = vectors, stored_at
    (rows, dim, k_row, v_row), (queries, _, state, sums, _, _, numbers, weights) = rows_of, memory
    scores, tops, turned = numbers[0], numbers[1], np.int64(-1)
    for row in range(rows):
        for i in range(EIGHT):
            tops[EIGHT * row + i] = state[row, 0]
    for slot in range(len(own)):
        which = tiles[own[slot]] if own[slot] >= 0 else np.int64(-1)
        if slot + 1 < len(own) and own[slot + 1] >= 0:
            tile = max(tiles[own[slot + 1]], 0)
            for i in range(EIGHT):
                for line in range(0, dim * itemsize, 64):
                    prefetch(k_at + tile * k_tile + i * k_row + line)
                    prefetch(v_at + tile * v_tile + i * v_row + line)
        if which < 0:
            continue
        turn = turns[slot % len(turns)] * (dim // 2) * itemsize
        if turn != turned:
            for row in range(rows):
                put_query(q_at + row * q_head, cos_at + turn, sin_at + turn, dim, True, queries[row].ctypes.data)
            turned = turn
        _score(rows, queries, k_at + which * k_tile, k_row, dim, scores)
        _weigh(rows, scores, tops, scale, state, sums, dim)
        for row in range(0, rows, 4):
            for i in range(min(4, rows - row)):
                at = EIGHT * (row + i)
                _put_pairs(scores[at : at + 4], scores[at + 4 : at + 8], weights[i, :4])
            for column in range(0, dim, 64):
                columns = 2 if dim - column >= 64 else 1
                source, to = v_at + which * v_tile + column * itemsize, sums[row].ctypes.data + 4 * column
                at, some = weights.ctypes.data, min(4, rows - row)
                _add_pairs(4, some, columns, at, weights.strides[0], source, v_row, to, 4 * sums.shape[1])
