from dataclasses import dataclass

import torch
from torch import Tensor

from lce import SelectiveMethod
from lce.methods import Step, register


@register("keybounds")
@dataclass(frozen=True)
class KeyBounds(SelectiveMethod):
    """Chunks scored by the most that any of their keys could answer, as in Quest (Tang et al., 2024).

    A chunk keeps the middle m and half the width w of its keys' range in each dimension; its score is
    `q·m + spread · |q|·w`. With `spread` 1 that is Quest's `Σ_d max(q_d·min_d, q_d·max_d)`, which no `q·k` exceeds; 0
    is the middle alone, -1 the lower bound. Keys stand at their offsets in the chunk, the query at its first token.
    """

    summary_vectors = 2
    spread: float = 1.0

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        low, high = k.aminmax(dim=2)  # [G, m, D] each
        return torch.cat((low + high, high - low), dim=-1).repeat_interleave(len(q) // len(k), dim=0) / 2

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        return torch.cat((q, self.spread * q.abs()), dim=-1) @ summary.mT  # [H, T, M]
