"""Selective methods: every query chooses the chunks that it attends.

Selection and placement are independent. A class defines the summary and the score of a chunk. Its `placement` defines
the positions at which chosen chunks are seen, how keys are cached, and how queries are rotated to score chunks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from lce.attention import (
    Attended,
    Runs,
    SlotTurns,
    Turn,
    best_chunks,
    best_runs,
    combine,
    dot_products,
    rotate,
    runs_of_chunks,
    scores_at_once,
)
from lce.cache.layer import LayerCache
from lce.cache.layout import AccessPattern, CacheLayout
from lce.cache.method_state import FileTensor, MethodState, OpenChunk, Summaries
from lce.errors import UsageError
from lce.kernels.cpu.elementwise import take_rows
from lce.methods.attending import (
    NO_TOKENS,
    PlacedPart,
    attend_all,
    band_of,
    placed_parts,
    recent_keys,
    scaled,
    slot_shift,
    unrotated,
)
from lce.methods.base import Example, Method, filled, is_like, knob, resolved
from lce.methods.costs import Cost, QueryBlock
from lce.methods.decoding import Span
from lce.methods.parts import CHOSEN, LayerFacts, Part
from lce.methods.placement import PLACEMENTS, Placement
from lce.methods.promises import ATTENTION, Promise, Promises
from lce.methods.selectors import Scorer, Sizes
from lce.methods.step import DeviceStep, Step
from lce.methods.top_p import keep_best, prune, top_p_knob

TURNED_ROWS = 64  # the fewest queries of a pass for which turning a copy of all keys costs little beside attending them
SUMMARIES, OPEN_QUERIES = "summaries", "open queries"


def choosers(share: str, n_heads: int, n_kv_heads: int) -> int:
    """Return how many groups of heads choose together: `share` is `head`, `group` (a KV head's), or `layer` (all)."""
    return {"head": n_heads, "group": n_kv_heads, "layer": 1}[share]


def block_of(n_choices: int) -> int:
    """Return a block whose queries choose 65,536 chunks in all, of 128 to 2,048 queries: choices take memory."""
    return max(128, min(2048, 65536 // n_choices))


def slot_turns(placed: PlacedPart, n_slots: int, q: Tensor, step: Step) -> SlotTurns:
    """Return the rotations of queries for n slots of chosen chunks; one may serve all slots, and maybe all queries."""
    slots, table = placed.slots, placed.turn
    if slots is None:
        slots = step.once("each turn", lambda: torch.arange(len(table.cos), device=q.device)[:, None])
    return SlotTurns(table, slots[:, :n_slots])


HOOKS = (*ATTENTION, "choose", "select", "pick", "pooled", "forced", "summarise", "score", "scorer", "log_mass")
SELECTING: Promises = {  # what lce's own selecting methods promise
    **dict.fromkeys(("alike", "by_head"), HOOKS),
    **dict.fromkeys(("recorded", "noted", "kept"), ("keep", "attend", "attend_part")),
    "counted": ("keep", "attend", "attend_part", "choose", "score", "summarise"),
    "dense": ("select", "pick", "choose", "attend_part", "attend_pages", "parts_of", "key_positions"),
    "complete": ("score", "select", "forced"),
    "kernel": ("score", "select", "forced", "choose"),
}


class ChunkSelection(Method, ABC, promises={**SELECTING, "counted": ("keep", "attend", "attend_part", "choose")}):
    """A method whose queries choose chunks. `SelectiveMethod` derives from this class and adds the usual knobs.

    A query in chunk `o` attends chunk `o` up to the query, and `n_choices` of the complete chunks before chunk `o`:
    first the chunks that `forced` names, then the chunks with the best scores.
    """

    placement: str  # this field and the next three are knobs, or fixed by the class
    top_p: float | None = None  # the share of the estimated attention that chosen chunks must reach; None: off
    keep_first = True  # whether chunk 0 is always taken
    keep_last = True  # whether the last complete chunk before a query's own is always taken
    summary_vectors: ClassVar[int] = 1  # the number of vectors `[D]` in a chunk's summary, for each query head

    @property
    def uses_queries(self) -> bool:
        """Whether `summarise` needs queries, which are kept until their chunk is complete."""
        return True

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of tokens in a chunk, L."""

    @property
    @abstractmethod
    def n_choices(self) -> int:
        """The largest number of complete chunks that a query attends besides its own chunk."""

    def n_chosen(self, i: Tensor) -> Tensor | None:
        """Return how many complete chunks queries `i [T]` attend at most, `[T]`, no less for a later query.

        None: `n_choices` for all. A number is `n_choices` at most, and the number of `forced` chunks at least.
        """
        return None

    @property
    def varies(self) -> bool:
        """Whether queries with as many candidates may attend different numbers of chunks."""
        return self.top_p is not None or self.n_chosen(NO_TOKENS) is not None

    @property
    def placed(self) -> Placement:
        """The placement of chosen chunks."""
        return PLACEMENTS[self.placement]

    @property
    def access(self) -> AccessPattern:
        return AccessPattern(self.size, sinks=self.size, local=self.size, per_head=True)

    @property
    def couples_heads(self) -> str | None:
        together = "all heads make one choice; give share=head or share=group, without fix_head"
        return super().couples_heads or (None if self.access.per_head else together)

    @property
    def n_first(self) -> int:
        """The number of first chunks that are always taken."""
        return int(self.keep_first)

    @property
    def n_last(self) -> int:
        """The number of last candidates of a query, complete chunks before its own, that are always taken."""
        return int(self.keep_last)

    @property
    def n_near(self) -> int:
        """The number of complete chunks before a query's own that the query sees with its own chunk, not by choice."""
        return 0

    @property
    def n_recent(self) -> int:
        """The number of earlier tokens whose keys are also stored at absolute positions."""
        return (self.n_near + 1) * self.size if unrotated(self) or self.placed.exact else 0

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        """Return empty stores: of chunk summaries, of the incomplete chunk's queries, and of recent keys, if needed."""
        shape = self.summary_shape(layout)
        n_bytes = self.summary_vectors * layout.query_bytes if shape is None else prod(shape) * layout.dtype.itemsize
        kept: dict[str, MethodState] = {SUMMARIES: Summaries(n_bytes, self.size)} if n_bytes else {}
        if self.uses_queries:
            kept[OPEN_QUERIES] = OpenChunk(self.size, layout.query_bytes)
        return {**kept, **recent_keys(self, self.n_recent, layout)}

    def could_keep(self, layer: int, kept: Mapping[str, FileTensor], layout: CacheLayout, n_tokens: int) -> bool:
        summaries, n_chunks, shape = kept.get(SUMMARIES), n_tokens // self.size, self.summary_shape(layout)
        if summaries is None:
            return True  # some layers keep no summaries; a layer that needs summaries raises an error
        if shape is None:
            return summaries.shape[1] == n_chunks
        return is_like(summaries, (shape[0], n_chunks, *shape[1:]), layout.dtype)

    def summary_shape(self, sizes: Sizes) -> tuple[int, ...] | None:
        """Return the shape `[S, …]` of one chunk's summary; None: `summary_vectors` alone says how large it can be.

        A shape of no numbers, `(0,)`, is that of a method that keeps no summaries.
        """
        return (sizes.n_heads, sizes.head_dim) if self.keeps_vectors else None

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        return window if self.placement == "true" else None

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return self.placed.key_positions(indices, self.size)

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterable[Part]:
        own = None if self.placed.exact else self.key_positions(i)
        yield Part(((i // self.size - self.n_near) * self.size, i + 1), i if own is None else own, exact=own is None)
        yield self.placed.part(i, self.size, min(self.n_choices, layer.longest // self.size), self.n_choices)

    def keep_queries(self, q: Tensor, cache: LayerCache, step: Step) -> None:
        """Summarise the chunks that this block completes, and store the queries of the chunk that stays incomplete."""
        size, at = self.size, step.at
        if SUMMARIES not in cache.state:
            return
        if at is not None:
            if self.uses_queries:
                offset = step.once("offset in chunk", lambda: at % size)
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
        """Return the queries of the m chunks `first..stop-1`, rotated as the cached keys are: `[H, m, L, D]`."""
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
        """Return summaries `[S, m, …]` of m complete chunks, S = H or G; for the default `score`, vectors `[H, m, D]`.

        `q [H, m, L, D]` (without `uses_queries` `[H, m, 0, D]`) and `k [G, m, L, D]` are rotated as keys are cached.
        `x.repeat_interleave(len(q) // len(k), dim=0)` repeats a tensor of KV heads for their query heads.
        """

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        """Return the scores `[C, T, M]` of chunks with `summary [S, M, …]` for queries `q [H, T, D]`; larger is better.

        C is H, or a divisor of H if heads choose together. For the placement `side_by_side` queries are unrotated, for
        `true` rotated to their true positions, for `constant` to the constant distance.
        """
        return dot_products(q, summary)

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int) -> Tensor:
        """Estimate the logarithms of the chunks' attention mass, up to a constant per query, from scores `[C, T, M]`.

        Used for `top_p`. By default, the logit of each token of a chunk is taken to be the chunk's score, divided by
        the number of heads over which scores were summed.
        """
        return scores.float() * (len(scores) / n_heads / math.sqrt(head_dim))

    @property
    def keeps_vectors(self) -> bool:
        """Whether scores are dot products with summaries of one vector for each chunk and query head."""
        return type(self).score is ChunkSelection.score

    def forced(self, chunk_ids: Tensor, own: Tensor) -> Tensor:
        """Return which of `chunk_ids [M]` are always taken, `[T, M]` bool; `own [T, 1]` are the queries' own chunks.

        With `n_near`, `own` are the first chunks that the queries see with their own chunk.
        """
        return (chunk_ids < self.n_first) | ((chunk_ids >= own - self.n_last) & (chunk_ids < own))

    def ends(self, step: Step, device: torch.device) -> Tensor:
        """Return the end of each query's candidates, `[T, 1]`: its own chunk, or the first chunk seen with it."""
        return (step.positions(device) // self.size - self.n_near)[:, None]

    def select(self, scores: Tensor, step: Step) -> Tensor:
        """Return chosen chunks `[C, T, K]` by scores `[C, T, M]`: ids ascending, then -1. Time: O(C · T · M).

        A query gets `n_choices` of the chunks before its own, or all of them if there are fewer; placement relies on
        this number. For any scores, even infinite and NaN ones, no query gets its own chunk or a later one.
        """
        n_chunks = scores.shape[-1]

        def make() -> Tensor:
            chunk_ids, ends = torch.arange(n_chunks, device=scores.device), self.ends(step, scores.device)
            found = self.forced(chunk_ids, ends)
            return (found & (chunk_ids < ends) if self.n_near else found).expand(len(ends), n_chunks).contiguous()

        forced = step.once(f"forced {n_chunks}", make)
        if self.n_near:
            ids = step.once(f"ids {n_chunks}", lambda: torch.arange(n_chunks, device=scores.device))
            near = step.once(f"near {n_chunks}", lambda: ids >= self.ends(step, scores.device))
            scores = scores.masked_fill(near, -torch.inf)
        return best_chunks(scores, forced, self.n_choices, step.start if step.at is None else step.at, self.size)

    @property
    def least_rows(self) -> int:
        """The number of neighbouring queries whose scores `pooled` combines, counted from token 0."""
        return 1

    def pooled(self, scores: Tensor, step: Step) -> Tensor:
        """Return the scores by which queries choose, from each query's own scores `[C, T, M]`: by default the same."""
        return scores

    def pick(self, scores: Tensor, step: Step) -> Tensor:
        """Return what `select` returns. A method with a knob called `select` overrides `pick`."""
        return self.select(scores, step)

    def scorer(self, q: Tensor, cache: LayerCache, step: Step) -> tuple[Scorer, int]:
        """Return a function that scores a slice of the queries `q [H, T, D]`, and the number of queries in a slice."""
        summary = cache.kept(Summaries, SUMMARIES).span(0, step.stop // self.size)
        scored = self.placed.scored(q, step, self.size)
        rows = max(1, scores_at_once(summary) // (len(q) * summary.shape[1]))
        return lambda here, some: self.score_bands([x[:, here] for x in scored], summary, some, cache.index), rows

    def score_bands(self, scored: Sequence[Tensor], summary: Tensor, step: Step, layer: int) -> Tensor:
        """Return `score` for queries that the placement rotated, each chunk's by the queries of its band."""
        scores, *later = [self.score(q, summary, step, layer) for q in scored]
        bands = self.placed.bands(step.positions(scores.device), self.size) if later else None
        for number, some in enumerate(later):
            assert bands is not None, "queries are rotated for each band"
            beyond = torch.arange(scores.shape[-1], device=scores.device) >= bands[:, number, None]
            scores = torch.where(beyond, some, scores)
        return scores

    def choose(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor | None:
        """Choose the chunks that each query of each head attends, `[H, T, K]`; None: the text is one chunk at most.

        For a `DeviceStep` the result is `[C, 1, K]` for C groups of heads: C is 1, G or H.
        """
        if isinstance(step, DeviceStep):
            return self._choose_on_device(q, cache, step)
        if step.stop <= self.size:
            return None
        n_queries, (score, rows), parts, stop = q.shape[1], self.scorer(q, cache, step), list[Tensor](), 0
        while stop < n_queries:
            start, stop = stop, min(stop + max(rows, self.least_rows), n_queries)
            if stop < n_queries:
                stop -= (step.start + stop) % self.least_rows
            some = step if stop - start == n_queries else step.part(start, stop)
            scores = self.pooled(score(slice(start, stop), some), some)
            chosen = self.pick(scores, some)
            if self.varies:
                chosen = self.fewer(chosen, scores, q, some)
            if step.note_scores:
                later = torch.arange(scores.shape[-1], device=q.device) >= self.ends(some, q.device)
                step.note_scores(some, cache.index, scores.float().masked_fill(later, -torch.inf))
            parts.append(chosen)
        chosen = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        return self._of_each_head(chosen, len(q), step)

    def _of_each_head(self, chosen: Tensor, n_heads: int, step: Step) -> Tensor:
        """Return the choices `[H, T, K]` of H heads by those of groups that choose together, `chosen [C, T, K]`."""
        n_choosers, n_queries, n = chosen.shape
        if n_choosers == n_heads:
            return chosen
        if n_queries > 1 or not chosen.is_cpu:
            return chosen.repeat_interleave(n_heads // n_choosers, 0)
        rep = n_heads // n_choosers  # a kernel copies, so that a step whose kernels serve other layers has no operator
        heads = step.once("choosers", lambda: torch.arange(n_heads) // rep)
        return take_rows((chosen.view(1, n_choosers, n), chosen.view(1, n_choosers, n)), heads)[0].view(n_heads, 1, n)

    def fewer(self, chosen: Tensor, scores: Tensor, q: Tensor, step: Step) -> Tensor:
        """Return those of `chosen [C, T, K]` that `n_chosen` and `top_p` leave: ids ascending, then -1."""
        chunk_ids, ends = torch.arange(scores.shape[-1], device=q.device), self.ends(step, q.device)
        later = chunk_ids >= ends
        forced = self.forced(chunk_ids, ends).expand_as(later)
        if (n := self.n_chosen(step.positions(q.device))) is not None:
            chosen = keep_best(chosen, scores, forced, n)
        if self.top_p is None:
            return chosen
        mass = self.log_mass(scores, len(q), q.shape[-1]).masked_fill(later, -torch.inf)
        return prune(chosen, scores, mass, forced, self.top_p)

    def sees_all(self, step: Step) -> bool:
        """Return whether the text has no more chunks than a query attends, each at true distances from the query.

        Attention is then dense, which takes less time than attending chunk by chunk. False for a class that chooses or
        attends in its own way and does not promise `dense`.
        """
        few = step.stop <= (self.n_choices + 1) * self.size and not self.varies and not self.n_near
        return few and step.stride == 1 and self.placed.true_within and self.promised("dense")

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        if isinstance(step, DeviceStep) or q.shape[1] < TURNED_ROWS or not self.sees_all(step):
            return super().attend(q, cache, step)
        self.keep_queries(q, cache, step)
        q = scaled(self, q, step)
        if (step.note or step.note_scores) and any(x.part.keys == CHOSEN for x in placed_parts(self, q, cache, step)):
            self.note_choice(q, cache, step)
        return attend_all(self, q, cache, step)

    def note_choice(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor | None:
        """Return what unrotated queries `[H, T, D]` choose, and pass it to `Step.note`; None: there is no choice."""
        chosen = self.choose(q, cache, step)
        if chosen is not None and step.note:
            step.note(cache.index, chosen)
        return chosen

    def attend_part(self, q: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended | None:
        if placed.part.keys != CHOSEN:
            return super().attend_part(q, placed, cache, step)
        chosen = self.note_choice(q, cache, step)
        if chosen is None:
            return None
        if self.varies and placed.part.n_slots is not None:
            number = torch.arange(chosen.shape[-1], device=q.device) - slot_shift(placed.part, chosen)
            chosen = chosen.gather(-1, number.clamp(min=0)).masked_fill(number < 0, -1)
        return self.attend_pages(q, chosen, placed, cache, step)

    def attend_pages(self, q: Tensor, chosen: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended:
        """Return the attention of unrotated queries `[H, T, D]` to `chosen [H, T, K]`, in a call for each band."""
        n_slots, slots, bands, table = chosen.shape[-1], placed.slots, placed.part.bands, placed.turn

        def memory() -> Tensor:
            return step.once(f"parts {n_slots}", lambda: q.new_empty(chosen.numel() * q.shape[-1]))

        if bands is None or slots is None:
            return step.attention.routed(q, slot_turns(placed, n_slots, q, step), chosen, cache.tiles(chosen), memory)
        band, found = band_of(bands, chosen), list[Attended]()
        for number in reversed(range(slots.shape[1])):  # the last request for pages is the one that is prefetched
            some, rows = chosen.masked_fill(band != number, -1), slots[:, number : number + 1]
            found.append(step.attention.routed(q, SlotTurns(table, rows), some, cache.tiles(some), memory))
        return combine(found)

    def choice_cost(self, block: QueryBlock) -> Cost:
        """Return the cost of choosing and attending chunks: no summaries, and scores only with the default `score`."""
        numbers = block.n_heads * block.head_dim * (block.stop // self.size if block.stop > self.size else 0)
        scores = len(block) * numbers if self.keeps_vectors else None
        return self.seen_cost(block) + Cost(0, scores, summaries=None, state_read=numbers * self.summary_vectors)

    def seen_cost(self, block: QueryBlock, *, together: bool = False) -> Cost:
        """Return the cost of attending the chosen chunks; with `together` the query heads of a KV head choose alike."""
        near = self.n_near * self.size
        candidates = replace(block, start=max(0, block.start - near), stop=max(0, block.stop - near))
        i = torch.arange(block.start, block.stop)
        if (n := self.n_chosen(i)) is not None:
            chosen = int(torch.minimum(n, (i // self.size - self.n_near).clamp(min=0)).sum())
            return candidates.chosen(self.size, chosen, together=together)
        return candidates.chunks(self.size, self.n_choices, together=together)

    def n_choosers(self, n_heads: int, n_kv_heads: int) -> int:
        """Return the number of groups of neighbouring heads that choose together; by default each head is a group."""
        return n_heads

    @property
    def plain_choice(self) -> Literal["best", "worst"] | None:
        """Whether a GPU kernel may choose the best or the worst chunks in place of `choose`; None: no kernel may."""
        return "best"

    def promised(self, what: Promise) -> bool:
        """Return whether the class promises `what`; steps are not `recorded` where the number of chunks varies."""
        return super().promised(what) and (what != "recorded" or not self.varies)

    def decode_chosen(
        self, q: Tensor, turn: Turn, others: Sequence[Span], cache: LayerCache, step: DeviceStep
    ) -> Attended:
        """Return the attention to chosen chunks, and to the query's own chunk unless the own chunk has recent keys."""
        own = others[0].turn if others else None
        bands = step.once("bands", lambda: self.placed.bands(step.at, self.size))
        n_bands = 0 if bands is None else bands.shape[1] + 1
        runs = self._plain_runs(q, cache, step, own is not None)
        if runs is None:
            chosen = self.choose(q, cache, step)
            assert chosen is not None, "there are complete chunks"
            if bands is not None:  # each band has slots of its own
                band = band_of(bands, chosen)
                chosen = torch.cat([chosen.masked_fill(band != number, -1) for number in range(n_bands)], dim=-1)
            runs = runs_of_chunks(chosen.squeeze(1), self.size, None if own is None else step.at, q)
        first, count = runs
        n_slots = first.shape[1] - (own is not None)

        def make() -> tuple[Turn, Tensor]:
            """Return rotations of the query, and the index of each run's rotation; the own chunk's rotation is last."""
            slots = turn.at(0, slice(n_bands or n_slots)) if turn.cos.ndim == 3 else turn
            number = torch.arange(first.shape[1], device=turn.cos.device)
            number = number // max(1, n_slots // max(1, len(slots.cos)))
            return slots if own is None else Turn(*(torch.cat(pair) for pair in zip(slots, own, strict=True))), number

        turns, number = step.once(f"turns of {n_slots}", make)
        return step.attention.decode(q, *cache.whole, Runs(first, count, number, turns, self.size))

    def bound(self, stop: int) -> int | None:
        """Return the bound; None for a step that completes a chunk, because computing a summary is not recorded.

        Unless the class promises `complete`, the bound is so low that all chunks are complete.
        """
        if stop <= self.size or not stop % self.size:
            return None
        return super().bound(stop) if self.promised("complete") else (stop // self.size + 1) * self.size - 1

    def _choose_on_device(self, q: Tensor, cache: LayerCache, step: DeviceStep) -> Tensor:
        """Choose among the chunks within the bound; chunks that are not complete yet are never taken."""
        summary = cache.kept(Summaries, SUMMARIES).allocated(step.bound // self.size)
        scores = self.score_bands(self.placed.scored(q, step, self.size), summary, step, cache.index)
        if (
            type(self).select is not ChunkSelection.select
        ):  # an overridden `select` might take chunks that are not complete
            scores = scores.masked_fill(
                torch.arange(scores.shape[-1], device=q.device) >= step.at // self.size, -torch.inf
            )
        chosen = self.pick(scores, step)
        return chosen if len(chosen) in (1, step.n_kv_heads) else chosen.repeat_interleave(len(q) // len(chosen), 0)

    def _plain_runs(self, q: Tensor, cache: LayerCache, step: DeviceStep, own: bool) -> tuple[Tensor, Tensor] | None:
        """Choose chunks with a GPU kernel, and return them as `runs_of_chunks` does; None: no kernel can choose."""
        plain = self.plain_choice
        if plain is None or not self.promised("kernel") or self.n_near or max(self.n_first, self.n_last) > 1:
            return None
        summary = cache.kept(Summaries, SUMMARIES).allocated(step.bound // self.size)
        scored, *others = self.placed.scored(q, step, self.size)
        if others:
            return None
        options = {"choosers": self.n_choosers(len(q), step.n_kv_heads), "least": plain == "worst", "own": own}
        options |= {"keep_first": self.n_first > 0, "keep_last": self.n_last > 0}
        return best_runs(scored[:, 0], summary, step.at, self.size, self.n_choices, **options)


@dataclass(frozen=True)
class SelectiveMethod(ChunkSelection):
    """A method by which every query chooses chunks, with knobs for chunk size, budget and placement.

    A new method overrides hooks. `summarise` returns what to keep of a complete chunk. `score` scores chunks for
    queries, by default by dot products with summaries. `select` takes chunks by score. By default, a query of chunk `o`
    attends the first chunk, the best scoring chunks, chunk `o-1`, and chunk `o` up to itself: `chunks` in all.

    `placement` says where chosen chunks are seen: `side_by_side` in their order from position 0, so that all distances
    are within the window; `true` at their own positions; `constant` at the distance `chunk_size`. A query's own chunk
    is always seen at its true distances.

    With `top_p`, a query takes only as many of its `chunks` as reach that share of the attention to the chunks before
    its own, as `log_mass` estimates; chunks that are always attended count first.
    """

    chunk_size: int | None = knob(None, "tokens of a chunk; none is 32, or 1/32 of a window below 1024", least=1)
    chunks: int | None = knob(None, "chunks that a query attends, its own one too; none is what the window holds")
    placement: Literal["side_by_side", "true", "constant"] = knob(
        "side_by_side", "where chosen chunks are seen: side by side, at true positions, or at one distance"
    )
    top_p: float | None = top_p_knob()
    example: ClassVar = Example({"chunk_size": 2})

    def resolve(self, window: int) -> Self:
        made = filled(self, chunk_size=min(32, max(1, window // 32)))
        made = filled(made, chunks=window // made.size)
        if resolved(made.chunks) < 3:
            raise UsageError(
                f"{self.label}: {made.chunks} chunks of {made.size} tokens; expected 3 or more: lower chunk_size "
                f"(window {window})"
            )
        return made

    @property
    def block(self) -> int:
        """Half of the tokens that a query attends, 512 to 2,048. In larger blocks more queries share a chosen chunk."""
        return max(512, min(2048, resolved(self.chunks) * self.size // 2))

    @property
    def size(self) -> int:
        return resolved(self.chunk_size)

    @property
    def n_choices(self) -> int:
        return resolved(self.chunks) - 1
