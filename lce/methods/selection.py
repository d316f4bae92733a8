"""`Selection`: which chunks of a text a query attends, and where it sees them. A value of selector, placement, budget.

A selector says what is kept of a chunk, and scores chunks for queries. A placement says where chosen chunks are seen,
how keys are cached, and how queries are rotated to score chunks. A budget says how many chunks are chosen. The three
are independent. `lce.methods.choosing` runs a selection.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from lce.attention import Turn, best_chunks, rotate, sum_heads
from lce.cache.layer import LayerCache
from lce.cache.layout import AccessPattern, CacheLayout
from lce.cache.method_state import FileTensor, MethodState
from lce.errors import UsageError
from lce.methods.base import Method, resolved
from lce.methods.budget import Budget
from lce.methods.costs import Cost, QueryBlock
from lce.methods.knobs import Knobs, fill_in
from lce.methods.parts import CHOSEN, Part
from lce.methods.step import ModelFacts, PassFacts, Step

Share = Literal["head", "group", "layer"]  # which heads choose together: none, the query heads of a KV head, or all
Sizes = CacheLayout | QueryBlock  # both have the sizes of a model's attention
# A function of a slice of t queries and the slice's step, which returns scores `[C, t, M]`; and the queries of a slice.
Scorer = tuple[Callable[[slice, Step], Tensor], int]


class Selector(Knobs, ABC):
    """A rule that scores chunks of L tokens, so that a query can choose the best.

    A subclass with a `name` is a kind of selector; a package names its own in the entry-point group `lce.selectors`.
    """

    kinds: ClassVar[dict[str, type[Knobs]]] = {}
    entry_points: ClassVar[str] = "lce.selectors"
    usual_share: ClassVar[Share] = "head"
    uses_queries: ClassVar[bool] = False  # whether summaries are made of queries, which are kept until then
    by_number: ClassVar[bool] = False  # whether a head's scores depend on the head's number among all heads
    without_positions: ClassVar[bool] = False  # whether unrotated keys are scored, which the cache then has
    takes_best: ClassVar[bool] = True  # whether chunks are taken by `Selection.forced` and by score alone

    def for_model(self, label: str, model: ModelFacts) -> Self:
        """Return this selector with knobs set from the model's files, for the method `label`."""
        return self

    def check(self, label: str, selection: Selection, window: int) -> None:
        """Raise `UsageError` for knobs that cannot work, or do not fit the rest of a selection."""
        fill_in(self, label, "select.")

    @abstractmethod
    def shape(self, sizes: Sizes, selection: Selection) -> tuple[int, ...] | None:
        """Return the shape `[S, …]` of one chunk's summary; m chunks have `[S, m, …]`. `(0,)`: nothing is kept."""

    def summary_bytes(self, layout: CacheLayout, selection: Selection) -> int:
        """Return the most bytes of one chunk's summary."""
        return math.prod(resolved(self.shape(layout, selection))) * layout.dtype.itemsize

    def state(self, layout: CacheLayout, selection: Selection) -> Mapping[str, MethodState]:
        """Return what a layer keeps besides summaries and open queries."""
        return {}

    def could_keep(
        self, kept: Mapping[str, FileTensor], layout: CacheLayout, selection: Selection, n_tokens: int
    ) -> bool:
        """Return whether a file's tensors can be what `state` holds after `n_tokens` tokens."""
        return True

    def keep_keys(self, selection: Selection, k: Tensor, cache: LayerCache, step: Step) -> None:
        """Keep facts of a block's unrotated keys `[G, T, D]`, before `keep`."""

    def keep(self, method: Method, selection: Selection, q: Tensor, cache: LayerCache, step: Step) -> None:
        """Keep the summaries of chunks that a block of unrotated queries `[H, T, D]` completes; before `scorer`."""

    @abstractmethod
    def scorer(self, method: Method, selection: Selection, q: Tensor, cache: LayerCache, step: Step) -> Scorer:
        """Return a function that scores a slice of the queries `q [H, T, D]`, and the number of queries in a slice."""

    def together(self, scores: Tensor, n_choosers: int) -> Tensor:
        """Return the scores `[C, T, M]` by which C groups of neighbouring heads choose, from `scores [H, T, M]`."""
        return sum_heads(scores, len(scores) // n_choosers)

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int, size: int) -> Tensor:
        """Estimate the logarithms of chunks' attention mass, up to a constant per query, from scores `[C, T, M]`.

        By default, a chunk's score is the logit of each of its tokens, summed over the heads that choose together.
        """
        return scores.float() * (len(scores) / n_heads / math.sqrt(head_dim))

    def select(self, selection: Selection, scores: Tensor, step: Step) -> Tensor:
        """Return chosen chunks `[C, T, K]` by scores `[C, T, M]`; see `Selection.best`."""
        return selection.best(scores, step)

    def forced(self, selection: Selection, chunk_ids: Tensor, own: Tensor) -> Tensor:
        """Return which of `chunk_ids [M]` are always taken, `[T, M]` bool; see `Selection.forced`."""
        return selection.forced(chunk_ids, own)

    @abstractmethod
    def cost(self, block: QueryBlock, selection: Selection) -> Cost:
        """Return the cost of choosing chunks, without attending them."""


class Placement(Knobs, ABC):
    """A rule for the positions at which a query sees its chosen chunks and its own chunk.

    A subclass with a `name` is a kind of placement.
    """

    kinds: ClassVar[dict[str, type[Knobs]]] = {}
    true_within: ClassVar[bool] = False  # whether distances are true if a query attends all chunks before its own
    exact: ClassVar[bool] = False  # whether the own chunk is seen by recent keys, although keys are cached rotated
    local_is_near: ClassVar[bool] = False  # whether local chunks are seen with the own one, at true distances

    def fitted(self, label: str, selection: Selection, window: int) -> Self:
        """Return this placement with all knobs filled in. Raises `UsageError` for knobs that cannot work."""
        return fill_in(self, label, "placement.")

    def limit(self, selection: Selection, window: int) -> int | None:
        """Return the length of the longest text whose distances all fit in the window; None: any length."""
        return None

    def key_positions(self, indices: Tensor, size: int) -> Tensor | None:
        """Return the positions at which keys are cached; None: keys are unrotated."""
        return None

    @abstractmethod
    def part(self, i: Tensor, selection: Selection, n_slots: int) -> Part:
        """Return the `Part` of the chunks that queries `i [T]` choose, in `n_slots` slots."""

    def bands(self, i: Tensor, size: int) -> Tensor | None:
        """Return the `Part.bands` of queries `i [T]`; None: positions do not differ by a range of chunks."""
        return None

    def scored(self, q: Tensor, step: PassFacts, selection: Selection) -> list[Tensor]:
        """Return the block's unrotated queries `q`, rotated to score chunks: once for all chunks, or for each band.

        By default they are rotated to the positions from which they see the chunks.
        """

        def make() -> list[Turn]:
            i = step.positions(q.device)
            at = self.part(i, selection, 0).query_at
            if not isinstance(at, Tensor):
                return [step.far_turn(at, q)]
            return [step.true_turn(q) if at is i else step.rope.turn(x, q.dtype) for x in at.view(len(i), -1).unbind(1)]

        return [rotate(q, turn) for turn in step.once("scored", make)]


@dataclass(frozen=True)
class Selection:
    """What queries attend: chunks of `size` tokens that `selector` scores, at `placement`, as many as `budget` holds.

    A query in chunk `o` attends chunk `o` up to the query, and `n_choices` of the complete chunks before chunk `o`:
    first those of the budget's sinks and local tokens, then the chunks with the best scores. Each head chooses alone,
    or with others by summed scores (`share`). With `by_page` the queries of a chunk choose together where one pass has
    all of them. The first `dense_layers` layers attend everything. With `one_layer`, the next one chooses for the rest.
    """

    size: int
    selector: Selector
    placement: Placement
    budget: Budget
    share: Share = "head"
    by_page: bool = False
    dense_layers: int = 0
    one_layer: bool = False

    @cached_property
    def n_local(self) -> int:
        """The number of complete chunks before a query's own chunk that hold the query's `local` tokens."""
        return -(-resolved(self.budget.local) // self.size)

    @cached_property
    def n_near(self) -> int:
        """The number of complete chunks that a query sees with its own chunk, without a choice."""
        return self.n_local if self.placement.local_is_near else 0

    @cached_property
    def n_first(self) -> int:
        """The number of first chunks that are always taken."""
        return -(-resolved(self.budget.sinks) // self.size)

    @cached_property
    def n_last(self) -> int:
        """The number of a query's last candidates, which are complete chunks before its own, that are always taken."""
        return self.n_local - self.n_near

    @cached_property
    def n_choices(self) -> int:
        """The largest number of complete chunks that a query attends besides its own chunk and the near ones."""
        most = resolved(self.budget.tokens if self.budget.growth is None else self.budget.grows_to)
        return most // self.size - 1 - self.n_near

    @property
    def reach(self) -> int:
        """The most tokens that a query sees with its own chunk: the tokens of the near chunks and of its own."""
        return (self.n_near + 1) * self.size

    @property
    def varies(self) -> bool:
        """Whether queries with equally many candidates may attend different numbers of chunks."""
        return self.budget.top_p is not None or self.budget.growth is not None

    @property
    def access(self) -> AccessPattern:
        sinks, local = self.n_first * self.size, (self.n_local + 1) * self.size
        turned = self.selector.without_positions and self.placement.key_positions(torch.empty(0), 1) is not None
        return AccessPattern(self.size, sinks=sinks, local=local, per_head=self.share != "layer", turned=turned)

    def n_chosen(self, i: Tensor) -> Tensor | None:
        """Return how many complete chunks queries `i [T]` choose at most, `[T]`; None: `n_choices` for all."""
        if self.budget.growth is None:
            return None
        return (self.budget.at(i) // self.size - 1 - self.n_near).clamp(max=self.n_choices)

    def n_choosers(self, n_heads: int, n_kv_heads: int) -> int:
        """Return the number of groups of neighbouring heads that choose together."""
        return {"head": n_heads, "group": n_kv_heads, "layer": 1}[self.share]

    def ends(self, step: Step, device: torch.device) -> Tensor:
        """Return the first chunk after each query's candidates, `[T, 1]`: its own, or the first seen with its own."""
        return (step.positions(device) // self.size - self.n_near)[:, None]

    def forced(self, chunk_ids: Tensor, own: Tensor) -> Tensor:
        """Return which of `chunk_ids [M]` are always taken, `[T, M]` bool; `own [T, 1]` are the ends of candidates."""
        return (chunk_ids < self.n_first) | ((chunk_ids >= own - self.n_last) & (chunk_ids < own))

    def best(self, scores: Tensor, step: Step) -> Tensor:
        """Return the chunks `[C, T, K]` with the best scores `[C, T, M]`: ids ascending, then -1. Time: O(C · T · M).

        A query gets `n_choices` of the chunks before its own, or all of them if there are fewer; placement relies on
        this number. For any scores, even infinite and NaN ones, no query gets its own chunk or a later one.
        """
        n_chunks, device = scores.shape[-1], scores.device
        forced = self.all_forced(n_chunks, step, device)
        if self.n_near:
            ids = step.once(f"ids {n_chunks}", lambda: torch.arange(n_chunks, device=device))
            near = step.once(f"near {n_chunks}", lambda: ids >= self.ends(step, device))
            scores = scores.masked_fill(near, -torch.inf)
        return best_chunks(scores, forced, self.n_choices, step.start if step.at is None else step.at, self.size)

    def all_forced(self, n_chunks: int, step: Step, device: torch.device) -> Tensor:
        """Return which of the first chunks each query always takes, `[T, n_chunks]`; computed once per pass."""

        def make() -> Tensor:
            chunk_ids, ends = torch.arange(n_chunks, device=device), self.ends(step, device)
            found = self.selector.forced(self, chunk_ids, ends)
            return (found & (chunk_ids < ends) if self.n_near else found).expand(len(ends), n_chunks).contiguous()

        return step.once(f"forced {n_chunks}", make)

    def fitted(self, label: str, window: int) -> Self:
        """Return this selection with all knobs filled in. Raises `UsageError` for knobs that do not fit together."""
        budget = fill_in(self.budget, label, "budget.", sinks=self.size, local=self.size)
        made = replace(self, budget=budget)
        n_least = 1 + made.n_near + max(1, made.n_first + made.n_last)
        budget = fill_in(budget, label, "budget.", tokens=max(window // 2, n_least * self.size))
        if resolved(budget.tokens) < n_least * self.size:
            raise UsageError(
                f"{label}: budget is {budget.tokens}; expected {n_least * self.size} or more, {n_least} pages of "
                f"{self.size} tokens: lower page, budget.sinks or budget.local"
            )
        made = replace(made, budget=budget.fitted(label, window))
        made = replace(made, placement=self.placement.fitted(label, made, window))
        made.selector.check(label, made, window)
        if self.by_page and made.varies:
            other = "top_p" if budget.growth is None else "growth"
            why = "with queries=page all queries of a page attend as many pages"
            raise UsageError(f"{label}: {why}; drop budget.{other}")
        return made


@dataclass(frozen=True)
class SideBySide(Placement, name="side_by_side"):
    """The placement of LongHeads: chosen chunks side by side from position 0, then the own chunk, within the window."""

    true_within: ClassVar[bool] = True

    def limit(self, selection: Selection, window: int) -> int | None:
        return window if (selection.n_choices + 1) * selection.size > window else None

    def key_positions(self, indices: Tensor, size: int) -> Tensor | None:
        return indices % size

    def part(self, i: Tensor, selection: Selection, n_slots: int) -> Part:
        """Return the `Part`. Chunks are cached at positions 0..L-1, so the query's position is lower by s·L for slot s.

        Example: L = 4, two slots, index 13 (own chunk 3, offset 1): the query is at 9 for slot 0, at 5 for slot 1.
        """
        size = selection.size
        taken = (i // size).clamp(max=selection.n_choices)
        behind = (taken[:, None] - torch.arange(n_slots, device=i.device)).clamp(min=0) * size
        return Part(CHOSEN, behind + (i % size)[:, None], n_slots=taken)

    def scored(self, q: Tensor, step: PassFacts, selection: Selection) -> list[Tensor]:
        return [q]
