"""Full causal attention: every key, at its true distance; and the layers with a sliding window of their own."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from lce.cache.layout import AccessPattern
from lce.methods.base import Method
from lce.methods.parts import LayerFacts, Part
from lce.methods.registry import register


@register("full")
@dataclass(frozen=True)
class Full(Method):
    """Causal attention at distance `i - j` (Vaswani et al., 2017), as in training.

    The only method that honours a checkpoint's sliding window. Keys are cached at their absolute positions.
    Time: O(N · D) per token and head. Memory: the keys and values alone.
    """

    block = 2048  # large products run faster, and only the MLP's activations grow with the block

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        """Return `window`; None (no limit) if the checkpoint's sliding window keeps all distances within `window`."""
        return None if sliding_window is not None and sliding_window <= window else window

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterator[Part]:
        yield Part(keys=(i + 1 - layer.sliding_window if layer.sliding_window else 0, i + 1), query_at=i)


@dataclass(frozen=True)
class OwnWindow(Method):
    """The attention of a layer with a sliding window of its own: the last `size` tokens, the query's own included.

    Keys are cached at their absolute positions, rotated by the layer's own RoPE. Gemma 3 and OLMo 3 have such layers.
    """

    size: int

    @property
    def access(self) -> AccessPattern:
        return AccessPattern(local=self.size - 1)

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterator[Part]:
        yield Part(keys=(i + 1 - self.size, i + 1), query_at=i)
