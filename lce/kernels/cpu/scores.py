"""Dot products of a few queries with many keys, which are read once, and reductions of the scores of many queries."""

from __future__ import annotations

import torch
from torch import Tensor

from lce.kernels.code.shared import SCORED_COLUMNS, SCORED_KEYS
from lce.kernels.cpu.kernel import DTYPES, Kernels, argument_of

_scores_of_few, _add_weights = Kernels("scores.scores_of_few"), Kernels("scores.add_weights")
_tops_of, _best_of = Kernels("scores.tops_of"), Kernels("scores.best_of")


def compiled_for(x: Tensor) -> bool:
    """Return whether these kernels take a tensor: it is on the CPU and has a dtype in `DTYPES`."""
    return x.device.type == "cpu" and x.dtype in DTYPES


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
    n_pieces, addresses = -(-n_keys // SCORED_KEYS), (wide.data_ptr(), keys.data_ptr(), out.data_ptr())
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
    n_pieces = -(-n_tokens // SCORED_COLUMNS)
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
    _add_weights[logits.dtype](
        n_heads * -(-n_keys // SCORED_KEYS), *addresses, *sizes, argument_of(scale), memory=4 * SCORED_KEYS
    )
