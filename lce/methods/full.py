"""Full causal attention: every key, at its true distance."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lce.cache.layer import LayerCache
from lce.methods.base import Method
from lce.methods.costs import Cost, QueryBlock
from lce.methods.decoding import decode_spans, recent_span
from lce.methods.parts import attend_span, spans_of
from lce.methods.registry import register
from lce.methods.step import DeviceStep, Step


@register("full")
@dataclass(frozen=True)
class Full(Method):
    """Causal attention at distance `i - j` (Vaswani et al., 2017): what the model was trained with.

    The only method that honours a checkpoint's sliding window. Keys are cached at their absolute position.
    Time: O(N · D) a token and head; no more memory than the keys and values.
    """

    @property
    def block(self) -> int:
        return 2048  # nothing grows with it but the MLP's activations, and large products run faster

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        """Under a sliding window within the model's window no distance leaves it."""
        return None if sliding_window is not None and sliding_window <= window else window

    def spans(self, cache: LayerCache, step: Step) -> Tensor | None:
        index = step.positions(cache.buffer.k.device)
        window = step.sliding_window or step.stop
        return spans_of(((index + 1 - window).clamp(min=0), index + 1), like=index)

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        return attend_span(q, cache, step, causal=True, window=step.sliding_window, turn=step.true_turn(q))[0]

    def decode(self, q: Tensor, cache: LayerCache, step: DeviceStep) -> Tensor:
        return decode_spans(q, cache, step, "runs", lambda: [recent_span(step, step.sliding_window, q)])[0]

    def cost(self, block: QueryBlock) -> Cost:
        return block.recent(block.sliding_window)
