"""LM-Infinite: each query attends first and last tokens at bounded distances, and optionally a few tokens between."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from lce.attention import SCORES_AT_ONCE, Attended, best_first, join, products, rotate
from lce.cache.layer import LayerCache
from lce.methods.attending import PlacedPart
from lce.methods.base import ATTENTION, Example, LocalMethod, Promise, filled, knob
from lce.methods.costs import Cost, QueryBlock
from lce.methods.parts import CHOSEN, LayerFacts, Part
from lce.methods.registry import register
from lce.methods.step import Step

PROMISES: tuple[Promise, ...] = "alike", "counted", "recorded", "kept", "by_head", "plain"


@register("lm_infinite")
@dataclass(frozen=True)
class LMInfinite(LocalMethod, promises=dict.fromkeys(PROMISES, ATTENTION)):
    """LM-Infinite (Han et al., 2024, "LM-Infinite: Zero-Shot Extreme Length Generalization for LLMs").

    A query attends the first `sinks` tokens and the last `local` tokens, at the distance `min(i - j, local)` (section
    4.2). From layer `from_layer` on, every head also attends the `top_k` tokens in the middle with the largest
    logits at the distance `local` (section 4.3).

    Example: `sinks=2, local=3`; query 9 sees tokens 9, 8, 7 at 0, 1, 2 and tokens 1, 0 at 3.

    Keys are cached unrotated, because all far keys are seen at one distance; the last `local` keys are also kept at
    their own positions. Time: O((sinks + local) · D) per token and head; with `top_k`, O(N · D) for the scores.
    """

    sinks: int = knob(10, "first tokens, always attended", least=0)
    local: int | None = knob(None, "last tokens, and the largest distance; none is the window", least=1)
    top_k: int = knob(0, "tokens between that each head chooses; 0 is none", least=0)
    from_layer: int = knob(0, "first layer that chooses tokens between", least=0)
    example: ClassVar = Example({"sinks": 2, "local": 8, "top_k": 2})

    def resolve(self, window: int) -> Self:
        return filled(self, local=window)

    @property
    def block(self) -> int:
        """A quarter of the tokens that a query attends, but at least 512 (large products run faster), at most 1,024."""
        return max(512, min(1024, self.n_local // 4))

    def layer_kind(self, layer: int) -> str:
        return "choosing" if self.top_k and layer >= self.from_layer else ""

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterator[Part]:
        first = i + 1 - self.n_local
        yield Part(keys=(first, i + 1), query_at=i, exact=True)
        yield Part(keys=(0, first.clamp(max=self.sinks)), query_at=self.n_local)
        if layer.kind == "choosing":
            yield Part(keys=CHOSEN, query_at=self.n_local)

    def promised(self, what: Promise) -> bool:
        return super().promised(what) and (what not in ("recorded", "plain") or not self.top_k)

    def choice_cost(self, block: QueryBlock) -> Cost:
        n_middle = block.stop - self.n_local - self.sinks
        if not self.layer_kind(block.layer) or n_middle <= 0:
            return Cost(0)
        n_queries, most, dim = block.n_heads * len(block), min(self.top_k, n_middle), block.head_dim
        read = block.n_kv_heads * n_middle + min(n_queries * most, block.n_kv_heads * n_middle)
        return Cost(n_queries * most * dim, scores=n_queries * n_middle * dim, state_read=read * dim)

    def attend_part(self, q: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended | None:
        if placed.part.keys != CHOSEN:
            return super().attend_part(q, placed, cache, step)
        first, stop = self.sinks, step.stop - self.n_local
        if stop <= first:
            return None
        q, last_seen = rotate(q, placed.turn), step.positions(q.device) - self.n_local
        rows = max(1, SCORES_AT_ONCE // (len(q) * (stop - first)))
        slices = zip(q.split(rows, dim=1), last_seen.split(rows), strict=True)
        return join([self._attend_best(some, cache, stop, seen, step.decoding) for some, seen in slices], 1)

    def _attend_best(self, q: Tensor, cache: LayerCache, stop: int, last_seen: Tensor, generated: bool) -> Attended:
        """Return the attention of rotated queries to their `top_k` best tokens of `sinks..last_seen [T]`."""
        keys = (cache.span(*piece)[0] for piece in cache.segments(self.sinks, stop))
        logits = [products(q.reshape(len(k), -1, q.shape[-1]), k.mT, generated).view(*q.shape[:2], -1) for k in keys]
        hidden = torch.arange(self.sinks, stop, device=q.device) > last_seen[:, None]
        scores = torch.cat(logits, dim=-1).float().div_(math.sqrt(q.shape[-1])).masked_fill_(hidden, -torch.inf)
        best = best_first(scores, min(self.top_k, stop - self.sinks))
        logits_of_best = scores.gather(-1, best)
        lse = logits_of_best.logsumexp(-1)
        weights = (logits_of_best - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        values = cache.values((self.sinks + best).view(cache.layout.n_kv_heads, -1))
        values = values.view(*best.shape, q.shape[-1])  # [H, T, top_k, D]
        return (weights[..., None, :].to(values.dtype) @ values).squeeze(-2), lse
