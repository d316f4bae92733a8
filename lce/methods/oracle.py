"""Methods for analysis that choose by true attention mass, at the cost of full attention.

The method `oracle` chooses chunks or single tokens. `cheating` turns any selecting method into one that chooses by true
mass instead of its scores, with the same budget, placement and tokens that are always attended.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache as cached
from functools import cached_property
from typing import Any, Self

from torch import Tensor

from lce.cache.layer import LayerCache
from lce.errors import UsageError
from lce.methods.base import Method, knob
from lce.methods.costs import Cost, QueryBlock
from lce.methods.esa import ESA
from lce.methods.joint import HOOKS, PROMISES, JointSelection
from lce.methods.mass import Judge, TrueMass
from lce.methods.pages import Pages
from lce.methods.registry import register
from lce.methods.selection import Selection
from lce.methods.selective import ChunkMethod, SelectiveMethod
from lce.methods.selectors import Mass
from lce.methods.step import Step


@dataclass(frozen=True)
class BudgetedChunks(SelectiveMethod, promises={"analysis": ()}):
    """A method for analysis that chooses chunks. `budget`, if given, is in tokens, the query's own chunk included."""

    budget: int | None = knob(None, "tokens that a query attends, instead of chunks", kw_only=True)
    keep_first: bool = knob(True, "the first chunk is always attended", kw_only=True)
    keep_last: bool = knob(True, "the last complete chunk is always attended", kw_only=True)

    def resolve(self, window: int) -> Self:
        """Return this method with all knobs filled in, and `budget`, if given, converted to a number of `chunks`."""
        if self.budget is None:
            return super().resolve(window)
        if self.chunks is not None:
            raise UsageError(f"{self.label}: budget and chunks both say how much a query attends; drop one of them")
        made = super(BudgetedChunks, replace(self, chunks=3)).resolve(window)
        size = made.selection.size
        if self.budget < 3 * size:
            expected = f"expected three chunks of {size} tokens or more"
            raise UsageError(f"{self.label}: budget is {self.budget}; {expected}")
        return replace(made, chunks=self.budget // size, budget=None)

    @cached_property
    def selection(self) -> Selection:
        made = super().selection
        sinks, local = (made.size if is_kept else 0 for is_kept in (self.keep_first, self.keep_last))
        return replace(made, budget=replace(made.budget, sinks=sinks, local=local))


@register("oracle")
@dataclass(frozen=True)
class Oracle(BudgetedChunks):
    """Attention to the chunks of most true attention mass, for each query of each head. For analysis, not for serving.

    The oracle shows what the best selection could do with a budget and a placement: questions that a method misses and
    the oracle answers are failures of selection. `judge` names the attention that counts as true: `constant`, full
    attention at distances `min(i - j, W // 2)`, for texts of any length; or `true`, full attention at the distances
    `i - j`, which fails beyond the window as the method `full` does.

    A query attends the first chunk and the last complete one (unless `keep_first` or `keep_last` is false), the best
    other chunks, and its own chunk: `chunks` in all, or as many as `budget` tokens hold. `chunk_size=1` chooses single
    tokens. With `top_p` a query takes only as many chunks as reach this share of the true attention to the chunks
    before its own.

    Cost: that of full attention, O(H · N · D) per token, in float32, for slices of queries that bound the memory. No
    summaries are kept.
    """

    judge: Judge = knob("constant", "true attention: at true distances, or at W // 2 at most", kw_only=True)

    @property
    def selector(self) -> Mass:
        return Mass(self.judge)


class ByMass(ChunkMethod):
    """A mixin that makes a method choose chunks by their true attention mass."""

    judge: Judge

    @cached_property
    def selection(self) -> Selection:
        own: Any = super()
        made: Selection = replace(own.selection, selector=Mass(self.judge), one_layer=False)
        return made


class JointByMass(JointSelection, promises=dict.fromkeys(PROMISES, HOOKS)):
    """A mixin that makes a `JointSelection` choose by true mass, summed over heads and the block's queries."""

    judge: Judge

    def relevance(self, q: Tensor, far: Tensor, cache: LayerCache, step: Step) -> Tensor:
        mass = TrueMass(self, cache, step, self.judge).of_tokens(q, step.positions(q.device))
        n, size = self.n_candidates(step.start), self.choices[1]
        return mass[self.sinks : self.sinks + n * size].view(n, size).sum(1)

    def log_mass(self, relevance: Tensor, n_heads: int, head_dim: int) -> Tensor:
        return relevance.log()

    def choice_cost(self, block: QueryBlock) -> Cost:
        read = block.stop * block.n_kv_heads * block.head_dim
        return replace(super().choice_cost(block), scores=None, state_read=read)


def cheating(method: Method, judge: Judge = "constant") -> Method:
    """Return a method that selects by true mass, as `judge` defines it, with the budget and placement of `method`.

    Raises `UsageError` for a method that selects nothing.
    """
    if isinstance(method, Pages):
        return replace(method, select=Mass(judge))
    if not selects(method):
        raise UsageError(
            f"{method.label} selects nothing, so no selection can be replaced; expected a selecting method"
        )
    knobs: dict[str, Any] = {each.name: getattr(method, each.name) for each in fields(method) if each.init}
    if isinstance(method, ESA):
        knobs |= {"eps": 0, "compress": "none", "maps": None}
    cls: Any = type(method)
    found: Method = (cls if "judge" in knobs else _by_mass(cls))(**knobs | {"judge": judge})
    return found


@cached
def _by_mass(cls: Any) -> type:
    """Return a subclass of `cls`, the class of a selecting method, that chooses by true mass."""
    knob = ("judge", Judge, field(default="constant", kw_only=True))
    bases = (ByMass if issubclass(cls, ChunkMethod) else JointByMass, cls)
    return make_dataclass(f"Oracle{cls.__name__}", [knob], bases=bases, namespace={"__module__": __name__}, frozen=True)


def selects(method: Method) -> bool:
    """Return whether a method selects the keys that a query attends, as `cheating` requires."""
    return isinstance(method, ChunkMethod | JointSelection)
