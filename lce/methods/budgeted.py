"""Selectors for analysis: chunks within a budget of tokens, chosen without summaries."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from lce.attention import SCORES_AT_ONCE
from lce.cache.layer import LayerCache
from lce.cache.layout import CacheLayout
from lce.cache.method_state import FileTensor, MethodState
from lce.errors import UsageError
from lce.methods.base import knob
from lce.methods.costs import Cost, QueryBlock
from lce.methods.parts import RECENT
from lce.methods.selective import ChunkSelection, Scorer, SelectiveMethod
from lce.methods.step import Step


class WithoutSummaries(ChunkSelection):
    """A mixin for selectors of chunks without summaries; `chunk_scores` gives the scores."""

    @abstractmethod
    def chunk_scores(self, q: Tensor, n_chunks: int, cache: LayerCache, step: Step) -> Tensor:
        """Score the first `n_chunks` chunks for some of the block's queries, unrotated `[H, T, D]`: `[C, T, M]`."""

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        return {name: kept for name, kept in super().state(layout).items() if name == RECENT}

    def could_keep(self, layer: int, kept: Mapping[str, FileTensor], layout: CacheLayout, n_tokens: int) -> bool:
        return True

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        raise AssertionError("no chunk is summarised")

    def keep_queries(self, q: Tensor, cache: LayerCache, step: Step) -> None:
        pass

    def scorer(self, q: Tensor, cache: LayerCache, step: Step) -> tuple[Scorer, int]:
        n_chunks = step.stop // self.size
        rows = max(1, SCORES_AT_ONCE // (len(q) * step.stop))
        return lambda here, some: self.chunk_scores(q[:, here], n_chunks, cache, some), rows

    def choice_cost(self, block: QueryBlock) -> Cost:
        """Count the attended chunks, as if the heads of a KV head chose differently; choosing reads nothing."""
        return self.selection_cost(block, vectors_read=0, summaries=0, products=0)

    @property
    def decodes(self) -> bool:
        return False


@dataclass(frozen=True)
class BudgetedChunks(WithoutSummaries, SelectiveMethod):
    """A selector for analysis, not to serve with; its size may be given in tokens, the own chunk included."""

    analysis: ClassVar[bool] = True

    budget: int | None = knob(None, "tokens that a query attends, instead of chunks", kw_only=True)
    keep_first: bool = knob(True, "the first chunk is always attended", kw_only=True)
    keep_last: bool = knob(True, "the last complete chunk is always attended", kw_only=True)

    def resolve(self, window: int) -> Self:
        """Return this method resolved, with its budget, if any, as a number of `chunks`."""
        if self.budget is None:
            return super().resolve(window)
        if self.chunks is not None:
            raise UsageError(f"{self.label}: budget and chunks both say how much a query attends; drop one of them")
        made = super(BudgetedChunks, replace(self, chunks=3)).resolve(window)
        if self.budget < 3 * made.size:
            expected = f"expected three chunks of {made.size} tokens or more"
            raise UsageError(f"{self.label}: budget is {self.budget}; {expected}")
        return replace(made, chunks=self.budget // made.size, budget=None)
