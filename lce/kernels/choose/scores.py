"""Dot products of a few queries with many keys, which are read once, and reductions of the scores of many queries."""

from __future__ import annotations

import torch
from torch import Tensor

from lce.kernels.product import panels
from lce.kernels.runtime.kernel import DTYPES, Kernels, argument_of
from lce.kernels.runtime.shared import LANES, SCORED_COLUMNS, SCORED_KEYS, SCORED_TOKENS

_scores_of_few, _add_weights = Kernels("scores.scores_of_few"), Kernels("scores.add_weights")
_weight_sums = Kernels("scores.weight_sums")
_scores_of_many = Kernels("scores.scores_of_many")
_tops_of, _best_of = Kernels("scores.tops_of"), Kernels("scores.best_of")


def compiled_for(x: Tensor) -> bool:
    """Return whether these kernels take a tensor: it is on the CPU and has a dtype in `DTYPES`."""
    return x.device.type == "cpu" and x.dtype in DTYPES


def scores_of_few(q: Tensor, keys: Tensor, together: int = 1) -> Tensor:
    """Return the float32 dot products `[H / n, T, M]` of a few queries `q [H, T, D]` with `keys [S, M, D]`.

    H / S neighbouring heads share a row of keys, and products are summed over n = `together` heads. If `keys`
    is `[S, M, 2, D]` (the minimum and maximum of each channel for M pages), a product is the upper bound
    `Σ_d max(q_d · min_d, q_d · max_d)`. Each `keys[s]` is contiguous, and so is each vector of q. q is float32 or has
    the keys' dtype. Sums are float32. The keys are read once.
    """
    (n_heads, n, dim), (groups, n_keys, *rows) = q.shape, keys.shape
    rep, bounds, (q_head, q_row, one) = n_heads // groups, len(rows) == 2, q.stride()
    if one != 1:
        q = q.contiguous()
        q_head, q_row, one = q.stride()
    assert rows == ([2, dim] if bounds else [dim]), (q.shape, keys.shape)
    assert (n_heads, rep % together) == (rep * groups, 0), (q.shape, keys.shape, together)
    assert keys[0].is_contiguous(), keys.stride()
    assert q.dtype in (torch.float32, keys.dtype), (q.dtype, keys.dtype)
    out = torch.empty(n_heads // together, n, n_keys, dtype=torch.float32)
    addresses, wide = (q.data_ptr(), keys.data_ptr(), out.data_ptr()), q.dtype is torch.float32
    sizes = rep, n, n_keys, dim, q_head, q_row, keys.stride(0), wide, bounds, together
    _scores_of_few[keys.dtype](
        groups * -(-n_keys // SCORED_KEYS), *addresses, *sizes, memory=4 * rep * n * dim * (2 if bounds else 1)
    )
    return out


def scores_of_many(q: Tensor, keys: Tensor, into: Tensor | None = None) -> Tensor:
    """Return the float32 dot products `[M, T]` of keys `[M, R]` with queries `q [T, R]`, contiguous and of one dtype.

    Sums are float32. The products lie in `into`, if given: a float32 buffer of M times T, rounded up to a multiple of
    16, numbers. Time: near that of a product of matrices of the dtype. R is even.
    """
    (n, dim), n_keys, columns = q.shape, len(keys), -(-len(q) // LANES) * LANES
    assert keys.shape == (n_keys, dim), (keys.shape, q.shape)
    assert q.dtype is keys.dtype, (q.dtype, keys.dtype)
    assert all(x.is_contiguous() for x in (q, keys)), (q.stride(), keys.stride())
    into = torch.empty(n_keys * columns) if into is None else into
    addresses = panels.pack(q[None]), keys.data_ptr(), into.data_ptr()
    _scores_of_many[q.dtype](
        -(-n_keys // SCORED_TOKENS), *addresses, columns, n_keys, dim, memory=4 * SCORED_TOKENS * dim
    )
    return into[: n_keys * columns].view(n_keys, columns)[:, :n]


def weight_sums(q: Tensor, keys: Tensor, lse: Tensor, scale: float, window: int) -> Tensor:
    """Return each key's attention weights, `exp(scale · q·k - lse)`, summed over all queries: `[H, N]`, float32.

    `q [H, T, D]`, `keys [G, N, D]` and `lse [H, T]` (float32) are those of causal attention: the last query sees the
    last key, and no query sees a key `window` or more tokens before it. D is even; numbers of a vector lie side by
    side. Time: O(H · T · min(N, window + T) · D). No score is written to memory.
    """
    (n_heads, n, dim), (groups, n_keys, _) = q.shape, keys.shape
    group, row, one = (stride * keys.itemsize for stride in keys.stride())
    assert keys.shape == (groups, n_keys, dim), keys.shape
    assert (q.dtype, one) == (keys.dtype, keys.itemsize), (q.dtype, keys.dtype, keys.stride())
    assert (lse.shape, lse.dtype) == ((n_heads, n), torch.float32), (lse.shape, lse.dtype)
    lse, into = lse.contiguous(), torch.empty(n_heads, n_keys)
    addresses = panels.pack(q), keys.data_ptr(), lse.data_ptr(), into.data_ptr()
    sizes = n_heads // groups, n, n_keys, dim, group, row, n_keys - n, window
    _weight_sums[q.dtype](
        n_heads * -(-n_keys // SCORED_TOKENS),
        *addresses,
        *sizes,
        argument_of(scale),
        memory=4 * (SCORED_TOKENS * dim + 6 * -(-n // LANES) * LANES),  # 6 rows of scores: `_TALL` of the kernel
    )
    return into


def best_below_top(scores: Tensor) -> Tensor:
    """Return `max_t (s[j, t] - max_i s[i, t])`, `[N]`, for `scores [N, T]` of N tokens for T queries.

    A score is compared with the best score of any token for the same query. The result (float32) is the best such
    difference of each token. Scores of a token lie side by side. Bytes moved: the scores twice.
    """
    (n_tokens, n), (row, one) = scores.shape, scores.stride()
    assert one == 1, scores.stride()
    assert scores.numel(), scores.shape
    n_pieces = -(-n_tokens // SCORED_COLUMNS)
    tops = torch.empty(n_pieces, n, dtype=torch.float32)
    best = torch.empty(n_tokens, dtype=torch.float32)
    _tops_of[scores.dtype](n_pieces, scores.data_ptr(), tops.data_ptr(), n_tokens, n, row)
    top = tops.amax(dim=0)
    _best_of[scores.dtype](n_pieces, scores.data_ptr(), best.data_ptr(), n_tokens, n, row, top.data_ptr())
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
