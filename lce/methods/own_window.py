"""The layers with a sliding window of their own, in which no user's method acts."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from lce.cache.layout import AccessPattern
from lce.methods.base import Method
from lce.methods.parts import LayerFacts, Part


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
