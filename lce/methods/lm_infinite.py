"""LM-Infinite: a Lambda-shaped mask and a ceiling on distances, with a few far tokens if asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from lce.attention import Part, merge, rotate
from lce.cache.layer import LayerCache
from lce.methods.base import Example, LocalMethod
from lce.methods.costs import Cost, QueryBlock
from lce.methods.decoding import decode_far, decode_recent, recent_span
from lce.methods.parts import SCORES_AT_ONCE, attend_behind, attend_local, concat_queries, products, sinks_and_local
from lce.methods.registry import register
from lce.methods.step import DeviceStep, Step


@register("lm_infinite")
@dataclass(frozen=True)
class LMInfinite(LocalMethod):
    """LM-Infinite (Han et al., 2024, "LM-Infinite: Zero-Shot Extreme Length Generalization for LLMs").

    A query attends the first `sinks` tokens and those with `i - j < local`, at distance `min(i - j, local)` (section
    4.2). From layer `from_layer` on, every head also attends the `top_k` tokens between with the largest logits at
    that distance (section 4.3).

    Example: `sinks=2, local=3`; query 9 sees tokens 9, 8, 7 at 0, 1, 2 and tokens 1, 0 at 3.

    Keys are cached unrotated, because all far keys are seen at one distance; the last `local` also at their positions.
    Time: O((sinks + local) · D) a token and head; with `top_k`, O(N · D) for the scores.
    """

    sinks: int = 10
    local: int | None = None
    top_k: int = 0
    from_layer: int = 0

    knob_help: ClassVar = {
        "sinks": "first tokens, always attended",
        "local": "last tokens, and the largest distance; none is the window",
        "top_k": "tokens between that each head chooses; 0 is none",
        "from_layer": "first layer that chooses tokens between",
    }
    example: ClassVar = Example({"sinks": 2, "local": 8, "top_k": 2})

    def resolve(self, window: int) -> Self:
        made = replace(self, local=window if self.local is None else self.local)
        made.expect(sinks=0, local=1, top_k=0, from_layer=0)
        return made

    @property
    def block(self) -> int:
        """A quarter of what a query attends, 512 to 1,024: larger products run faster."""
        return max(512, min(1024, self.n_local // 4))

    def spans(self, cache: LayerCache, step: Step) -> Tensor | None:
        if self.top_k and cache.index >= self.from_layer:
            return None  # what is chosen between is not noted
        return sinks_and_local(self.sinks, self.n_local, step.positions(cache.buffer.k.device))

    def distance(self, index: Tensor, token: Tensor, step: Step) -> Tensor | None:
        return (index - token).clamp(max=self.n_local)

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        parts = [attend_local(q, cache, step, window=self.n_local)]
        if step.stop > self.n_local:
            far = rotate(q, step.far_turn(self.n_local, q))
            parts.append(attend_behind(far, cache, step, gap=self.n_local, stop=self.sinks))
            if self.top_k and cache.index >= self.from_layer and step.stop - self.n_local > self.sinks:
                parts.append(self.middle(far, cache, step))
        return merge(parts)

    def bound(self, stop: int) -> int | None:
        return None if self.top_k else super().bound(stop)

    def decode(self, q: Tensor, cache: LayerCache, step: DeviceStep) -> Tensor:
        """Without `top_k`: tokens that each head chooses by their scores are a part of its own."""
        here = decode_recent(q, cache, step, lambda: recent_span(step, self.n_local, q))
        if not self.sinks:
            return here[0]
        turn = partial(step.far_turn, self.n_local, q)
        return merge([decode_far(q, cache, step, self.n_local, turn, stop=self.sinks), here])

    def cost(self, block: QueryBlock) -> Cost:
        cost = block.recent(self.n_local) + block.behind(self.n_local, stop=self.sinks)
        n_middle = block.stop - self.n_local - self.sinks
        if not self.top_k or block.layer < self.from_layer or n_middle <= 0:
            return cost
        # The scores of the middle serve as logits too: what is left of its attention is the weighted sum of values.
        n_queries, most = block.n_heads * len(block), min(self.top_k, n_middle)
        read = block.n_kv_heads * n_middle + min(n_queries * most, block.n_kv_heads * n_middle)
        dim = block.head_dim
        return cost + Cost(n_queries * most * dim, scores=n_queries * n_middle * dim, state_read=read * dim)

    def middle(self, q: Tensor, cache: LayerCache, step: Step) -> Part:
        """The `top_k` best of tokens `sinks..i-local` for each placed query of each head: `q [H, T, D]`.

        Time: O(H · T · N · D). Bytes: the scores of a slice of queries, bounded.
        """
        first, stop = self.sinks, step.stop - self.n_local
        last_seen = step.positions(q.device) - self.n_local - first  # counted from the first middle token
        rows = max(1, SCORES_AT_ONCE // (q.shape[0] * (stop - first)))
        slices = zip(q.split(rows, dim=1), last_seen.split(rows), strict=True)
        return concat_queries([_best_keys(part, cache, first, stop, seen, self.top_k) for part, seen in slices])


def _best_keys(q: Tensor, cache: LayerCache, first: int, stop: int, last_seen: Tensor, top_k: int) -> Part:
    """Attention of each query `[H, T, D]` to its `top_k` best of tokens `first..stop-1`, up to the one that it sees."""
    spans = (cache.span(*cut)[0] for cut in cache.segments(first, stop))
    scores = torch.cat(
        [products(q.reshape(len(k), -1, q.shape[-1]), k.mT).view(*q.shape[:2], -1) for k in spans], dim=-1
    )
    hidden = torch.arange(stop - first, device=q.device) > last_seen[:, None]
    scores = scores.float().div_(math.sqrt(q.shape[-1])).masked_fill_(hidden, -torch.inf)
    best = scores.topk(min(top_k, stop - first), dim=-1)
    lse = best.values.logsumexp(-1)
    weights = (best.values - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    values = cache.values((first + best.indices).view(cache.layout.n_kv_heads, -1))
    values = values.view(*best.indices.shape, q.shape[-1])  # [H, T, top_k, D]
    return (weights[..., None, :].to(values.dtype) @ values).squeeze(-2), lse
