"""The kinds of selectors that come with lce. Keys and queries come to a selector as the placement rotates them.

Your own selector derives from `SummarySelector` and has a name: `class MeanKey(SummarySelector, name="mean")` is
`-o select=mean` of the method `pages`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, stack

from lce.attention import (
    SCORES_AT_ONCE,
    Turn,
    best_first,
    bound_scores,
    dot_products,
    fold_chunks,
    products,
    rotate,
    scores_at_once,
    unfold_chunks,
)
from lce.cache.layer import LayerCache
from lce.cache.method_state import OpenChunk, Summaries
from lce.errors import UsageError
from lce.methods.base import Method
from lce.methods.costs import Cost, QueryBlock
from lce.methods.knobs import knob
from lce.methods.selection import Scorer, Selection, Selector, Sizes
from lce.methods.step import DeviceStep, Step
from lce.methods.turned_keys import pieces, unrotated_keys

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
        return dot_products(q, summary, generated=step.decoding)

    def scores(self, q: Tensor, summary: Tensor, n_choosers: int, step: Step, layer: int) -> Tensor:
        """Return the scores `[C, T, M]` by which C groups of heads choose, summed over the heads of a group."""
        if type(self).score is SummarySelector.score:
            return dot_products(q, summary, len(q) // n_choosers, step.decoding)  # sums on the way
        return self.together(self.score(q, summary, step, layer), n_choosers)

    @property
    def multiplies(self) -> bool:
        """Whether scores are dot products with summaries, summed over the heads that choose together."""
        return type(self).score is SummarySelector.score and type(self).scores is SummarySelector.scores

    def keep(self, method: Method, selection: Selection, q: Tensor, cache: LayerCache, step: Step) -> None:
        """Summarise the chunks that this block completes, and store the queries of the chunk that stays incomplete."""
        size, at = selection.size, step.at
        if at is not None:
            if self.uses_queries:
                offset = step.once("offset in chunk", lambda: at % size)
                cache.kept(OpenChunk, OPEN_QUERIES).write_on_device(q, offset)
            if cast(DeviceStep, step).completes:
                self._summarise_on_device(method, q, at, size, cache, step)
            return
        first, stop = step.start // size, step.stop // size
        if stop > first:
            k, v = (x.unflatten(1, (-1, size)) for x in cache.span(first * size, stop * size))
            if self.uses_queries:
                queries = self._complete(method, q, size, cache, step)
            else:
                queries = q.new_empty(len(q), k.shape[1], 0, q.shape[-1])
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

    def _summarise_on_device(
        self, method: Method, q: Tensor, at: Tensor, size: int, cache: LayerCache, step: Step
    ) -> None:
        """Keep the summaries of chunks that a recorded step completes; only the device knows of which contexts."""
        first = step.once("chunk", lambda: at // size * size)
        k, v = cache.chunks_at(first, size)  # [G, B, L, D]
        queries = q.new_empty(len(q), len(at), 0, q.shape[-1])
        if self.uses_queries:
            rows = step.once("rows of chunk", lambda: first[:, None] + torch.arange(size, device=q.device))
            queries = self._turned(method, cache.kept(OpenChunk, OPEN_QUERIES).in_chunk(), rows, step)
        complete = step.once("complete", lambda: torch.where((at + 1) % size == 0, at // size, -1))
        cache.kept(Summaries, SUMMARIES).write_on_device(self.summarise(queries, k, v, step), complete)

    def _complete(self, method: Method, q: Tensor, size: int, cache: LayerCache, step: Step) -> Tensor:
        first, stop = step.start // size, step.stop // size
        queries = q[:, : stop * size - step.start]
        if step.start % size:
            pending = cache.kept(OpenChunk, OPEN_QUERIES).span(first * size, step.start)
            queries = torch.cat((pending, queries), dim=1)

        rows = step.once("chunks", lambda: torch.arange(first * size, stop * size, device=q.device).view(-1, size))
        return self._turned(method, queries.unflatten(1, (stop - first, size)), rows, step)

    def _turned(self, method: Method, q: Tensor, indices: Tensor, step: Step) -> Tensor:
        """Rotate the queries `[H, m, L, D]` of m chunks, of tokens at `indices [m, L]`, as their keys are cached."""

        def make() -> Turn | None:
            positions = method.key_positions(indices.view(-1))
            return None if positions is None else step.rope.turn(positions.view(indices.shape), q.dtype)

        turn = step.once("chunk turn", make)
        return q if turn is None else rotate(q, turn)

    def scorer(self, method: Method, selection: Selection, q: Tensor, cache: LayerCache, step: Step) -> Scorer:
        summary = cache.kept(Summaries, SUMMARIES).span(0, step.stop // selection.size)
        scored = selection.placement.scored(q, step, selection)
        rows = max(1, scores_at_once(summary) // (len(q) * summary.shape[1]))
        n_together = len(q) // selection.n_choosers(len(q), step.n_kv_heads)

        def score(here: slice, some: Step) -> Tensor:
            if self.multiplies and len(scored) == 1:
                return dot_products(scored[0][:, here], summary, n_together, some.decoding)
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
        """Choose complete chunks within the bound, in a recorded step; return the choice `[C, B, K]`."""
        summary = cache.kept(Summaries, SUMMARIES).allocated(step.bound // selection.size)
        scored, hooked = selection.placement.scored(q, step, selection), cast(Step, step)
        scores = self.of_bands(scored, summary, selection, hooked, cache.index)
        if not self.takes_best:  # `select` might take chunks that are not complete
            chunk_ids = torch.arange(scores.shape[-1], device=q.device)
            scores = scores.masked_fill(chunk_ids >= step.at // selection.size, -torch.inf)
        chosen = self.select(selection, scores, hooked)
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


@dataclass(frozen=True)
class Summary(SummarySelector, name="summary"):
    """LongHeads' summary of a chunk: a mean of the chunk's keys, weighted by how the chunk's own queries attend them.

    With `of="values"`, a vector for each query head, as in the paper (Eq. 1-2): `O = softmax(Q Kᵀ/√D) V` without a
    causal mask, `q^c = mean(O)`, `c = softmax(q^c Kᵀ/√D) K`. A model's values may be too small for these weights to
    differ. So with `of="keys"`, a vector for each KV head, a key weighs as much as the largest share of attention that
    a query gives it: `w_j = max_i softmax(Q Kᵀ/√D)_ij`, `c = Σ w_j k_j / Σ w_j`, a mean over the head's query heads.
    The score is `q · c`.
    """

    of: Literal["values", "keys"] = knob("values", "where a key's weight comes from: the chunk's values, or keys alone")
    uses_queries: ClassVar[bool] = True

    def shape(self, sizes: Sizes, selection: Selection) -> tuple[int, ...]:
        return sizes.n_heads if self.of == "values" else sizes.n_kv_heads, sizes.head_dim

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        n_kv_heads, n_chunks = k.shape[:2]
        keys, values = k.flatten(0, 1), v.flatten(0, 1)  # [G * m, L, D]
        if self.of == "keys":
            weights = own_attention(q, keys, n_kv_heads).amax(dim=2)  # [G * m, H/G, L]
            weights = (weights / weights.sum(-1, keepdim=True)).mean(dim=1, keepdim=True)
            summed = (weights.mT * keys).sum(dim=1)  # the bits of a product of matrices may depend on m
            return summed.to(keys.dtype).view(n_kv_heads, n_chunks, -1)
        out, _ = step.attention.dense(fold_chunks(q, n_kv_heads), keys, values, causal=False)
        query = out.mean(dim=1, keepdim=True)  # [G * m * H/G, 1, D]
        representation, _ = step.attention.dense(query, keys, keys, causal=False)
        return unfold_chunks(representation.squeeze(1), n_kv_heads, n_chunks)

    def summary_cost(self, sizes: Sizes, size: int) -> int:
        n_products = size if self.of == "keys" else 2 * (size + 1)  # Eq. 2: L queries; Eq. 1: one
        return sizes.n_heads * n_products * size * sizes.head_dim


def own_attention(q: Tensor, keys: Tensor, n_kv_heads: int) -> Tensor:
    """Return each chunk's attention to itself, `[G * m, H/G, L, L]`, of `q [H, m, L, D]` to `keys [G * m, L, D]`.

    Softmax weights in float32, without a causal mask.
    """
    size, dim = keys.shape[1:]
    queries = fold_chunks(q, n_kv_heads).reshape(len(keys), -1, dim)  # [G * m, H/G * L, D]
    # As for generated queries, in decode and in prefill: a step that interrupts a prefill shares no memory with it.
    logits: Tensor = products(queries / math.sqrt(dim), keys.mT, True).float().unflatten(1, (-1, size))
    return logits.softmax(-1)


@dataclass(frozen=True)
class MeanKey(SummarySelector, name="mean"):
    """The mean of a chunk's keys, a vector for each KV head. The score is `q · mean(k)`."""

    def shape(self, sizes: Sizes, selection: Selection) -> tuple[int, ...]:
        return sizes.n_kv_heads, sizes.head_dim

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return k.mean(dim=2)


@dataclass(frozen=True)
class Bounds(SummarySelector, name="bounds"):
    """Quest's bounds: the minimum and the maximum of each channel of a chunk's keys.

    The score `Σ_d max(q_d · min_d, q_d · max_d)` is an upper bound of `q · k` for all keys of the chunk.
    """

    def shape(self, sizes: Sizes, selection: Selection) -> tuple[int, ...]:
        return sizes.n_kv_heads, 2, sizes.head_dim

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return stack(k.aminmax(dim=2), dim=2)  # [G, m, 2, D]

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        return bound_scores(q, summary, generated=step.decoding)

    def scores(self, q: Tensor, summary: Tensor, n_choosers: int, step: Step, layer: int) -> Tensor:
        return bound_scores(q, summary, len(q) // n_choosers, step.decoding)


@dataclass(frozen=True)
class Representatives(SummarySelector, name="representatives"):
    """The sum of the `repr_tokens` keys of a chunk that received most attention, a vector for each query head.

    A key's attention is `Σ_t softmax(q_t Kᵀ/√D)` over the queries t of its own chunk, without a causal mask. InfLLM
    sums over all queries whose local window has the key, so its chunks wait until they leave the window.
    """

    repr_tokens: int = knob(4, "keys that represent a page", least=1)
    uses_queries: ClassVar[bool] = True

    def shape(self, sizes: Sizes, selection: Selection) -> tuple[int, ...]:
        return sizes.n_heads, sizes.head_dim

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        (n_kv_heads, n_chunks, size, _), keys = k.shape, k.flatten(0, 1)  # [G * m, L, D]
        received = own_attention(q, keys, n_kv_heads).sum(dim=2)  # [G * m, H/G, L]
        best = best_first(received, min(self.repr_tokens, size))
        taken = torch.zeros_like(received).scatter_(-1, best, 1.0).to(keys.dtype)
        return unfold_chunks((taken @ keys).flatten(0, 1), n_kv_heads, n_chunks)

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int, size: int) -> Tensor:
        return super().log_mass(scores, n_heads, head_dim, size) / min(self.repr_tokens, size)

    def summary_cost(self, sizes: Sizes, size: int) -> int:
        return sizes.n_heads * (size + 1) * size * sizes.head_dim


class ContextSelector(Selector):
    """A selector that scores chunks by facts of a context, but not by summaries of keys as cached."""

    def shape(self, sizes: Sizes, selection: Selection) -> tuple[int, ...]:
        return (0,)

    @abstractmethod
    def scores(
        self, method: Method, q: Tensor, n_chunks: int, selection: Selection, cache: LayerCache, step: Step
    ) -> Tensor:
        """Return scores `[H, T, n_chunks]` (or `[1, T, n_chunks]`) of the first chunks for unrotated `q [H, T, D]`."""

    def scorer(self, method: Method, selection: Selection, q: Tensor, cache: LayerCache, step: Step) -> Scorer:
        n_chunks, rows = step.stop // selection.size, max(1, SCORES_AT_ONCE // (len(q) * step.stop))
        n_choosers = selection.n_choosers(len(q), step.n_kv_heads)

        def score(here: slice, some: Step) -> Tensor:
            return self.together(self.scores(method, q[:, here], n_chunks, selection, cache, some), n_choosers)

        return score, rows


@dataclass(frozen=True)
class BestKey(ContextSelector, name="best_key"):
    """ReAttention's score of a chunk: the largest `q · k` of its keys, query and keys without positions.

    Keys are cached unrotated, so equal tokens tie, and the score is the same in every placement. Products are float32.
    """

    without_positions: ClassVar[bool] = True

    def scores(
        self, method: Method, q: Tensor, n_chunks: int, selection: Selection, cache: LayerCache, step: Step
    ) -> Tensor:
        queries, found = q.float().reshape(step.n_kv_heads, -1, q.shape[-1]), list[Tensor]()
        for start, stop in pieces(cache, 0, n_chunks * selection.size, selection.size):
            keys = unrotated_keys(method, cache, step, start, stop)
            scores = products(queries, keys.mT, step.decoding)
            found.append(scores.unflatten(-1, (-1, selection.size)).amax(-1))
        return torch.cat(found, dim=-1).view(*q.shape[:2], -1)

    def cost(self, block: QueryBlock, selection: Selection) -> Cost:
        n_tokens = block.stop // selection.size * selection.size if block.stop > selection.size else 0
        scores = block.n_heads * len(block) * n_tokens * block.head_dim
        return Cost(0, scores, state_read=n_tokens * block.n_kv_heads * block.head_dim)


def random_scores(n_heads: int, n_chunks: int, step: Step, layer: int, device: torch.device, seed: int = 0) -> Tensor:
    """Draw scores `[H, T, M]`. A score depends on seed, layer, head, query index and chunk, not on the block size."""
    heads = torch.arange(n_heads, device=device)[:, None, None]
    rows = (seed * 1_000_037 + layer * 1_000_003 + heads) * 1_000_033 + step.positions(device)[:, None]
    bits = (rows * 0x9E3779B1 + torch.arange(n_chunks, device=device) * 0x85EBCA77) & 0xFFFFFFFF
    for factor in (0x85EBCA6B, 0xC2B2AE35):  # the multiply-and-shift of Murmur3
        bits = ((bits ^ (bits >> 15)) * factor) & 0xFFFFFFFF
    return ((bits ^ (bits >> 16)) >> 8).float() / 2**24  # 24 random bits
