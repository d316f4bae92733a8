"""The layers with a sliding window of their own, in which no user's method acts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from lce.cache.layout import AccessPattern
from lce.methods.base import Method
from lce.methods.parts import LayerFacts, Part
from lce.models.config import LayerKind


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


def method_of(method: Method, kind: LayerKind) -> Method:
    """Return the method of layers of this kind: `method`, or `OwnWindow` in layers with a sliding window."""
    size = kind.sliding_window
    return method if size is None else method.in_sliding_layer(OwnWindow(size))


def access_of(method: Method, kinds: Iterable[LayerKind]) -> AccessPattern:
    """Return what a cache of layers of these kinds must know: the method's access, and sliding windows as local."""
    local = (method_of(method, kind).access.local for kind in {*kinds})
    return replace(method.access, local=max(method.access.local, *local))
