"""Chunks within a budget of tokens: the base of the selectors for analysis."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from lce.errors import UsageError
from lce.methods.selective import SelectiveMethod, WithoutSummaries


@dataclass(frozen=True)
class BudgetedChunks(WithoutSummaries, SelectiveMethod):
    """A selector for analysis, not to serve with; its size may be given in tokens, the own chunk included."""

    analysis: ClassVar[bool] = True

    budget: int | None = field(default=None, kw_only=True)
    keep_first: bool = field(default=True, kw_only=True)
    keep_last: bool = field(default=True, kw_only=True)

    knob_help: ClassVar = {
        "budget": "tokens that a query attends, instead of chunks",
        "keep_first": "the first chunk is always attended",
        "keep_last": "the last complete chunk is always attended",
    }

    def resolve(self, window: int) -> Self:
        return super(BudgetedChunks, self._with_chunks(window)).resolve(window)

    def forced(self, chunk_ids: Tensor, own: Tensor) -> Tensor:
        first, last = chunk_ids == 0, chunk_ids == own - 1
        return (first & self.keep_first) | (last & self.keep_last)

    def _with_chunks(self, window: int) -> Self:
        """Return this method with its budget, if any, as a number of `chunks` of the resolved size."""
        if self.budget is None:
            return self
        if self.chunks is not None:
            raise UsageError(f"{self.label}: budget and chunks both say how much a query attends; drop one of them")
        size = SelectiveMethod.resolve(replace(self, chunks=3), window).size
        if self.budget < 3 * size:
            raise UsageError(f"{self.label}: budget is {self.budget}; expected three chunks of {size} tokens or more")
        knobs: dict[str, Any] = {"chunks": self.budget // size, "budget": None}
        return replace(self, **knobs)
