"""Choices by score on CPUs."""

import numpy as np
import torch
from torch import Tensor

from lce.kernels.runtime.kernel import Kernels

_best_chunks = Kernels("choices.best_chunks")
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
    given = scores, forced, chosen, n_queries, n_chunks, n, start, size
    _best_chunks[scores.dtype](n_choosers * n_queries, *given, least=_ROWS, memory=4 * n_chunks)
    return chosen


def best_tokens(scores: Tensor, n: int, eps: int = 0) -> Tensor:
    """Choose the n best of N ≥ n tokens by `scores [N]` (float32, contiguous): ascending indices `[n]`.

    Each score is first replaced by the largest score at most `eps` places away. NaN is the largest score; of equal
    scores, the last ones are chosen. Time: O(N · eps), on one thread.
    """
    assert scores.dtype == torch.float32, scores.dtype
    assert 0 < n <= len(scores), (n, len(scores))
    numbers = scores.detach().numpy()
    bits = numbers.view(np.int32)
    own = bits >> 31 & 0x7FFF_FFFF
    own ^= bits  # in the order of the scores
    own[np.isnan(numbers)] = 0x7FFF_FFFE
    keys = own.copy() if eps else own
    for away in range(1, eps + 1):
        np.maximum(keys[away:], own[:-away], out=keys[away:])
        np.maximum(keys[:-away], own[away:], out=keys[:-away])
    worst = np.partition(keys, len(keys) - n)[len(keys) - n]
    chosen = np.flatnonzero(keys >= worst)
    equal = np.flatnonzero(keys[chosen] == worst)
    return torch.from_numpy(np.delete(chosen, equal[: len(chosen) - n]))
