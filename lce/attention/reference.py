"""Attention as in the papers: for tests and for reading."""

import math

from torch import Tensor

from lce.attention.attention import Attended, Attention, causal_mask
from lce.attention.int8_rows import readable
from lce.attention.turn import Turn, rotate


class Reference(Attention):
    """The backend of plain float32 arithmetic over the whole score matrix. Memory: O(H · T · N)."""

    name = "reference"

    def softmax(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None, turn: Turn | None = None
    ) -> Attended:
        q, (k, v) = q if turn is None else rotate(q, turn), readable(q, k, v)
        rows = q.float().reshape(len(k), -1, q.shape[-1])  # [G, H/G·T, D]
        scores = (rows @ k.float().mT).view(*q.shape[:-1], -1) / math.sqrt(q.shape[-1])
        if causal:
            scores = scores.masked_fill(~causal_mask(q.shape[1], k.shape[1], window, q.device), -math.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().view(len(k), -1, k.shape[1])
        return (weights @ v.float()).view(q.shape).to(q.dtype), lse
