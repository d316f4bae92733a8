"""Attention as in the papers: for tests and for reading."""

from __future__ import annotations

import math

from torch import Tensor

from lce.attention.backend import Backend
from lce.attention.merging import Attended, causal_mask


class Reference(Backend):
    """Plain float32 arithmetic over the whole score matrix. Bytes: O(H · T · N)."""

    name = "reference"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Attended:
        rows = q.float().flatten(1, 2)  # [G, R·T, D]
        scores = (rows @ k.float().mT).view(*q.shape[:-1], -1) / math.sqrt(q.shape[-1])
        if causal:
            scores = scores.masked_fill(~causal_mask(q.shape[-2], k.shape[-2], window, q.device), -math.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().flatten(1, 2)
        return (weights @ v.float()).view(q.shape).to(q.dtype), lse
