"""Full causal attention: every key, at its true distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lce.cache.kv import LayerCache
from lce.methods.base import Method, Step
from lce.methods.registry import register
from lce.models.rope import Table, rotate


@register("full")
@dataclass(frozen=True)
class Full(Method):
    """Causal attention at distance `i - j` (Vaswani et al., 2017): what the model was trained with.

    The only method that honours a checkpoint's sliding window. Keys are cached at their absolute position.
    Time: O(N · D) a token and head; no more memory than the keys and values.
    """

    block: ClassVar[int] = 2048  # nothing grows with it but the MLP's activations, and large products run faster

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        table: Table = step.once("positions", lambda: step.rope.table(step.positions(q.device), q.dtype))
        return step.attention.dense(rotate(q, table), cache.k, cache.v, causal=True, window=step.sliding_window)[0]
