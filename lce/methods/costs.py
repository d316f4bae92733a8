"""Counts the cost of methods in multiply-adds, for a block of queries.

The cost of attending spans is computed from a method's parts. A method states the cost of choosing keys, and of
attending the chosen keys, in `Method.choice_cost`, with the functions of `QueryBlock`.

Only products count: queries with keys, softmax weights with values, and products that choose keys. Rotations, norms,
softmaxes and the search for the largest scores do not count, because their cost lacks the factor D.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lce.methods.attending import bounds, declared
from lce.methods.parts import CHOSEN, Declaring


@dataclass(frozen=True)
class Cost:
    """The cost of a block of queries in one layer, without products with the model's weights.

    Four fields count multiply-adds: `attention` for products of queries with keys and of softmax weights with values,
    `scores` for the scores by which keys are chosen, `summaries` for summaries of chunks, and `low_dim` for low-dim
    queries and keys. A field that is None was not counted.

    `rows_read` counts the keys that the block reads, once per token and KV head; this is an upper bound if heads choose
    independently. `state_read` counts the numbers, such as those of chunk summaries, that are read to choose keys.
    """

    attention: int | None
    scores: int | None = 0
    summaries: int | None = 0
    low_dim: int | None = 0
    rows_read: int | None = 0
    state_read: int | None = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*map(total, vars(self).values(), vars(other).values()))


UNCOUNTED = Cost(None, None, None, None, None, None)


def total(*counts: int | None) -> int | None:
    """Return the sum of the counts, or None if any count is None."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


@dataclass(frozen=True)
class QueryBlock:
    """The queries of tokens `start..stop-1` in one layer, and the model's sizes: all that a method's cost depends on.

    Example: the decode step of the token of index 999 is `start=999, stop=1000`.
    """

    start: int
    stop: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_layers: int = 1  # the number of layers in which the method acts
    layer: int = 0
    sliding_window: int | None = None  # the checkpoint's sliding window in tokens, if any
    first_layer: int = 0  # the first layer in which the method acts

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def causal(self) -> Cost:
        """The cost of plain causal attention: each query sees all tokens up to its own."""
        return self.seen(len(self) * (self.start + 1 + self.stop) // 2, self.stop)

    def tokens(self, n: int) -> Cost:
        """Return the cost if all queries attend the same `n` tokens."""
        return self.seen(len(self) * n, n)

    def chosen(self, size: int, chosen: int, *, together: bool = False) -> Cost:
        """Return the cost if the queries of each head attend `chosen` chunks of `size` tokens in all.

        With `together` the query heads of a KV head attend the same chunks. `rows_read` is an upper bound, for
        the case that no two queries or heads choose the same chunk.
        """
        n_lists = 1 if together else self.n_heads // self.n_kv_heads
        return self.seen(size * chosen, size * min(n_lists * chosen, (self.stop - 1) // size))

    def seen(self, pairs: int, n_tokens: int) -> Cost:
        """Return the cost of `pairs` query-key pairs per head, with keys of `n_tokens` different tokens in all."""
        return Cost(2 * self.n_heads * self.head_dim * pairs, rows_read=self.n_kv_heads * n_tokens)


def cost(method: Declaring, block: QueryBlock) -> Cost:
    """Return a resolved method's cost for a block of queries in one layer; `UNCOUNTED` if it is not `counted`."""
    return cost_of_spans(method, block) + method.choice_cost(block) if method.promised("counted") else UNCOUNTED


def cost_of_spans(method: Declaring, block: QueryBlock, i: Tensor | None = None) -> Cost:
    """Return the cost of attending the spans of a method's parts; each part's keys are read once.

    `i [n]` are the indices of the queries that attend; None: all queries of the block.
    """
    i, cost = torch.arange(block.start, block.stop) if i is None else i, Cost(0)
    for part in declared(method, i, block.layer, block.stop, block.sliding_window):
        if part.keys != CHOSEN:
            start, stop = bounds(part, i)
            seen = start < stop
            if seen.any():
                cost += block.seen(int((stop - start).sum()), int(stop.max() - start[seen].min()))
    return cost


@dataclass(frozen=True)
class PaperFigure:
    """A cost that a method's paper states, computed for the sizes of a model."""

    text: str
    where: str  # the equation or section of the paper
    value: float
    is_share: bool = False  # whether the value is printed as a percentage


@functools.singledispatch
def paper_figures(method: Declaring, block: QueryBlock) -> Sequence[PaperFigure]:
    """Return the costs that a method's paper states, computed for the model sizes in `block`.

    A class states them in a function of its own, which is registered by `paper_figures.register`.
    """
    return ()
