"""Choices by score: the n best chunks for each query, and the n best tokens for a block of queries.

Scores are compared by sort keys, which the code calls keys: 32-bit integers in the order of the scores, with NaN as the
largest. Of equal scores, the last are taken, so a choice depends on the scores alone.
"""

from __future__ import annotations

import numpy as np
from numba import carray, float32, int32, int64, uint8

from lce.kernels.runtime.compiling import by_dtype, inner, kernel
from lce.kernels.runtime.numbers import bits_of_float, float_of_bits, itemsize, pointer, read, stored
from lce.kernels.runtime.shared import SORTED_GROUP, SORTED_SCORES


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
    """Write the n best-scoring chunks of each query, in ascending order, then -1: `chosen [rows, n]`.

    Of scores `[rows, n_chunks]`, query t sees the first `(start + t) // size`; those in `forced [T, n_chunks]` come
    first. Time: O(chunks) for each of at most 32 steps of a binary search.
    """
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


@kernel
def spread_keys(begin, end, _memory, scores_at, keys_at, n, eps):
    """Write sort keys `[n]` of `max(scores[i - eps .. i + eps])`, then the largest of each group of `SORTED_GROUP`.

    A task is `SORTED_SCORES` scores. Time: O(n · eps).
    """
    for task in range(begin, end):
        first = task * SORTED_SCORES
        stop = min(n, first + SORTED_SCORES)
        own = carray(pointer(scores_at + 4 * first, float32), (SORTED_SCORES,))
        keys = carray(pointer(keys_at + 4 * first, int32), (SORTED_SCORES,))
        for i in range(stop - first):
            keys[i] = key_of_score(own[i])
        for away in range(1, eps + 1):
            before = max(0, away - first)  # tokens of this piece that have no token `away` places before them
            if before < stop - first:
                left = carray(pointer(scores_at + 4 * (first + before - away), float32), (SORTED_SCORES,))
                some = carray(pointer(keys_at + 4 * (first + before), int32), (SORTED_SCORES,))
                for i in range(stop - first - before):
                    some[i] = max(some[i], key_of_score(left[i]))
            right = carray(pointer(scores_at + 4 * (first + away), float32), (SORTED_SCORES,))
            for i in range(min(stop, n - away) - first):
                keys[i] = max(keys[i], key_of_score(right[i]))
        tops = carray(pointer(keys_at + 4 * (n + first // SORTED_GROUP), int32), (SORTED_SCORES // SORTED_GROUP,))
        for number in range((stop - first + SORTED_GROUP - 1) // SORTED_GROUP):
            some = carray(pointer(keys_at + 4 * (first + number * SORTED_GROUP), int32), (SORTED_GROUP,))
            best = some[0]
            for i in range(min(SORTED_GROUP, stop - first - number * SORTED_GROUP)):
                best = max(best, some[i])
            tops[number] = best


@inner
def _nth_largest(keys, n, memory):
    """Return the n-th largest of int32 sort keys, found digit by digit (11, 11 and 10 bits). Time: O(keys)."""
    counts = carray(pointer(memory, int64), (2048,))
    found, mask, shift = np.uint32(0), np.uint32(0), 32
    for width in (11, 11, 10):
        shift -= width
        counts[:] = 0
        for i in range(len(keys)):
            bits = np.uint32(keys[i]) ^ np.uint32(0x8000_0000)
            if (bits & mask) == found:
                counts[(bits >> np.uint32(shift)) & np.uint32((1 << width) - 1)] += 1
        digit = (1 << width) - 1
        while counts[digit] < n:
            n -= counts[digit]
            digit -= 1
        found |= np.uint32(digit) << np.uint32(shift)
        mask |= np.uint32((1 << width) - 1) << np.uint32(shift)
    return np.int32(found ^ np.uint32(0x8000_0000))


@kernel
def best_keys(_first, _stop, memory, keys_at, chosen_at, n_keys, n):
    """Write the indices of the n largest sort keys in ascending order.

    `least` is the n-th largest of the groups' largest sort keys. So n groups have a sort key ≥ `least`, the n largest
    sort keys are ≥ `least` too, and groups whose sort keys are all below `least` are skipped.
    """
    n_groups = (n_keys + SORTED_GROUP - 1) // SORTED_GROUP
    keys = carray(pointer(keys_at, int32), (n_keys + n_groups,))
    chosen = carray(pointer(chosen_at, int64), (n,))
    least = _nth_largest(keys[n_keys:], n, memory) if n <= n_groups else np.int32(-0x8000_0000)
    some, found = carray(pointer(memory + 16384, int32), (n_keys,)), 0
    index = carray(pointer(memory + 16384 + 4 * n_keys, int32), (n_keys,))
    for number in range(n_groups):
        if keys[n_keys + number] >= least:
            for i in range(number * SORTED_GROUP, min(n_keys, number * SORTED_GROUP + SORTED_GROUP)):
                some[found] = keys[i]
                index[found] = i
                found += np.int64(keys[i] >= least)
    worst = _nth_largest(some[:found], n, memory)
    skipped = -n
    for i in range(found):
        skipped += np.int64(some[i] >= worst)
    taken = 0
    for i in range(found):
        skipped -= np.int64(some[i] == worst)
        if some[i] > worst or (some[i] == worst and skipped < 0):
            chosen[taken] = index[i]
            taken += 1
