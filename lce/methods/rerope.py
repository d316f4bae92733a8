"""ReRoPE: every key, at a distance that stops growing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from lce.attention import merge, rotate
from lce.cache.layer import LayerCache
from lce.methods.base import Example, LocalMethod
from lce.methods.costs import Cost, QueryBlock
from lce.methods.decoding import decode_far, decode_recent, recent_span
from lce.methods.parts import attend_behind, attend_local, spans_of
from lce.methods.registry import register
from lce.methods.step import DeviceStep, Step


@register("rerope")
@dataclass(frozen=True)
class ReRope(LocalMethod):
    """ReRoPE (Su, 2023, "Rectified Rotary Position Embeddings").

    A query attends every earlier key, at distance `min(i - j, local)`: exact nearby, constant beyond. `log_scale`
    multiplies the query by `max(1, ln(i + 1) / ln W)`, which keeps the softmax as sharp as it was in training.

    Example: `local=3`; query 9 sees keys 9, 8, 7 at distances 0, 1, 2 and all before them at 3.

    Keys are cached unrotated, because all far keys are seen at one distance; the last `local` also at their positions.
    Time: O(N · D) a token and head, in two parts.
    """

    local: int | None = None
    log_scale: bool = False

    knob_help: ClassVar = {
        "local": "the largest distance; none is half of the window",
        "log_scale": "multiply queries by a factor that grows with their index",
    }
    example: ClassVar = Example({"local": 6})

    def resolve(self, window: int) -> Self:
        made = replace(self, local=max(1, window // 2) if self.local is None else self.local)
        made.expect(local=1)
        return made

    def spans(self, cache: LayerCache, step: Step) -> Tensor | None:
        index = step.positions(cache.buffer.k.device)
        return spans_of((0, index + 1), like=index)

    def distance(self, index: Tensor, token: Tensor, step: Step) -> Tensor | None:
        return (index - token).clamp(max=self.n_local)

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        q = self.scaled(q, step)
        here = attend_local(q, cache, step, window=self.n_local)
        if step.stop <= self.n_local:
            return here[0]
        far = attend_behind(rotate(q, step.far_turn(self.n_local, q)), cache, step, gap=self.n_local)
        return merge([far, here])

    def decode(self, q: Tensor, cache: LayerCache, step: DeviceStep) -> Tensor:
        q = self.scaled(q, step)
        here = decode_recent(q, cache, step, lambda: recent_span(step, self.n_local, q))
        return merge([decode_far(q, cache, step, self.n_local, lambda: step.far_turn(self.n_local, q)), here])

    def cost(self, block: QueryBlock) -> Cost:
        return block.recent(self.n_local) + block.behind(self.n_local)

    def scaled(self, q: Tensor, step: Step) -> Tensor:
        """The queries times their factor, if there is one."""
        if not self.log_scale:
            return q
        factor: Tensor = step.once("log scale", lambda: log_scale(step.positions(q.device), step.window).to(q.dtype))
        return q * factor


def log_scale(indices: Tensor, window: int) -> Tensor:
    """`max(1, ln(i + 1) / ln W)` for each query index `[T]`: `[T, 1]`."""
    return ((indices.to(torch.float64) + 1).log() / math.log(max(window, 2))).clamp(min=1.0)[:, None]
