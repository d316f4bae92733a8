"""Random chunks, for analysis: a selection is only worth its cost if it beats them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lce.cache.layer import LayerCache
from lce.methods.base import knob
from lce.methods.longheads import random_scores
from lce.methods.oracle import BudgetedChunks
from lce.methods.registry import register
from lce.methods.step import Step


@register("random")
@dataclass(frozen=True)
class RandomChunks(BudgetedChunks):
    """Random chunks, drawn for every query of every head. For analysis: the result of a budget without any selection.

    A draw depends on `seed`, layer, head, query index and chunk alone, not on the block size. The first chunk and the
    last complete one are always attended, as in `SelectiveMethod`, unless `keep_first` or `keep_last` is false.
    `budget` replaces `chunks` by a number of tokens, the query's own chunk included. With `top_p` a query takes that
    share of the chunks before it, `chunks` at most.

    Cost: O(H · M) draws a token, and at most `chunks · L` keys attended.
    """

    seed: int = knob(0, "another seed draws other chunks", kw_only=True)

    def chunk_scores(self, q: Tensor, n_chunks: int, cache: LayerCache, step: Step) -> Tensor:
        return random_scores(len(q), n_chunks, step, cache.index, q.device, self.seed)

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int) -> Tensor:
        return torch.zeros_like(scores)
