"""Selective methods: every query chooses the chunks that it attends.

Selection and placement are two axes. A selector says what to keep of a chunk and how to score it. `placement` says
where chosen chunks are seen; how keys are cached and which query is scored follow from it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from lce.attention import (
    SCORES_AT_ONCE,
    Attended,
    PlainChoice,
    Runs,
    Turn,
    best_chunks,
    dot_products,
    plain_runs,
    rotate,
    runs_of_chunks,
    scores_at_once,
)
from lce.cache.layer import LayerCache
from lce.cache.layout import AccessPattern, CacheLayout
from lce.cache.method_state import MethodState, OpenChunk, Summaries
from lce.errors import UsageError
from lce.methods.attending import PlacedPart, slot_shift
from lce.methods.base import Example, Method, is_like, says_for
from lce.methods.costs import Cost, QueryBlock
from lce.methods.decoding import Span
from lce.methods.hooks import SELECTION_CHECKS
from lce.methods.parts import RECENT, LayerFacts, Part
from lce.methods.placement import PLACEMENTS, Placement
from lce.methods.step import DeviceStep, Step
from lce.methods.top_p import TOP_P_HELP, check_top_p, prune

SUMMARIES, OPEN_QUERIES = "summaries", "open queries"


def _inside(rows: Tensor, step: Step, some: Step) -> Tensor:
    """Return the queries of `rows` that are in the part `some` of the block, counted from the part's first."""
    rows = rows - (some.start - step.start)
    return rows[(rows >= 0) & (rows < some.stop - some.start)]


class ChunkSelection(Method, ABC):
    """The base of all selectors of chunks; `SelectiveMethod` adds the usual knobs.

    A query of chunk `o` attends chunk `o` up to itself, and `n_choices` of the complete chunks before: the chunks that
    `forced` names, then the best scoring ones.
    """

    hook_checks = SELECTION_CHECKS
    placement: str  # a knob, or fixed
    top_p: float | None = None  # likewise
    uses_queries: ClassVar[bool] = True  # whether `summarise` looks at queries: they are kept while a chunk is open
    summary_vectors: ClassVar[int] = 1  # vectors `[D]` a query head in a chunk's summary

    @property
    @abstractmethod
    def size(self) -> int:
        """Tokens in a chunk, L."""

    @property
    @abstractmethod
    def n_choices(self) -> int:
        """How many whole chunks a query sees besides its own."""

    @property
    def placed(self) -> Placement:
        """The placement of chosen chunks."""
        return PLACEMENTS[self.placement]

    @property
    def access(self) -> AccessPattern:
        return AccessPattern(self.size, sinks=self.size, local=self.size, per_head=True)

    @property
    def n_recent(self) -> int:
        return self.size if self.unrotated else 0

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        """Return the states: summaries of complete chunks, the open chunk's queries, and recent keys if needed."""
        kept: dict[str, MethodState] = {SUMMARIES: Summaries(self.summary_vectors * layout.query_bytes, self.size)}
        if self.uses_queries:
            kept[OPEN_QUERIES] = OpenChunk(self.size, layout.query_bytes)
        return {**kept, **super().state(layout)}

    def could_keep(self, layer: int, kept: Mapping[str, Tensor], layout: CacheLayout, n_tokens: int) -> bool:
        summaries, n_chunks = kept.get(SUMMARIES), n_tokens // self.size
        if summaries is None:
            return True  # not every layer needs summaries; one that does notices
        vectors = not self.keeps_vectors or is_like(
            summaries, (layout.n_heads, n_chunks, layout.head_dim), layout.dtype
        )
        return vectors and summaries.shape[1] == n_chunks

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        return window if self.placement == "true" else None

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return self.placed.key_positions(indices, self.size)

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterable[Part]:
        own = self.key_positions(i)
        yield Part((i // self.size * self.size, i + 1), i if own is None else own, exact=own is None)
        yield self.placed.part(i, self.size, min(self.n_choices, layer.longest // self.size), self.n_choices)

    def keep_queries(self, q: Tensor, cache: LayerCache, step: Step) -> None:
        """Summarise the chunks that this block completes; keep the queries of the open chunk."""
        size = self.size
        if (at := step.at) is not None:
            if self.uses_queries:
                offset: Tensor = step.once("offset in chunk", lambda: at % size)
                cache.kept(OpenChunk, OPEN_QUERIES).write_on_device(q, offset)
            return
        first, stop = step.start // size, step.stop // size
        if stop > first:
            k, v = (x.unflatten(1, (-1, size)) for x in cache.span(first * size, stop * size))
            queries = self._complete_queries(q, first, stop, cache, step)
            summaries, kept = self.summarise(queries, k, v, step), cache.kept(Summaries, SUMMARIES)
            if (n_bytes := summaries[:, 0].numel() * summaries.element_size()) > kept.row_bytes:
                raise UsageError(
                    f"{self.label}: summarise keeps {n_bytes} bytes of a chunk; expected at most {kept.row_bytes}, or "
                    "a larger summary_vectors"
                )
            kept.write(summaries, first)
        open_from = max(step.start, stop * size)
        if self.uses_queries and open_from < step.stop:
            cache.kept(OpenChunk, OPEN_QUERIES).write(q[:, open_from - step.start :], open_from)

    def _complete_queries(self, q: Tensor, first: int, stop: int, cache: LayerCache, step: Step) -> Tensor:
        """Return the queries of chunks `first..stop-1`, which the block completes, rotated as keys: `[H, m, L, D]`."""
        size = self.size
        if not self.uses_queries:
            return q.new_empty(len(q), stop - first, 0, q.shape[-1])
        queries = q[:, : stop * size - step.start]
        if step.start % size:
            pending = cache.kept(OpenChunk, OPEN_QUERIES).span(first * size, step.start)
            queries = torch.cat((pending, queries), dim=1)

        def make() -> Turn | None:
            positions = self.key_positions(torch.arange(first * size, stop * size, device=q.device))
            return None if positions is None else step.rope.turn(positions.view(stop - first, size), q.dtype)

        complete, turn = queries.unflatten(1, (stop - first, size)), step.once("chunk turn", make)
        return complete if turn is None else rotate(complete, turn)

    @abstractmethod
    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Summarise m complete chunks: `q [H, m, L, D]`, `k v [G, m, L, D]`, q and k rotated as keys are cached.

        Without `uses_queries`, q is `[H, m, 0, D]`. Returns `[S, m, …]`; for the default `score` one vector a chunk,
        `[H, m, D]`. `x.repeat_interleave(len(q) // len(k), dim=0)` gives query heads what their KV head has.
        """

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        """Return how well each chunk answers each query: `q [H, T, D]`, `summary [S, M, …]` to `[C, T, M]`.

        Queries are unrotated for `side_by_side`, at their true positions for `true`, at the constant distance for
        `constant`. C is H, or fewer if heads share a choice (C divides H).
        """
        return dot_products(q, summary)

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int) -> Tensor:
        """Turn scores `[C, T, M]` into logarithms of chunks' attention mass, up to a constant a query, for `top_p`.

        By default, a score is taken as the logit of every token of the chunk; sums over heads become means.
        """
        return scores.float() * (len(scores) / n_heads / math.sqrt(head_dim))

    @property
    def keeps_vectors(self) -> bool:
        """Whether scores are dot products with summaries: one vector a chunk and query head."""
        return type(self).score is ChunkSelection.score

    def forced(self, chunk_ids: Tensor, own: Tensor) -> Tensor:
        """Return which chunks are always taken, `[T, M]` bool; `own [T, 1]` is the query's chunk."""
        return (chunk_ids == 0) | (chunk_ids == own - 1)

    def select(self, scores: Tensor, step: Step) -> Tensor:
        """Choose chunks `[C, T, K]` by scores `[C, T, M]`, ascending, -1 behind the last. Time: O(C · T · M).

        A query gets `n_choices` of the chunks before its own, or all if fewer; placement relies on this. For any
        scores, even infinite and NaN ones, no query gets its own chunk or a later one.
        """
        n_chunks = scores.shape[-1]

        def make() -> Tensor:
            chunk_ids = torch.arange(n_chunks, device=scores.device)
            own = (step.positions(scores.device) // self.size)[:, None]
            return self.forced(chunk_ids, own).expand(len(own), n_chunks).contiguous()

        forced: Tensor = step.once(f"forced {n_chunks}", make)
        return best_chunks(scores, forced, self.n_choices, step.start if step.at is None else step.at, self.size)

    def choose(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor | None:
        """Choose the chunks that each query of each head attends, `[H, T, K]`; None while there is no choice.

        For a `DeviceStep` returns `[C, 1, K]` for C groups of heads: C is 1, G or H.
        """
        if isinstance(step, DeviceStep):
            return self._choose_on_device(q, cache, step)
        if step.stop <= self.size:
            return None
        summary = cache.kept(Summaries, SUMMARIES).span(0, step.stop // self.size)
        scored = self.placed.scored(q, step, self.size)
        rows = max(1, scores_at_once(summary) // (len(q) * summary.shape[1]))

        def score(here: slice, some: Step) -> Tensor:
            return self.score(scored[:, here], summary, some, cache.index)

        return self._choose_by(score, rows, q, cache, step)

    def _choose_by(
        self, score: Callable[[slice, Step], Tensor], rows: int, q: Tensor, cache: LayerCache, step: Step
    ) -> Tensor:
        """Return the choice `[H, T, K]` by scores `[C, t, M]` of `rows` of the block's queries at a time."""
        parts, all_scores = [], []
        for start in range(0, q.shape[1], rows):
            some = step.part(start, min(start + rows, q.shape[1])) if rows < q.shape[1] else step
            scores = score(slice(some.start - step.start, some.stop - step.start), some)
            chosen = self.select(scores, some)
            parts.append(chosen if self.top_p is None else self._pruned(chosen, scores, q, some))
            if step.note_scores:
                all_scores.append(scores if step.noted is None else scores[:, _inside(step.noted, step, some)])
        chosen = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        if step.note_scores:
            index = step.positions(q.device)
            own = ((index if step.noted is None else index[step.noted]) // self.size)[:, None]
            scores = torch.cat(all_scores, dim=1).float()
            later = torch.arange(scores.shape[-1], device=q.device) >= own
            step.note_scores(cache.index, scores.masked_fill(later, -torch.inf))
        return chosen.repeat_interleave(q.shape[0] // chosen.shape[0], 0) if len(chosen) < len(q) else chosen

    def _pruned(self, chosen: Tensor, scores: Tensor, q: Tensor, step: Step) -> Tensor:
        """Cut the choice `[C, T, K]` to what reaches `top_p` of the mass of the complete chunks before the query's."""
        assert self.top_p is not None, "asked for"
        chunk_ids = torch.arange(scores.shape[-1], device=scores.device)
        own = (step.positions(scores.device) // self.size)[:, None]
        mass = self.log_mass(scores, len(q), q.shape[-1]).masked_fill(chunk_ids >= own, -torch.inf)
        return prune(chosen, scores, mass, self.forced(chunk_ids, own).expand(mass.shape[1:]), self.top_p)

    def attend_chosen(self, q: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended | None:
        chosen = self.choose(q, cache, step)
        if chosen is None:
            return None
        if step.note:
            step.note(cache.index, chosen)
        if self.top_p is not None and placed.part.n_slots is not None:
            number = torch.arange(chosen.shape[-1], device=q.device) - slot_shift(placed.part, chosen)
            chosen = chosen.gather(-1, number.clamp(min=0)).masked_fill(number < 0, -1)
        n_slots, turn = chosen.shape[-1], placed.turn
        if turn.cos.ndim == 2:  # all slots alike
            turn = Turn(*(x.expand(q.shape[1], -1)[:, None] for x in turn))
        else:
            turn = turn.at(slice(None), slice(n_slots))
        memory: Tensor = step.once(f"parts {n_slots}", lambda: q.new_empty(chosen.numel() * q.shape[-1]))
        return step.attention.routed(q, turn, chosen, cache.tiles(chosen), memory)

    def choice_cost(self, block: QueryBlock) -> Cost:
        """Count the cost, exactly for the default `score`; an overridden `summarise` is not counted."""
        products = 1 if self.keeps_vectors else None
        read = block.n_heads * self.summary_vectors
        return self.selection_cost(block, vectors_read=read, summaries=None, products=products)

    def selection_cost(
        self, block: QueryBlock, *, vectors_read: int, summaries: int | None, choosers: int | None = None,
        products: int | None = 1, together: bool = False,
    ) -> Cost:  # fmt: skip
        """Return the cost of choosing chunks and of attending the chosen ones.

        A chunk's summary has `vectors_read` vectors, and a query takes `products` dot products with each chunk, for
        `choosers` heads (None: all heads). `together`: the query heads of a KV head choose alike.
        """
        n_chunks = block.stop // self.size if block.stop > self.size else 0
        n_queries = (block.n_heads if choosers is None else choosers) * len(block)
        scores = None if products is None else products * n_queries * n_chunks * block.head_dim
        read = n_chunks * vectors_read * block.head_dim if n_queries else 0
        seen = block.chunks(self.size, self.n_choices, together=together)
        return seen + Cost(0, scores, summaries, state_read=read)

    @property
    def counted(self) -> bool:
        cls = type(self)
        own = cls.choice_cost is not ChunkSelection.choice_cost  # overridden scores and summaries are not counted
        return super().counted and says_for(cls, "choice_cost", "choose", *(("score", "summarise") if own else ()))

    def plain_choice(self, n_heads: int, n_kv_heads: int) -> PlainChoice | None:
        """Return the choice as a GPU's kernels can make it, valid for the `score` of the same class."""
        return PlainChoice(n_heads)

    @property
    def decodes(self) -> bool:
        """Whether decode steps can be recorded; not with `top_p`, because the number of chosen chunks varies."""
        return self.top_p is None and super().decodes

    def decode_chosen(
        self, q: Tensor, turn: Turn, others: Sequence[Span], cache: LayerCache, step: DeviceStep
    ) -> Attended:
        """Attend chosen chunks as runs. The own chunk is the last run, unless its keys are elsewhere."""
        own, size = others[0].turn if others else None, self.size
        at, runs = None if own is None else step.at, self._plain_runs(q, cache, step, own is not None)
        if runs is None:
            chosen = self.choose(q, cache, step)
            assert chosen is not None, "there are complete chunks"
            runs = runs_of_chunks(chosen.squeeze(1), size, at, q)
        first, count = runs
        turns, number = self._slot_turns(first.shape[1] - (own is not None), turn, own, step)
        return step.attention.decode(q, *cache.whole, Runs(first, count, number, turns, size))

    def bound(self, stop: int) -> int | None:
        """Return the bound; None for steps that complete a chunk: these make a summary, and are not recorded.

        Overridden `score`, `select` and `forced` get complete chunks alone.
        """
        size = self.size
        if stop <= size or not stop % size:
            return None
        hooks = (type(self).score, type(self).select, type(self).forced)
        if all(hook.__module__.partition(".")[0] == "lce" for hook in hooks):
            return super().bound(stop)
        return (stop // size + 1) * size - 1

    def _choose_on_device(self, q: Tensor, cache: LayerCache, step: DeviceStep) -> Tensor:
        """Choose among all chunks within the bound; chunks that are not complete yet are never taken."""
        summary = cache.kept(Summaries, SUMMARIES).allocated(step.bound // self.size)
        scores = self.score(self.placed.scored(q, step, self.size), summary, step, cache.index)
        n_chunks = scores.shape[-1]

        def make() -> Tensor:
            return torch.arange(n_chunks, device=q.device) >= step.at // self.size

        if type(self).select is not ChunkSelection.select:  # it may take chunks that are not complete
            scores = scores.masked_fill(step.once(f"barred {n_chunks}", make), -torch.inf)
        chosen = self.select(scores, step)
        if len(chosen) in (1, step.n_kv_heads, len(q)):
            return chosen
        return chosen.repeat_interleave(len(q) // len(chosen), 0)

    def _plain_runs(
        self, q: Tensor, cache: LayerCache, step: DeviceStep, own: bool
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Choose as `choose` and `runs_of_chunks` do, if the choice is plain and kernels take these tensors."""
        plain = self.plain_choice(len(q), step.n_kv_heads)
        if plain is None or not says_for(type(self), "plain_choice", "score", "select", "forced", "choose"):
            return None
        summary = cache.kept(Summaries, SUMMARIES).allocated(step.bound // self.size)
        scored = self.placed.scored(q, step, self.size)
        return plain_runs(plain, scored[:, 0], summary, step.at, self.size, self.n_choices, own=own)

    def _slot_turns(self, n_slots: int, turn: Turn, own: Turn | None, step: Step) -> tuple[Turn, Tensor]:
        """Return turns, and each slot's index into the turns; the own chunk's comes last."""

        def make() -> tuple[Turn, Tensor]:
            slots = turn.at(0, slice(n_slots)) if turn.cos.ndim == 3 else turn
            number = torch.arange(n_slots + (own is not None), device=turn.cos.device)
            number = number if turn.cos.ndim == 3 else number // max(1, n_slots)
            return slots if own is None else Turn(*(torch.cat(pair) for pair in zip(slots, own, strict=True))), number

        found: tuple[Turn, Tensor] = step.once(f"turns of {n_slots}", make)
        return found


class WithoutSummaries(ChunkSelection):
    """A mixin for selectors of chunks without summaries; `chunk_scores` gives the scores."""

    @abstractmethod
    def chunk_scores(self, q: Tensor, n_chunks: int, cache: LayerCache, step: Step) -> Tensor:
        """Score the first `n_chunks` chunks for some of the block's queries, unrotated `[H, T, D]`: `[C, T, M]`."""

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        return {name: kept for name, kept in super().state(layout).items() if name == RECENT}

    def could_keep(self, layer: int, kept: Mapping[str, Tensor], layout: CacheLayout, n_tokens: int) -> bool:
        return True

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        raise AssertionError("no chunk is summarised")

    def keep_queries(self, q: Tensor, cache: LayerCache, step: Step) -> None:
        pass

    def choose(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor | None:
        n_chunks = step.stop // self.size
        if step.stop <= self.size:
            return None
        rows = max(1, SCORES_AT_ONCE // (len(q) * step.stop))
        return self._choose_by(
            lambda here, some: self.chunk_scores(q[:, here], n_chunks, cache, some), rows, q, cache, step
        )

    def choice_cost(self, block: QueryBlock) -> Cost:
        """Count the attended chunks, as if the heads of a KV head chose differently; choosing reads nothing."""
        return self.selection_cost(block, vectors_read=0, summaries=0, products=0)

    @property
    def decodes(self) -> bool:
        return False


@dataclass(frozen=True)
class SelectiveMethod(ChunkSelection):
    """A method by which every query chooses chunks: keep, score, select, place.

    A new selector overrides hooks. `summarise`: what to keep of a complete chunk. `score`: how well chunks answer
    queries, by default dot products with summaries. `select`: which chunks are taken. By default, a query of chunk `o`
    attends the first chunk, the best scoring ones, chunk `o-1` and chunk `o` up to itself: `chunks` in all.

    `placement` says where chosen chunks are seen: `side_by_side` in their order from position 0, so that all distances
    are within the window; `true`, at their own positions; `constant`, at the distance
    `chunk_size`. The own chunk is always seen at its true distances.

    With `top_p`, a query takes only as many of its `chunks` as reach that share of the attention to the chunks before
    its own, as estimated by `log_mass`; chunks always attended count first.
    """

    chunk_size: int | None = None
    chunks: int | None = None
    placement: Literal["side_by_side", "true", "constant"] = "side_by_side"
    top_p: float | None = field(default=None, kw_only=True)

    knob_help: ClassVar = {
        "chunk_size": "tokens of a chunk; none is derived from the window",
        "chunks": "chunks that a query attends, its own one too; none is what the window holds",
        "placement": "where chosen chunks are seen: side by side, at true positions, or at one distance",
        "top_p": TOP_P_HELP,
    }
    example: ClassVar = Example({"chunk_size": 2})

    def resolve(self, window: int) -> Self:
        size = self.chunk_size if self.chunk_size is not None else 256 if window >= 4096 else max(1, window // 32)
        if size < 1:
            raise UsageError(f"{self.label}: chunk_size is {size}; expected 1 or more tokens")
        chunks = self.chunks if self.chunks is not None else window // size
        if chunks < 3:
            raise UsageError(
                f"{self.label}: {chunks} chunks of {size} tokens; expected 3 or more: lower chunk_size "
                f"(window {window})"
            )
        check_top_p(self)
        return replace(self, chunk_size=size, chunks=chunks)

    @property
    def block(self) -> int:
        """Half of what a query attends, 512 to 2,048: the more queries, the more of them choose the same chunk."""
        assert self.chunks is not None, "resolved before use"
        return max(512, min(2048, self.chunks * self.size // 2))

    @property
    def size(self) -> int:
        assert self.chunk_size is not None, "resolved before use"
        return self.chunk_size

    @property
    def n_choices(self) -> int:
        assert self.chunks is not None, "resolved before use"
        return self.chunks - 1
