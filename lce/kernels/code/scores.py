"""Dot products of a few queries with many keys, which are read once, and reductions of the scores of many queries."""

from __future__ import annotations

import numpy as np
from numba import carray, float32

from lce.kernels.code.choices import key_of_score, score_of_key
from lce.kernels.code.compiling import by_dtype, inner, kernel, number_of
from lce.kernels.code.numbers import exp, itemsize, pointer, read, stored
from lce.kernels.code.shared import SCORED_COLUMNS, SCORED_KEYS


@by_dtype(inner)
def _dot(q, key):
    total = np.float32(0)
    for d in range(len(q)):
        total += q[d] * read(key[d])
    return total


@by_dtype(kernel)
def scores_of_few(begin, end, _memory, q_at, keys_at, out_at, n_groups, n, n_keys, dim, group_stride):
    q = carray(pointer(q_at, float32), (n_groups, n, dim))
    out = carray(pointer(out_at, float32), (n_groups, n, n_keys))
    n_pieces = (n_keys + SCORED_KEYS - 1) // SCORED_KEYS
    for task in range(begin, end):
        group, first = task // n_pieces, task % n_pieces * SCORED_KEYS
        keys = carray(pointer(keys_at + group * group_stride * itemsize, stored), (n_keys, dim))
        for i in range(first, min(n_keys, first + SCORED_KEYS)):
            for t in range(n):
                out[group, t, i] = _dot(q[group, t], keys[i])


@by_dtype(kernel)
def tops_of(begin, end, _memory, scores_at, tops_at, n_tokens, n):
    scores = carray(pointer(scores_at, stored), (n_tokens, n))
    tops = carray(pointer(tops_at, float32), (end, n))
    for task in range(begin, end):
        first = task * SCORED_COLUMNS
        for t in range(n):
            tops[task, t] = read(scores[first, t])
        for i in range(first + 1, min(n_tokens, first + SCORED_COLUMNS)):
            for t in range(n):
                tops[task, t] = max(tops[task, t], read(scores[i, t]))


@by_dtype(kernel)
def best_of(begin, end, _memory, scores_at, best_at, n_tokens, n, top_at):
    scores = carray(pointer(scores_at, stored), (n_tokens, n))
    top, best = carray(pointer(top_at, float32), (n,)), carray(pointer(best_at, float32), (n_tokens,))
    for i in range(begin * SCORED_COLUMNS, min(n_tokens, end * SCORED_COLUMNS)):
        largest = np.int32(-0x8000_0000)
        for t in range(n):
            largest = max(largest, key_of_score(read(scores[i, t]) - top[t]))
        best[i] = score_of_key(largest)


@by_dtype(kernel)
def add_weights(
    begin_task, end_task, memory, logits_at, lse_at, into_at, n_heads, n, n_keys, stride, first_behind, window, scale
):
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
