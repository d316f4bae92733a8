"""A method inside another one: it runs as it is, while something looks on or changes what it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from lce.cache.layer import LayerCache
from lce.cache.layout import CacheLayout, Reach
from lce.cache.method_state import MethodState
from lce.methods.base import Method
from lce.methods.costs import Cost, PaperFigure, QueryBlock
from lce.methods.step import ModelFacts, Step


@dataclass(frozen=True)
class Wrapped(Method):
    """A method that does what `inner` does. Derive from it and override `attend` to add to that.

    Decode steps run one by one, as prefill does, so that `attend` is called for every token.

    Example: `lce.load(model, Watched(lce.methods.make("longheads")))`, where `Watched` derives from this.
    """

    inner: Method

    @property
    def label(self) -> str:
        return self.inner.label

    def for_model(self, model: ModelFacts) -> Self:
        return replace(self, inner=self.inner.for_model(model))

    def resolve(self, window: int) -> Self:
        return replace(self, inner=self.inner.resolve(window))

    @property
    def block(self) -> int:
        return self.inner.block

    @property
    def reach(self) -> Reach:
        return self.inner.reach

    @property
    def choices(self) -> tuple[int, int]:
        return self.inner.choices

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        return self.inner.limit(window, sliding_window)

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        return self.inner.state(layout)

    def could_keep(self, layer: int, kept: Mapping[str, Tensor], layout: CacheLayout, n_tokens: int) -> bool:
        return self.inner.could_keep(layer, kept, layout, n_tokens)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return self.inner.key_positions(indices)

    def keep(self, k: Tensor, v: Tensor, cache: LayerCache, step: Step) -> None:
        self.inner.keep(k, v, cache, step)

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        return self.inner.attend(q, cache, step)

    def spans(self, cache: LayerCache, step: Step) -> Tensor | None:
        return self.inner.spans(cache, step)

    def always(self, cache: LayerCache, step: Step) -> Tensor | None:
        return self.inner.always(cache, step)

    def distance(self, index: Tensor, token: Tensor, step: Step) -> Tensor | None:
        return self.inner.distance(index, token, step)

    def choice_distance(self, chosen: Tensor, step: Step) -> Tensor | None:
        return self.inner.choice_distance(chosen, step)

    def cost(self, block: QueryBlock) -> Cost | None:
        return self.inner.cost(block)

    @property
    def counted(self) -> bool:
        return self.inner.counted

    def paper_figures(self, block: QueryBlock) -> Sequence[PaperFigure]:
        return self.inner.paper_figures(block)
