"""Quest: each query attends the pages of keys whose logits could be largest, at their true positions."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

from lce.errors import UsageError
from lce.methods.base import Example, filled, knob, resolved
from lce.methods.budget import TOP_P, Budget
from lce.methods.placement import TruePositions
from lce.methods.registry import register
from lce.methods.selection import Selection
from lce.methods.selective import ChunkMethod
from lce.methods.selectors import Bounds


@register("quest")
@dataclass(frozen=True)
class Quest(ChunkMethod):
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

    page: int = knob(16, "tokens of a page", least=1)
    budget: int | None = knob(None, "tokens that a query attends; none is a quarter of the window")
    dense_layers: int = knob(2, "first layers, which attend everything", least=0)
    top_p: float | None = knob(None, TOP_P, is_share=True, kw_only=True)
    example: ClassVar = Example({"page": 2, "budget": 8, "dense_layers": 0}, window=24)

    def resolve(self, window: int) -> Self:
        made = filled(self, budget=max(window // 4, 2 * self.page))
        if resolved(made.budget) < 2 * made.page:
            raise UsageError(f"{self.name}: budget is {made.budget}; expected two pages of {self.page} tokens or more")
        return made

    @cached_property
    def selection(self) -> Selection:
        budget = Budget(self.budget, sinks=0, local=0, top_p=self.top_p)
        return Selection(self.page, Bounds(), TruePositions(), budget, dense_layers=self.dense_layers)
