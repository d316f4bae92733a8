"""Merges the results of attention to different keys into one softmax over all keys."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lce.kernels.cpu.kernel import DTYPES
from lce.kernels.cpu.merging import merged
from lce.kernels.cuda import launching
from lce.profiling import timed

Attended = tuple[Tensor, Tensor]  # outputs [..., T, D], and log-sum-exps [..., T] (float32, natural logarithm)


@timed("attention")
def merge(parts: Sequence[Attended]) -> Tensor:
    """Return the outputs `[H, T, D]` of one softmax over the keys of all parts. Every query must see some key."""
    return combine(parts)[0]


@timed("attention")
def combine(parts: Sequence[Attended]) -> Attended:
    """Return the result of one softmax over the keys of all parts, exactly; no key may be in two parts.

    Each part is `out [..., T, D]`, `lse [..., T]`; a query that saw no key has lse -inf. Time: O(parts · T · D).
    """
    if len(parts) == 1:
        return parts[0]
    out, lse = parts[0]
    if out.device.type == "cpu" and out.dtype in DTYPES and lse.dtype == torch.float32:
        return merged(parts)
    if launching.runs_on(out) and lse.dtype == torch.float32:
        from lce.kernels.cuda.merging import combined

        return combined(parts)
    lses = torch.stack([lse for _, lse in parts])
    total = lses.logsumexp(0)
    weights = (lses - total.masked_fill(total == -math.inf, 0.0)).exp()
    out = parts[0][0].float() * weights[0, ..., None]
    for (part, _), weight in zip(parts[1:], weights[1:], strict=True):
        out.addcmul_(part.float(), weight[..., None])
    return out.to(parts[0][0].dtype), total


def join(parts: Sequence[Attended], dim: int) -> Attended:
    """Join the results of different queries, or of different heads, along a dimension."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts], dim=dim), torch.cat([lse for _, lse in parts], dim=dim)


def causal_mask(n_queries: int, n_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return `[T, N]`, true where a query sees a key, less than `window` back; the last query sees the last key."""
    distance = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None] - torch.arange(n_keys, device=device)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
