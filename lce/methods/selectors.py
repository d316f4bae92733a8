"""Selectors of chunks: what is kept of a complete chunk, and how chunks are scored for a query.

Selection and placement are independent. A selector is one axis, a `Placement` is the other. Keys and queries come to a
selector as the placement rotates them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, stack

from lce.attention import SCORES_AT_ONCE, bound_scores, dot_products, products
from lce.cache.layer import LayerCache
from lce.methods.attending import fold_chunks, unfold_chunks
from lce.methods.base import Method
from lce.methods.costs import Cost, QueryBlock
from lce.methods.mass import Judge, TrueMass, pieces, unrotated
from lce.methods.step import Step

Scorer = Callable[[slice, Step], Tensor]  # takes a slice of t queries and the slice's step; returns scores `[C, t, M]`


class Sizes(Protocol):
    """The sizes of a model's attention, as a `CacheLayout` and a `QueryBlock` have them."""

    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class Selector(ABC):
    """A rule that scores chunks of L tokens, so that a query can choose the best."""

    uses_queries: ClassVar[bool] = False  # whether summaries are made of queries, which are kept until then

    @abstractmethod
    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the shape `[S, …]` of one chunk's summary; m chunks have `[S, m, …]`. `(0,)`: nothing is kept."""

    def together(self, scores: Tensor, n_choosers: int) -> Tensor:
        """Return the scores `[C, T, M]` by which C groups of neighbouring heads choose, from `scores [H, T, M]`."""
        return scores if n_choosers == len(scores) else scores.float().unflatten(0, (n_choosers, -1)).sum(1)

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int) -> Tensor:
        """Estimate the logarithms of chunks' attention mass, up to a constant per query, from scores `[C, T, M]`.

        By default, a chunk's score is the logit of each of its tokens, summed over the heads that choose together.
        """
        return scores.float() * (len(scores) / n_heads / math.sqrt(head_dim))

    @abstractmethod
    def cost(self, block: QueryBlock, size: int) -> Cost:
        """Return the cost of choosing chunks of `size` tokens, without attending them."""


class SummarySelector(Selector):
    """A selector that keeps a summary of each complete chunk, and scores chunks by their summaries."""

    @abstractmethod
    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Return the summaries `[S, m, …]` of m complete chunks, `q [H, m, L, D]` and `k v [G, m, L, D]`.

        Without `uses_queries`, q is `[H, m, 0, D]`.
        """

    def score(self, q: Tensor, summary: Tensor, together: int = 1) -> Tensor:
        """Return the scores `[H / n, T, M]` of chunks with `summary [S, M, …]` for queries `q [H, T, D]`.

        Scores are summed over n = `together` neighbouring heads, which choose together. By default the summaries are
        vectors, S is H or G, and scores are dot products.
        """
        return dot_products(q, summary, together)

    def summary_cost(self, sizes: Sizes, size: int) -> int:
        """Return the multiply-adds of the products for one chunk's summary."""
        return 0

    def cost(self, block: QueryBlock, size: int) -> Cost:
        """Return the cost where each head scores each chunk, by a product for each vector of a summary row."""
        heads, *row = self.shape(block)
        n_chunks = block.stop // size if block.stop > size else 0
        summaries = (block.stop // size - block.start // size) * self.summary_cost(block, size)
        scores = block.n_heads * len(block) * n_chunks * math.prod(row)
        return Cost(0, scores, summaries, state_read=n_chunks * heads * math.prod(row))


class Summary(SummarySelector):
    """LongHeads' summary, a vector for each query head: the keys that the chunk's own queries attend (Eq. 1-2).

    `O = softmax(Q Kᵀ/√D) V` without a causal mask, `q^c = mean(O)`, `c = softmax(q^c Kᵀ/√D) K`. The score is `q · c`.
    """

    uses_queries: ClassVar[bool] = True

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return sizes.n_heads, sizes.head_dim

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        n_kv_heads, n_chunks = k.shape[:2]
        keys, values = k.flatten(0, 1), v.flatten(0, 1)  # [G * m, L, D]
        out, _ = step.attention.dense(fold_chunks(q, n_kv_heads), keys, values, causal=False)
        query = out.mean(dim=1, keepdim=True)  # [G * m * H/G, 1, D]
        representation, _ = step.attention.dense(query, keys, keys, causal=False)
        return unfold_chunks(representation.squeeze(1), n_kv_heads, n_chunks)

    def summary_cost(self, sizes: Sizes, size: int) -> int:
        return 2 * sizes.n_heads * (size + 1) * size * sizes.head_dim  # Eq. 2: L queries; Eq. 1: one


class MeanKey(SummarySelector):
    """The mean of a chunk's keys, a vector for each KV head. The score is `q · mean(k)`."""

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return sizes.n_kv_heads, sizes.head_dim

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return k.mean(dim=2)


class Bounds(SummarySelector):
    """Quest's bounds: the minimum and the maximum of each channel of a chunk's keys.

    The score `Σ_d max(q_d · min_d, q_d · max_d)` is an upper bound of `q · k` for all keys of the chunk.
    """

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return sizes.n_kv_heads, 2, sizes.head_dim

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return stack(k.aminmax(dim=2), dim=2)  # [G, m, 2, D]

    def score(self, q: Tensor, summary: Tensor, together: int = 1) -> Tensor:
        return bound_scores(q, summary, together)


@dataclass(frozen=True)
class Representatives(SummarySelector):
    """The sum of the `n_tokens` keys of a chunk that received most attention, a vector for each query head.

    A key's attention is `Σ_t softmax(q_t Kᵀ/√D)` over the queries t of its own chunk, without a causal mask. InfLLM
    sums over all queries whose local window has the key, so its chunks wait until they leave the window.
    """

    n_tokens: int
    uses_queries: ClassVar[bool] = True

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return sizes.n_heads, sizes.head_dim

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        (n_kv_heads, n_chunks, size, dim), keys = k.shape, k.flatten(0, 1)  # [G * m, L, D]
        queries = fold_chunks(q, n_kv_heads).reshape(len(keys), -1, dim)  # [G * m, H/G * L, D]
        logits = products(queries / math.sqrt(dim), keys.mT).float().unflatten(1, (-1, size))
        received = logits.softmax(-1).sum(dim=2)  # [G * m, H/G, L]
        best = received.topk(min(self.n_tokens, size)).indices
        taken = torch.zeros_like(received).scatter_(-1, best, 1.0).to(keys.dtype)
        return unfold_chunks((taken @ keys).flatten(0, 1), n_kv_heads, n_chunks)

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int) -> Tensor:
        return super().log_mass(scores, n_heads, head_dim) / self.n_tokens

    def summary_cost(self, sizes: Sizes, size: int) -> int:
        return sizes.n_heads * (size + 1) * size * sizes.head_dim


class ContextSelector(Selector):
    """A selector that scores chunks by other facts of a context than summaries of keys as they are cached."""

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return (0,)

    @abstractmethod
    def scores(self, method: Method, q: Tensor, n_chunks: int, size: int, cache: LayerCache, step: Step) -> Tensor:
        """Return scores `[H, T, n_chunks]` (or `[1, T, n_chunks]`) of the first chunks for unrotated `q [H, T, D]`."""

    def scorer(
        self, method: Method, q: Tensor, n_choosers: int, size: int, cache: LayerCache, step: Step
    ) -> tuple[Scorer, int]:
        """Return a function that scores a slice of the queries `q [H, T, D]`, and the number of queries in a slice."""
        n_chunks, rows = step.stop // size, max(1, SCORES_AT_ONCE // (len(q) * step.stop))

        def score(here: slice, some: Step) -> Tensor:
            return self.together(self.scores(method, q[:, here], n_chunks, size, cache, some), n_choosers)

        return score, rows


@dataclass(frozen=True)
class Mass(ContextSelector):
    """For analysis: a chunk's score is the logarithm of its true attention mass, as `judge` defines truth."""

    judge: Judge

    def scores(self, method: Method, q: Tensor, n_chunks: int, size: int, cache: LayerCache, step: Step) -> Tensor:
        return TrueMass(method, cache, step, self.judge).of_chunks(q, step.positions(q.device), size, n_chunks)

    def together(self, scores: Tensor, n_choosers: int) -> Tensor:
        return scores if n_choosers == len(scores) else scores.unflatten(0, (n_choosers, -1)).logsumexp(1)

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int) -> Tensor:
        return scores

    def cost(self, block: QueryBlock, size: int) -> Cost:
        """Return the cost of choosing, which reads all keys; scores are not counted."""
        return Cost(0, None, state_read=block.stop * block.n_kv_heads * block.head_dim)


class BestKey(ContextSelector):
    """ReAttention's score of a chunk: the largest `q · k` of its keys, query and keys without positions.

    Keys are rotated back from where they are cached, so the score is the same in every placement. Products are float32.
    """

    def scores(self, method: Method, q: Tensor, n_chunks: int, size: int, cache: LayerCache, step: Step) -> Tensor:
        queries, found = q.float().reshape(step.n_kv_heads, -1, q.shape[-1]), list[Tensor]()
        for start, stop in pieces(cache, 0, n_chunks * size, size):
            keys = unrotated(method, cache, step, start, stop)
            found.append(products(queries, keys.mT).unflatten(-1, (-1, size)).amax(-1))
        return torch.cat(found, dim=-1).view(*q.shape[:2], -1)

    def cost(self, block: QueryBlock, size: int) -> Cost:
        """Return the cost of choosing, which reads and multiplies all keys of complete chunks."""
        n_tokens = block.stop // size * size if block.stop > size else 0
        scores = block.n_heads * len(block) * n_tokens * block.head_dim
        return Cost(0, scores, state_read=n_tokens * block.n_kv_heads * block.head_dim)


@dataclass(frozen=True)
class Random(ContextSelector):
    """For analysis: random scores. A score depends on seed, layer, head, query index and chunk alone."""

    seed: int = 0

    def scores(self, method: Method, q: Tensor, n_chunks: int, size: int, cache: LayerCache, step: Step) -> Tensor:
        return random_scores(len(q), n_chunks, step, cache.index, q.device, self.seed)

    def together(self, scores: Tensor, n_choosers: int) -> Tensor:
        """Return the scores of the first head of each group."""
        return scores[:: len(scores) // n_choosers]

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int) -> Tensor:
        return torch.zeros_like(scores)

    def cost(self, block: QueryBlock, size: int) -> Cost:
        return Cost(0)


def random_scores(n_heads: int, n_chunks: int, step: Step, layer: int, device: torch.device, seed: int = 0) -> Tensor:
    """Draw scores `[H, T, M]`. A score depends on seed, layer, head, query index and chunk, not on the block size."""
    heads = torch.arange(n_heads, device=device)[:, None, None]
    rows = (seed * 1_000_037 + layer * 1_000_003 + heads) * 1_000_033 + step.positions(device)[:, None]
    return _mix(rows, torch.arange(n_chunks, device=device))


def _mix(x: Tensor, y: Tensor) -> Tensor:
    """Hash two integer tensors to floats in [0, 1), with 24 random bits (the multiply-and-shift of Murmur3)."""
    bits = (x * 0x9E3779B1 + y * 0x85EBCA77) & 0xFFFFFFFF
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        bits = ((bits ^ (bits >> 15)) * factor) & 0xFFFFFFFF
    return ((bits ^ (bits >> 16)) >> 8).float() / 2**24


BY_NUMBER = "random choices depend on a head's number among all heads; choose in another way"  # `couples_heads`
SUMMARY, BOUNDS, BEST_KEY = Summary(), Bounds(), BestKey()
SELECTORS: dict[str, SummarySelector] = {"summary": SUMMARY, "bounds": BOUNDS, "mean": MeanKey()}
