"""Quest: each query attends the pages of keys whose logits could be largest, at their true positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from lce.cache.layer import LayerCache
from lce.cache.layout import AccessPattern
from lce.errors import UsageError
from lce.methods.base import Example, filled, knob, resolved
from lce.methods.costs import Cost, QueryBlock
from lce.methods.parts import LayerFacts, Part
from lce.methods.registry import register
from lce.methods.selective import SELECTING, ChunkSelection
from lce.methods.selectors import BOUNDS, Sizes
from lce.methods.step import Step
from lce.methods.top_p import top_p_knob


@register("quest")
@dataclass(frozen=True)
class Quest(ChunkSelection, promises=SELECTING):
    """Quest (Tang et al., 2024, "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference").

    Keys are cut into pages of `page` tokens. A page keeps the minimum and the maximum of each channel of its keys, at
    their absolute positions. The score of a page for a query is `Σ_d max(q_d · min_d, q_d · max_d)`: an upper bound of
    `q · k` for all keys of the page (Algorithm 1). Every query of every head attends its own page and the best other
    pages, `budget` tokens in all, at their true positions. The first `dense_layers` layers attend everything.

    For models whose window is long: no position is changed. The paper selects pages in decode alone; here each query of
    prefill selects as well.

    With `top_p` a query takes only as many pages as reach that share of the estimated attention. The estimate takes a
    page's score as the logit of each of its tokens, so the estimate is more even over pages than true attention.

    Cost: scoring all pages takes O(H · N / page · D) per token, and a token attends at most `budget` keys. A page's
    summary is 2 · G · D numbers.
    """

    placement, plain_choice = "true", "best"
    keep_first = keep_last = False
    uses_queries: ClassVar[bool] = False

    page: int = knob(16, "tokens of a page", least=1)
    budget: int | None = knob(None, "tokens that a query attends; none is a quarter of the window")
    dense_layers: int = knob(2, "first layers, which attend everything", least=0)
    top_p: float | None = top_p_knob()
    example: ClassVar = Example({"page": 2, "budget": 8, "dense_layers": 0}, window=24)

    def resolve(self, window: int) -> Self:
        made = filled(self, budget=max(window // 4, 2 * self.page))
        if made.n_choices < 1:
            raise UsageError(f"{self.name}: budget is {made.budget}; expected two pages of {self.page} tokens or more")
        return made

    @property
    def size(self) -> int:
        return self.page

    @property
    def n_choices(self) -> int:
        return resolved(self.budget) // self.page - 1

    @property
    def access(self) -> AccessPattern:
        return AccessPattern(self.page, local=self.page, per_head=True)

    def summary_shape(self, sizes: Sizes) -> tuple[int, ...]:
        return BOUNDS.shape(sizes)  # in all layers, dense ones included

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return BOUNDS.summarise(q, k, v, step)

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        return BOUNDS.score(q, summary)

    def layer_kind(self, layer: int) -> str:
        return "dense" if layer < self.dense_layers else ""

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterable[Part]:
        return [Part(keys=(0, i + 1), query_at=i)] if layer.kind == "dense" else super().parts_of(i, layer)

    def keep_queries(self, q: Tensor, cache: LayerCache, step: Step) -> None:
        if not self.layer_kind(cache.index):
            super().keep_queries(q, cache, step)

    def choice_cost(self, block: QueryBlock) -> Cost:
        if self.layer_kind(block.layer):
            return Cost(0)
        return self.seen_cost(block) + BOUNDS.cost(block, self.size)
