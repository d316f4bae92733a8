"""Selectors by summaries: a summary of each complete chunk is kept, and chunks are scored by their summaries."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor

from lce.attention import Turn, dot_products, rotate, scores_at_once
from lce.cache.layer import LayerCache
from lce.cache.method_state import OpenChunk, Summaries
from lce.errors import UsageError
from lce.methods.base import Method
from lce.methods.costs import Cost, QueryBlock
from lce.methods.selection import Scorer, Selection, Selector, Sizes
from lce.methods.step import DeviceStep, Step

SUMMARIES, OPEN_QUERIES = "summaries", "open queries"  # the names of the states


class SummarySelector(Selector):
    """A selector that keeps a summary of each complete chunk, and scores chunks by their summaries."""

    @property
    def plain(self) -> Literal["best", "worst"] | None:
        """Which chunks a GPU kernel may choose by summaries, the best or the worst; None: no kernel may choose."""
        return "best"

    @abstractmethod
    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Return the summaries `[S, m, …]` of m complete chunks, `q [H, m, L, D]` and `k v [G, m, L, D]`.

        Without `uses_queries`, q is `[H, m, 0, D]`.
        """

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        """Return the scores `[H, T, M]` of chunks with `summary [S, M, …]` for queries `q [H, T, D]`: dot products."""
        return dot_products(q, summary)

    def scores(self, q: Tensor, summary: Tensor, n_choosers: int, step: Step, layer: int) -> Tensor:
        """Return the scores `[C, T, M]` by which C groups of heads choose, summed over the heads of a group."""
        if type(self).score is SummarySelector.score:
            return dot_products(q, summary, len(q) // n_choosers)  # sums on the way
        return self.together(self.score(q, summary, step, layer), n_choosers)

    def keep(self, method: Method, selection: Selection, q: Tensor, cache: LayerCache, step: Step) -> None:
        """Summarise the chunks that this block completes, and store the queries of the chunk that stays incomplete."""
        size, at = selection.size, step.at
        if at is not None:
            if self.uses_queries:
                offset = step.once("offset in chunk", lambda: at % size)
                cache.kept(OpenChunk, OPEN_QUERIES).write_on_device(q, offset)
            return
        first, stop = step.start // size, step.stop // size
        if stop > first:
            k, v = (x.unflatten(1, (-1, size)) for x in cache.span(first * size, stop * size))
            queries = self._complete(method, q, size, cache, step) if self.uses_queries else _no_queries(q, k)
            summaries, kept = self.summarise(queries, k, v, step), cache.kept(Summaries, SUMMARIES)
            if (n_bytes := summaries[:, 0].numel() * summaries.element_size()) > kept.row_bytes:
                raise UsageError(
                    f"{method.label}: summarise keeps {n_bytes} bytes of a chunk; expected at most {kept.row_bytes}, "
                    "or a larger summary_vectors"
                )
            kept.write(summaries, first)
        open_from = max(step.start, stop * size)
        if self.uses_queries and open_from < step.stop:
            cache.kept(OpenChunk, OPEN_QUERIES).write(q[:, open_from - step.start :], open_from)

    def _complete(self, method: Method, q: Tensor, size: int, cache: LayerCache, step: Step) -> Tensor:
        """Return the queries of the m chunks that a block completes, rotated as cached keys are: `[H, m, L, D]`."""
        first, stop = step.start // size, step.stop // size
        queries = q[:, : stop * size - step.start]
        if step.start % size:
            pending = cache.kept(OpenChunk, OPEN_QUERIES).span(first * size, step.start)
            queries = torch.cat((pending, queries), dim=1)

        def make() -> Turn | None:
            positions = method.key_positions(torch.arange(first * size, stop * size, device=q.device))
            return None if positions is None else step.rope.turn(positions.view(stop - first, size), q.dtype)

        complete, turn = queries.unflatten(1, (stop - first, size)), step.once("chunk turn", make)
        return complete if turn is None else rotate(complete, turn)

    def scorer(
        self, method: Method, selection: Selection, q: Tensor, cache: LayerCache, step: Step
    ) -> tuple[Scorer, int]:
        summary = cache.kept(Summaries, SUMMARIES).span(0, step.stop // selection.size)
        scored = selection.placement.scored(q, step, selection)
        rows = max(1, scores_at_once(summary) // (len(q) * summary.shape[1]))

        def score(here: slice, some: Step) -> Tensor:
            return self.of_bands([x[:, here] for x in scored], summary, selection, some, cache.index)

        return score, rows

    def of_bands(self, scored: list[Tensor], summary: Tensor, selection: Selection, step: Step, layer: int) -> Tensor:
        """Return `scores` for rotated queries: each chunk is scored by the queries rotated for its band."""
        n_choosers = selection.n_choosers(len(scored[0]), step.n_kv_heads)
        scores, *later = [self.scores(q, summary, n_choosers, step, layer) for q in scored]
        bands = selection.placement.bands(step.positions(scores.device), selection.size) if later else None
        for number, some in enumerate(later):
            assert bands is not None, "queries are rotated for each band"
            beyond = torch.arange(scores.shape[-1], device=scores.device) >= bands[:, number, None]
            scores = torch.where(beyond, some, scores)
        return scores

    def on_device(self, selection: Selection, q: Tensor, cache: LayerCache, step: DeviceStep) -> Tensor:
        """Return the choice `[C, 1, K]` in a recorded step: only complete chunks, within the bound."""
        summary = cache.kept(Summaries, SUMMARIES).allocated(step.bound // selection.size)
        scored = selection.placement.scored(q, step, selection)
        scores = self.of_bands(scored, summary, selection, step, cache.index)
        if not self.takes_best:  # `select` might take chunks that are not complete
            chunk_ids = torch.arange(scores.shape[-1], device=q.device)
            scores = scores.masked_fill(chunk_ids >= step.at // selection.size, -torch.inf)
        chosen = self.select(selection, scores, step)
        return chosen if len(chosen) in (1, step.n_kv_heads) else chosen.repeat_interleave(len(q) // len(chosen), 0)

    def summary_cost(self, sizes: Sizes, size: int) -> int:
        """Return the multiply-adds of the products for one chunk's summary."""
        return 0

    def cost(self, block: QueryBlock, selection: Selection) -> Cost:
        """Return the cost if each head scores each chunk once for each band, by a product with each summary vector."""
        size, (heads, *row) = selection.size, self.shape(block, selection) or (0,)
        n_chunks = block.stop // size if block.stop > size else 0
        summaries = (block.stop // size - block.start // size) * self.summary_cost(block, size)
        bands = selection.placement.bands(torch.zeros(1, dtype=torch.int64), size)
        n_scored = block.n_heads * len(block) * n_chunks * (1 if bands is None else 1 + bands.shape[1])
        return Cost(0, n_scored * math.prod(row), summaries, state_read=n_chunks * heads * math.prod(row))


def _no_queries(q: Tensor, k: Tensor) -> Tensor:
    """Return no queries of the chunks `k [G, m, L, D]`: `[H, m, 0, D]`."""
    return q.new_empty(len(q), k.shape[1], 0, q.shape[-1])
