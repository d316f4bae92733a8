"""Choices by score.

Scores are compared by sort keys, which the code calls keys: 32-bit integers in the order of the scores, with NaN as the
largest.
"""

import numpy as np
from numba import carray, int32, int64, uint8

from lce.kernels.runtime.compiling import by_dtype, inner, kernel
from lce.kernels.runtime.numbers import bits_of_float, float_of_bits, itemsize, pointer, read, stored


@inner
def key_of_score(score):
    """Return the sort key of a score, an int32: a larger score has a larger sort key, and NaN has the largest."""
    bits = bits_of_float(score)
    signed = np.int32(bits)
    ordered = np.int32(signed ^ np.int32(np.int32(signed >> np.int32(31)) & np.int32(0x7FFF_FFFF)))
    is_nan = np.uint32(bits & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
    return np.int32(0x7FFF_FFFE) if is_nan else ordered


@inner
def score_of_key(key):
    """Return the score whose sort key is `key`."""
    return float_of_bits(np.uint32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))))


_LEAST = np.int32(-0x7F80_0001)  # the sort key of -inf


@by_dtype(kernel)
def best_chunks(first, stop, memory, scores_at, forced_at, chosen_at, n_queries, n_chunks, n, start, size):
    """Write the n best-scoring chunks of each row, as `choices.best_chunks` says, by a binary search of 32 steps."""
    chosen, keys = carray(pointer(chosen_at, int64), (stop, n)), carray(pointer(memory, int32), (n_chunks,))
    for row in range(first, stop):
        query = row % n_queries
        seen = min(n_chunks, (start + query) // size)
        scores = carray(pointer(scores_at + row * n_chunks * itemsize, stored), (n_chunks,))
        forced = carray(pointer(forced_at + query * n_chunks, uint8), (n_chunks,))
        for i in range(seen):
            keys[i] = key_of_score(read(scores[i]))
        for i in range(seen):  # a forced chunk gets the sort key 2^31 - 1, larger than that of any score
            keys[i] = max(keys[i], np.int32(np.int32(-np.int32(forced[i])) ^ np.int32(-0x8000_0000)))
        # Binary search for the n-th largest sort key: at least n sort keys are ≥ `low`, and fewer than n are ≥ `high`.
        low, high = np.int64(_LEAST), np.int64(0x8000_0000)
        n_low = np.int64(seen)
        while n_low > n and high - low > 1:
            middle = np.int32((low + high) >> 1)
            count = np.int32(0)
            for i in range(seen):
                count = np.int32(count + np.int32(keys[i] >= middle))
            if count >= n:
                low, n_low = np.int64(middle), np.int64(count)
            else:
                high = np.int64(middle)
        worst, skipped, taken = np.int32(low), n_low - n, 0  # the first of the sort keys equal to `worst` are skipped
        for i in range(seen):
            skipped -= np.int64(keys[i] == worst)
            if keys[i] > _LEAST and (keys[i] > worst or (keys[i] == worst and skipped < 0)):
                chosen[row, taken] = i
                taken += 1
        for i in range(taken, n):
            chosen[row, i] = -1
