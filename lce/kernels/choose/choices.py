"""Choices by score: the n best chunks for each query, and the n best tokens for a block of queries.

Scores are compared by sort keys, which the code calls keys: 32-bit integers in the order of the scores, with NaN as the
largest. Of equal scores, the last are taken, so a choice depends on the scores alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lce.kernels.runtime.kernel import Kernel, Kernels
from lce.kernels.runtime.shared import SORTED_GROUP, SORTED_SCORES

_best_chunks, _spread_keys, _best_keys = (
    Kernels("choices.best_chunks"),
    Kernel("choices.spread_keys"),
    Kernel("choices.best_keys"),
)
_ROWS = 8  # the smallest number of rows of scores that a thread of `best_chunks` takes


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
    _best_chunks[scores.dtype](
        n_choosers * n_queries, *addresses, n_queries, n_chunks, n, start, size, least=_ROWS, memory=4 * n_chunks
    )
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
    keys = torch.empty(
        n_tokens + -(-n_tokens // SORTED_GROUP), dtype=torch.int32
    )  # sort keys, then the largest per group
    chosen = torch.empty(n, dtype=torch.int64)
    _spread_keys(-(-n_tokens // SORTED_SCORES), scores.data_ptr(), keys.data_ptr(), n_tokens, eps)
    _best_keys(1, keys.data_ptr(), chosen.data_ptr(), n_tokens, n, memory=16384 + 8 * n_tokens)
    return chosen
