"""Counts the cost of methods in multiply-adds, for a block of queries.

The cost of spans follows from a method's parts. A method states the cost of choosing, and of attending the chosen keys,
in `Method.choice_cost`, with the functions of `QueryBlock`.

Only products count: of queries with keys, of softmax weights with values, and for choosing. Rotations, norms, softmaxes
and the search for the largest scores do not count, because their cost lacks the factor D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lce.methods.attending import bounds, declared
from lce.methods.parts import CHOSEN

if TYPE_CHECKING:
    from lce.methods.base import Method


@dataclass(frozen=True)
class Cost:
    """The cost of a block of queries in one layer, without products with the model's weights.

    Multiply-adds: `attention` of queries with keys and of softmax weights with values, `scores` of queries with the
    method's state for choosing, `summaries` to make the summaries of chunks, `low_dim` of the maps to low-dim queries
    and keys. None: not counted.

    Reads: `rows_read` counts the tokens of all KV heads whose keys and values the block sees, each once; it is an upper
    bound if heads choose independently. `state_read` counts the numbers of the method's state that are read.
    """

    attention: int | None
    scores: int | None = 0
    summaries: int | None = 0
    low_dim: int | None = 0
    rows_read: int | None = 0
    state_read: int | None = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(total, vars(self).values(), vars(other).values()))


UNCOUNTED = Cost(None, None, None, None, None, None)


def total(*counts: int | None) -> int | None:
    """Return the sum of counts; None if any is None."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


@dataclass(frozen=True)
class QueryBlock:
    """The queries of tokens `start..stop-1`, in one layer of a model: the facts that a method's cost depends on.

    Example: a decode step of the token of index 999 is `start=999, stop=1000`.
    """

    start: int
    stop: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_layers: int = 1
    layer: int = 0
    sliding_window: int | None = None  # the checkpoint's, if it has one

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def causal(self) -> Cost:
        """The cost of plain causal attention: each query sees all tokens up to its own."""
        return self.seen(_sum_to(self.stop) - _sum_to(self.start), self.stop)

    def tokens(self, n: int) -> Cost:
        """Count `n` tokens that all queries see."""
        return self.seen(len(self) * n, n)

    def chunks(self, size: int, most: int, *, together: bool = False) -> Cost:
        """Count, for each query of each head, `most` of the chunks before the query's own, or all if there are fewer.

        With `together` the query heads of a KV head see the same chunks. Reads are an upper bound, as if all choices
        differed.
        """

        def before(n: int) -> int:
            return size * _sum_to(n // size - 1, most) + n % size * min(most, n // size)

        chosen = before(self.stop) - before(self.start)
        n_lists = 1 if together else self.n_heads // self.n_kv_heads
        return self.seen(size * chosen, size * min(n_lists * chosen, (self.stop - 1) // size))

    def seen(self, pairs: int, n_tokens: int) -> Cost:
        """Count `pairs` pairs of a query and a key in each head, for `n_tokens` different keys in all."""
        return Cost(2 * self.n_heads * self.head_dim * pairs, rows_read=self.n_kv_heads * n_tokens)


def _sum_to(n: int, most: int | None = None) -> int:
    """Return `min(1, most) + min(2, most) + … + min(n, most)`; 0 for n below 1."""
    n = max(0, n)
    rising = n if most is None else min(n, most)
    return rising * (rising + 1) // 2 + (n - rising) * (most or 0)


def cost_of_spans(method: Method, block: QueryBlock) -> Cost:
    """Return the cost of the spans of a method's parts; each part's keys are read once."""
    i, cost = torch.arange(block.start, block.stop), Cost(0)
    for part in declared(method, i, block.layer, block.stop, block.sliding_window):
        if part.keys != CHOSEN:
            start, stop = bounds(part, i)
            seen = start < stop
            if seen.any():
                cost += block.seen(int((stop - start).sum()), int(stop.max() - start[seen].min()))
    return cost


@dataclass(frozen=True)
class PaperFigure:
    """A figure of cost that a method's paper states, computed for a model."""

    text: str
    where: str  # the equation or section of the paper
    value: float
    is_share: bool = False  # whether the value is printed as a percentage
