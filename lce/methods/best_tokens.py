"""Attention to the tokens with the largest logits in a span, chosen by each query of each head for itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lce.attention import SCORES_AT_ONCE, Attended, join, products
from lce.cache.layer import LayerCache
from lce.methods.step import Step


def attend_best_tokens(
    q: Tensor, cache: LayerCache, step: Step, top_k: int, *, first: int, gap: int
) -> Attended | None:
    """Return the attention of each query i to the `top_k` tokens with the largest logits among `first..i-gap`.

    The queries `[H, T, D]` are rotated already; keys are used as they are cached. None: no query of the block has such
    a token. Time: O(H · T · N · D). Bytes: the scores of a slice of queries.
    """
    stop = step.stop - gap
    if stop <= first:
        return None
    last_seen = step.positions(q.device) - gap - first  # counted from token `first`
    rows = max(1, SCORES_AT_ONCE // (q.shape[0] * (stop - first)))
    slices = zip(q.split(rows, dim=1), last_seen.split(rows), strict=True)
    return join([_attend_best(some, cache, first, stop, seen, top_k) for some, seen in slices], 1)


def _attend_best(q: Tensor, cache: LayerCache, first: int, stop: int, last_seen: Tensor, top_k: int) -> Attended:
    """Return the attention of each rotated query t to the `top_k` best of tokens `first..first + last_seen[t]`."""
    keys = (cache.span(*piece)[0] for piece in cache.segments(first, stop))
    logits = [products(q.reshape(len(k), -1, q.shape[-1]), k.mT).view(*q.shape[:2], -1) for k in keys]
    hidden = torch.arange(stop - first, device=q.device) > last_seen[:, None]
    scores = torch.cat(logits, dim=-1).float().div_(math.sqrt(q.shape[-1])).masked_fill_(hidden, -torch.inf)
    best = scores.topk(min(top_k, stop - first), dim=-1)
    lse = best.values.logsumexp(-1)
    weights = (best.values - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    values = cache.values((first + best.indices).view(cache.layout.n_kv_heads, -1))
    values = values.view(*best.indices.shape, q.shape[-1])  # [H, T, top_k, D]
    return (weights[..., None, :].to(values.dtype) @ values).squeeze(-2), lse
