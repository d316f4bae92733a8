"""ReRoPE: each query attends every key, at bounded distances."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from lce.methods.base import Example, LocalMethod, filled, knob
from lce.methods.parts import LayerFacts, Part
from lce.methods.registry import register


@register("rerope")
@dataclass(frozen=True)
class ReRope(LocalMethod):
    """ReRoPE (Su, 2023, "Rectified Rotary Position Embeddings").

    A query attends every earlier key, at the distance `min(i - j, local)`. `log_scale` multiplies the query by
    `max(1, ln(i + 1) / ln W)`, which keeps the softmax as sharp as in training.

    Example: `local=3`; query 9 sees keys 9, 8, 7 at distances 0, 1, 2 and all earlier keys at distance 3.

    Keys are cached unrotated, because all far keys are seen at one distance; the last `local` keys are also kept at
    their own positions. Time: O(N · D) per token and head, for near and far keys together.
    """

    local: int | None = knob(None, "the largest distance; none is half of the window", least=1)
    log_scale: bool = knob(False, "multiply queries by a factor that grows with their index")
    example: ClassVar = Example({"local": 6})

    def resolve(self, window: int) -> Self:
        return filled(self, local=max(1, window // 2))

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterator[Part]:
        yield Part(keys=(i + 1 - self.n_local, i + 1), query_at=i, exact=True)
        yield Part(keys=(0, i + 1 - self.n_local), query_at=self.n_local)

    def query_scale(self, i: Tensor, window: int) -> Tensor | None:
        if not self.log_scale:
            return None
        return ((i.to(torch.float64) + 1).log() / math.log(max(window, 2))).clamp(min=1.0)
