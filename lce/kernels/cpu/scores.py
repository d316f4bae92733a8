"""Dot products of a few queries with many keys, which are read once, and reductions of the scores of many queries."""

from __future__ import annotations

import numpy as np
import torch
from numba import carray, float32
from torch import Tensor

from lce.kernels.cpu.choices import key_of_score, score_of_key
from lce.kernels.cpu.compiling import Kernel, argument_of, by_dtype, inner, number_of
from lce.kernels.cpu.numbers import STORED, exp, itemsize, pointer, read, stored

_KEYS = 256  # keys that a thread takes at a time
_COLUMNS = 512  # tokens that a thread of `best_below_top` takes at a time


def compiled_for(x: Tensor) -> bool:
    """Return whether these kernels take a tensor: it is on the CPU and has a dtype in `STORED`."""
    return x.device.type == "cpu" and x.dtype in STORED


def scores_of_few(q: Tensor, keys: Tensor) -> Tensor:
    """Return the float32 dot products `[G, T, M]` of a few queries `q [G, T, D]` with `keys [G, M, D]`.

    `keys[g]` is contiguous for each g. Sums are float32. Bytes moved: the keys once.
    """
    n_groups, n, dim = q.shape
    n_keys = keys.shape[1]
    group_stride, row_stride, one = keys.stride()
    out = torch.empty(n_groups, n, n_keys, dtype=torch.float32)
    wide = q.float().contiguous()
    assert keys.shape == (n_groups, n_keys, dim), keys.shape
    assert (row_stride, one) == (dim, 1), keys.stride()
    n_pieces, addresses = -(-n_keys // _KEYS), (wide.data_ptr(), keys.data_ptr(), out.data_ptr())
    _scores_of_few[keys.dtype](n_groups * n_pieces, *addresses, n_groups, n, n_keys, dim, group_stride)
    return out


def best_below_top(scores: Tensor) -> Tensor:
    """Return `max_t (s[j, t] - max_i s[i, t])`, `[N]`, for `scores [N, T]` (contiguous) of N tokens for T queries.

    A score is compared with the best score of any token for the same query. The result (float32) is the best such
    difference of each token. Bytes moved: the scores twice.
    """
    n_tokens, n = scores.shape
    assert scores.is_contiguous(), scores.stride()
    assert scores.numel(), scores.shape
    n_pieces = -(-n_tokens // _COLUMNS)
    tops = torch.empty(n_pieces, n, dtype=torch.float32)
    best = torch.empty(n_tokens, dtype=torch.float32)
    _tops_of[scores.dtype](n_pieces, scores.data_ptr(), tops.data_ptr(), n_tokens, n)
    top = tops.amax(dim=0)
    _best_of[scores.dtype](n_pieces, scores.data_ptr(), best.data_ptr(), n_tokens, n, top.data_ptr())
    return best


def add_weights(logits: Tensor, lse: Tensor, scale: float, into: Tensor, first_behind: int, window: int) -> None:
    """Add each key's attention weights for T queries: `into[h, j] += Σ_t exp(scale · logits[h, t, j] - lse[h, t])`.

    `logits [H, T, N]`, `lse [H, T]` (float32) and `into [H, N]` (float32) have contiguous rows. Query t and key
    `first_behind + t` are of one token; the query sees this key and `window - 1` keys before. Time: O(H · T · window).
    """
    n_heads, n_queries, n_keys = logits.shape
    assert (lse.dtype, into.dtype) == (torch.float32, torch.float32), (lse.dtype, into.dtype)
    assert (lse.shape, into.shape) == ((n_heads, n_queries), (n_heads, n_keys)), (lse.shape, into.shape)
    assert all(x.is_contiguous() for x in (logits, lse, into[0])), (logits.stride(), lse.stride(), into.stride())
    addresses = logits.data_ptr(), lse.data_ptr(), into.data_ptr()
    sizes = n_heads, n_queries, n_keys, into.stride(0), first_behind, window
    _add_weights[logits.dtype](n_heads * -(-n_keys // _KEYS), *addresses, *sizes, argument_of(scale))


@by_dtype(inner)
def _dot(q, key):
    total = np.float32(0)
    for d in range(len(q)):
        total += q[d] * read(key[d])
    return total


@by_dtype(Kernel)
def _scores_of_few(begin, end, q_at, keys_at, out_at, n_groups, n, n_keys, dim, group_stride):
    q = carray(pointer(q_at, float32), (n_groups, n, dim))
    out = carray(pointer(out_at, float32), (n_groups, n, n_keys))
    n_pieces = (n_keys + _KEYS - 1) // _KEYS
    for task in range(begin, end):
        group, first = task // n_pieces, task % n_pieces * _KEYS
        keys = carray(pointer(keys_at + group * group_stride * itemsize, stored), (n_keys, dim))
        for i in range(first, min(n_keys, first + _KEYS)):
            for t in range(n):
                out[group, t, i] = _dot(q[group, t], keys[i])


@by_dtype(Kernel)
def _tops_of(begin, end, scores_at, tops_at, n_tokens, n):
    scores = carray(pointer(scores_at, stored), (n_tokens, n))
    tops = carray(pointer(tops_at, float32), (end, n))
    for task in range(begin, end):
        first = task * _COLUMNS
        for t in range(n):
            tops[task, t] = read(scores[first, t])
        for i in range(first + 1, min(n_tokens, first + _COLUMNS)):
            for t in range(n):
                tops[task, t] = max(tops[task, t], read(scores[i, t]))


@by_dtype(Kernel)
def _best_of(begin, end, scores_at, best_at, n_tokens, n, top_at):
    scores = carray(pointer(scores_at, stored), (n_tokens, n))
    top, best = carray(pointer(top_at, float32), (n,)), carray(pointer(best_at, float32), (n_tokens,))
    for i in range(begin * _COLUMNS, min(n_tokens, end * _COLUMNS)):
        largest = np.int32(-0x8000_0000)
        for t in range(n):
            largest = max(largest, key_of_score(read(scores[i, t]) - top[t]))
        best[i] = score_of_key(largest)


@by_dtype(Kernel)
def _add_weights(
    begin_task, end_task, logits_at, lse_at, into_at, n_heads, n, n_keys, stride, first_behind, window, scale
):
    lse = carray(pointer(lse_at, float32), (n_heads, n))
    into = carray(pointer(into_at, float32), (n_heads, stride))
    factor = number_of(scale)
    n_pieces, total = (n_keys + _KEYS - 1) // _KEYS, np.empty(_KEYS, np.float32)
    for task in range(begin_task, end_task):
        head, begin = task // n_pieces, task % n_pieces * _KEYS
        stop = min(n_keys, begin + _KEYS)
        total[:] = 0
        for t in range(max(0, begin - first_behind), n):
            own = first_behind + t
            if own - window + 1 >= stop:
                break
            shift = lse[head, t]
            first = max(begin, own - window + 1)
            some = carray(pointer(logits_at + ((head * n + t) * n_keys + first) * itemsize, stored), (_KEYS,))
            weights = total[first - begin :]
            for j in range(min(stop, own + 1) - first):
                weights[j] += exp(read(some[j]) * factor - shift)
        for j in range(begin, stop):
            into[head, j] += total[j - begin]
