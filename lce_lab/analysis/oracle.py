"""Methods for analysis that choose by true attention mass, at the cost of full attention, or at random.

The method `oracle` chooses chunks or single tokens. `cheating` turns any selecting method into one that chooses by true
mass instead of its scores, with the same budget, placement and tokens that are always attended.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache as cached
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lce.errors import UsageError
from lce.methods import ESA, Cost, LayerCache, Method, Pages, QueryBlock, SelectiveMethod, Step, knob, register
from lce.methods.joint import HOOKS, PROMISES, JointSelection
from lce.methods.selection import Selection
from lce.methods.selective import ChunkMethod
from lce.methods.selectors import ContextSelector, random_scores
from lce_lab.analysis.mass import Judge, TrueMass


@dataclass(frozen=True)
class Mass(ContextSelector, name="oracle"):
    """For analysis: a chunk's score is the logarithm of its true attention mass, as `judge` defines truth."""

    judge: Judge = knob("constant", "true attention: at true distances, or at W // 2 at most")

    def scores(
        self, method: Method, q: Tensor, n_chunks: int, selection: Selection, cache: LayerCache, step: Step
    ) -> Tensor:
        mass = TrueMass(method, cache, step, self.judge)
        return mass.of_chunks(q, step.positions(q.device), selection.size, n_chunks)

    def together(self, scores: Tensor, n_choosers: int) -> Tensor:
        return scores if n_choosers == len(scores) else scores.unflatten(0, (n_choosers, -1)).logsumexp(1)

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int, size: int) -> Tensor:
        return scores

    def cost(self, block: QueryBlock, selection: Selection) -> Cost:
        """Return the cost of choosing, which reads all keys; scores are not counted."""
        return Cost(0, None, state_read=block.stop * block.n_kv_heads * block.head_dim)


@dataclass(frozen=True)
class Random(ContextSelector, name="random"):
    """For analysis: random scores. A score depends on seed, layer, head, query index and chunk alone."""

    seed: int = knob(0, "another seed draws other chunks")
    by_number: ClassVar[bool] = True

    def scores(
        self, method: Method, q: Tensor, n_chunks: int, selection: Selection, cache: LayerCache, step: Step
    ) -> Tensor:
        return random_scores(len(q), n_chunks, step, cache.index, q.device, self.seed)

    def together(self, scores: Tensor, n_choosers: int) -> Tensor:
        """Return the scores of the first head of each group."""
        return scores[:: len(scores) // n_choosers]

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int, size: int) -> Tensor:
        return torch.zeros_like(scores)

    def cost(self, block: QueryBlock, selection: Selection) -> Cost:
        return Cost(0)


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


@register("random")
@dataclass(frozen=True)
class RandomChunks(BudgetedChunks):
    """Attention to random chunks, drawn for every query of every head. For analysis: a baseline for selecting methods.

    A draw depends on `seed`, layer, head, query index and chunk alone, not on the block size. The first chunk and the
    last complete one are always attended, as in `SelectiveMethod`, unless `keep_first` or `keep_last` is false.
    `budget` is given in tokens, in place of `chunks`, and includes the query's own chunk. With `top_p` a query takes
    that share of the chunks before its own, `chunks` at most.

    Cost: O(H · M) draws per token. A token attends at most `chunks · L` keys.
    """

    seed: int = knob(0, "another seed draws other chunks", kw_only=True)

    @property
    def selector(self) -> Random:
        return Random(self.seed)


class ByMass(ChunkMethod):
    """A mixin that makes a method choose chunks by their true attention mass."""

    judge: Judge

    @cached_property
    def selection(self) -> Selection:
        own: Selection = super().selection  # type: ignore[safe-super]
        return replace(own, selector=Mass(self.judge), one_layer=False)


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
        why = f"{method.label} selects nothing, so no selection can be replaced"
        raise UsageError(f"{why}; expected a selecting method")
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
