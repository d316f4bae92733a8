"""Pages: a `Selection` spelled by a user. Each query attends pages that any selector chose, at any placement."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from lce.methods.base import Example, filled, knob
from lce.methods.budget import Budget
from lce.methods.choosing import block_of
from lce.methods.registry import check_renamed, register
from lce.methods.selection import Placement, Selection, Selector, Share, SideBySide
from lce.methods.selective import ChunkMethod
from lce.methods.selectors import Bounds
from lce.methods.step import ModelFacts


@register("pages")
@dataclass(frozen=True)
class Pages(ChunkMethod):
    """Attention to pages of tokens, with the selector, the placement and the budget as knobs.

    Each query attends its own page up to itself, the first `budget.sinks` and the last `budget.local` tokens (in whole
    pages, rounded up), and the best of the other complete pages: `budget` tokens in all. Each head chooses alone; with
    `share` the query heads of a KV head, or all heads of a layer, choose together.

    `select` says what is kept of a page and how a page is scored; keys and queries are rotated as `placement` says.
    `summary` is the summary of LongHeads, `bounds` are Quest's bounds of keys, `mean` is the mean of the page's keys,
    `representatives` is the sum of the `repr_tokens` keys that received most attention from the page's own queries, an
    idea of InfLLM. `lowdim` takes the page's best token by ESA's low-dim scores, all heads together, and `best_key` by
    `q · k` without positions, as ReAttention does. For analysis, `oracle` chooses by true attention mass (`judge`), and
    `random` by `seed`.

    `placement` says where chosen pages are seen. `side_by_side`: in their order right before the own page, from
    position 0. `true`: at their true distances. `constant`: at the distance `far`, by default the least that no local
    token has. `grouped`: at the distances of Self-Extend, whose tokens far away share a position with `group - 1`
    neighbours. `dual`: at the distances of Dual Chunk Attention, by large chunks of `chunk_size` tokens. Local tokens
    are seen at true distances, under `dual` in the own large chunk and across its border.

    With `queries=page` the queries of a page choose together, by their summed scores, where one pass has all of them.
    Their keys are gathered once, which takes less time in prefill. Queries of a page that a pass cuts choose alone:
    decode steps, and the last tokens of a prompt. In passes of whole pages the result is the same whatever the number
    of pages.

    Published methods are points of this plane: `select=summary placement=side_by_side` with `page`, `budget.sinks` and
    `budget.local` all L is the paper's `longheads`, `select=bounds placement=true` without sinks and local tokens is
    `quest` without dense layers.

    Cost: a token attends at most `budget` keys. Scoring depends on `select`.
    """

    select: Selector = knob(Bounds(), "how pages are chosen")
    placement: Placement = knob(SideBySide(), "where chosen pages are seen")
    page: int | None = knob(None, "tokens of a page; none is 16, fewer in a window below 512", least=1)
    budget: Budget = knob(Budget(), "how much a query attends")
    share: Share | None = knob(
        None, "which heads choose together: none, a KV head's, or all; none is head, with lowdim layer"
    )
    queries: Literal["alone", "page"] = knob("alone", "which queries choose together in prefill: none, or a page's")
    example: ClassVar = Example({"page": 2, "budget": 10, "budget.sinks": 2, "budget.local": 2})

    def __new__(cls, *args: Any, **knobs: Any) -> Self:
        check_renamed("pages", knobs)
        return super().__new__(cls)

    def for_model(self, model: ModelFacts) -> Self:
        select = self.select.for_model(self.label, model)
        drops = model.plan_only and select != self.select  # a plan without maps: as many low-dim keys, by PCA
        return replace(self, select=select, budget=replace(self.budget, top_p=None) if drops else self.budget)

    def resolve(self, window: int) -> Self:
        made = filled(self, page=min(16, max(1, window // 32)), share=self.select.usual_share)
        fitted = made.selection.fitted(self.label, window)
        return replace(made, placement=fitted.placement, budget=fitted.budget)

    @cached_property
    def selection(self) -> Selection:
        by_page, share = self.queries == "page", self.share or "head"
        return Selection(self.page or 1, self.select, self.placement, self.budget, share, by_page)

    @property
    def block(self) -> int:
        least = self.selection.size if self.selection.by_page else 1
        return -(-block_of(self.selection.n_choices) // least) * least
