"""Choices by score: the n best chunks for each query, and the n best tokens for a block of queries.

Scores are compared by sort keys, which the code calls keys: 32-bit integers in the order of the scores, with NaN as the
largest. Of equal scores, the first are taken, so a choice depends on the scores alone.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, float32, int32, int64, uint8
from torch import Tensor

from lce.kernels.cpu.compiling import Kernel, by_dtype, inner
from lce.kernels.cpu.numbers import bits_of_float, float_of_bits, itemsize, pointer, read, stored

_ROWS = 8  # the smallest number of rows of scores that a thread of `best_chunks` takes
_PIECE = 4096  # scores that a thread of `best_tokens` takes at a time
_GROUP = 16  # sort keys in a group; the largest of each group is stored, so that groups of small keys can be skipped


def best_chunks(scores: Tensor, forced: Tensor, n: int, start: int, size: int) -> Tensor:
    """Choose the n best of M chunks for each of T queries and C choosers: ascending chunk ids `[C, T, min(n, M)]`.

    A chooser is a query head, or a group of heads that share a choice. If fewer chunks can be chosen, their ids are
    followed by -1. `scores [C, T, M]` is contiguous. Query t has the index `start + t` in the text and chooses among
    the chunks before its own chunk `(start + t) // size`. Chunks marked in `forced [T, M]` (bool) are taken first. A
    chunk with score -inf is taken only if it is forced. Time: O(C · T · M), about twenty passes over a row's sort keys
    in the L1 cache.
    """
    n_choosers, n_queries, n_chunks = scores.shape
    assert forced.dtype == torch.bool, forced.dtype
    assert forced.shape == scores.shape[1:], forced.shape
    assert all(x.is_contiguous() for x in (scores, forced)), (scores.stride(), forced.stride())
    n = min(n, n_chunks)
    chosen = torch.empty(n_choosers, n_queries, n, dtype=torch.int64)
    addresses = scores.data_ptr(), forced.data_ptr(), chosen.data_ptr()
    _best_chunks[scores.dtype](n_choosers * n_queries, *addresses, n_queries, n_chunks, n, start, size, least=_ROWS)
    return chosen


def best_tokens(scores: Tensor, n: int, eps: int = 0) -> Tensor:
    """Choose the n best of N ≥ n tokens by `scores [N]` (float32, contiguous): ascending indices `[n]`.

    Each score is first replaced by the largest score at most `eps` places away. Time: O(N · eps), divided among the
    threads, and O(N / 16 + n) on one thread.
    """
    n_tokens = len(scores)
    assert scores.dtype == torch.float32, scores.dtype
    assert scores.is_contiguous(), scores.stride()
    assert 0 < n <= n_tokens, (n, n_tokens)
    keys = torch.empty(n_tokens + -(-n_tokens // _GROUP), dtype=torch.int32)  # sort keys, then the largest per group
    chosen = torch.empty(n, dtype=torch.int64)
    _spread_keys(-(-n_tokens // _PIECE), scores.data_ptr(), keys.data_ptr(), n_tokens, eps)
    _best_keys(1, keys.data_ptr(), chosen.data_ptr(), n_tokens, n)
    return chosen


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


@by_dtype(Kernel)
def _best_chunks(first, stop, scores_at, forced_at, chosen_at, n_queries, n_chunks, n, start, size):
    chosen, keys = carray(pointer(chosen_at, int64), (stop, n)), np.empty(n_chunks, np.int32)
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
        n_low, n_high = np.int64(seen), np.int64(0)
        while n_low > n and high - low > 1:
            middle = np.int32((low + high) >> 1)
            count = np.int32(0)
            for i in range(seen):
                count = np.int32(count + np.int32(keys[i] >= middle))
            if count >= n:
                low, n_low = np.int64(middle), np.int64(count)
            else:
                high, n_high = np.int64(middle), np.int64(count)
        worst, equal, taken = np.int32(low), n_low if n_low <= n else n - n_high, 0
        for i in range(seen):
            if keys[i] > _LEAST and (keys[i] > worst or (keys[i] == worst and equal > 0)):
                equal -= np.int64(keys[i] == worst)
                chosen[row, taken] = i
                taken += 1
        for i in range(taken, n):
            chosen[row, i] = -1


@Kernel
def _spread_keys(begin, end, scores_at, keys_at, n, eps):
    for task in range(begin, end):
        first = task * _PIECE
        stop = min(n, first + _PIECE)
        own = carray(pointer(scores_at + 4 * first, float32), (_PIECE,))
        keys = carray(pointer(keys_at + 4 * first, int32), (_PIECE,))
        for i in range(stop - first):
            keys[i] = key_of_score(own[i])
        for away in range(1, eps + 1):
            before = max(0, away - first)  # tokens of this piece that have no token `away` places before them
            if before < stop - first:
                left = carray(pointer(scores_at + 4 * (first + before - away), float32), (_PIECE,))
                some = carray(pointer(keys_at + 4 * (first + before), int32), (_PIECE,))
                for i in range(stop - first - before):
                    some[i] = max(some[i], key_of_score(left[i]))
            right = carray(pointer(scores_at + 4 * (first + away), float32), (_PIECE,))
            for i in range(min(stop, n - away) - first):
                keys[i] = max(keys[i], key_of_score(right[i]))
        tops = carray(pointer(keys_at + 4 * (n + first // _GROUP), int32), (_PIECE // _GROUP,))
        for number in range((stop - first + _GROUP - 1) // _GROUP):
            some = carray(pointer(keys_at + 4 * (first + number * _GROUP), int32), (_GROUP,))
            best = some[0]
            for i in range(min(_GROUP, stop - first - number * _GROUP)):
                best = max(best, some[i])
            tops[number] = best


@inner
def _nth_largest(keys, n):
    """Return the n-th largest of int32 sort keys, found digit by digit (11, 11 and 10 bits). Time: O(keys)."""
    counts = np.empty(2048, np.int64)
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


@Kernel
def _best_keys(_first, _stop, keys_at, chosen_at, n_keys, n):
    """Write the indices of the n largest sort keys in ascending order.

    `least` is the n-th largest of the groups' largest sort keys. So n groups have a sort key ≥ `least`, the n largest
    sort keys are ≥ `least` too, and groups whose sort keys are all below `least` are skipped.
    """
    n_groups = (n_keys + _GROUP - 1) // _GROUP
    keys = carray(pointer(keys_at, int32), (n_keys + n_groups,))
    chosen = carray(pointer(chosen_at, int64), (n,))
    least = _nth_largest(keys[n_keys:], n) if n <= n_groups else np.int32(-0x8000_0000)
    some, index, found = np.empty(n_keys, np.int32), np.empty(n_keys, np.int32), 0
    for number in range(n_groups):
        if keys[n_keys + number] >= least:
            for i in range(number * _GROUP, min(n_keys, number * _GROUP + _GROUP)):
                some[found] = keys[i]
                index[found] = i
                found += np.int64(keys[i] >= least)
    worst = _nth_largest(some[:found], n)
    equal = n
    for i in range(found):
        equal -= np.int64(some[i] > worst)
    taken = 0
    for i in range(found):
        if some[i] > worst or (some[i] == worst and equal > 0):
            equal -= np.int64(some[i] == worst)
            chosen[taken] = index[i]
            taken += 1
