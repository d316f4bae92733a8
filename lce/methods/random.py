"""Random chunks, for analysis: a selection whose results are no better is not worth its cost."""

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
    """Attention to random chunks, drawn for every query of every head. For analysis: a baseline for selecting methods.

    A draw depends on `seed`, layer, head, query index and chunk alone, not on the block size. The first chunk and the
    last complete one are always attended, as in `SelectiveMethod`, unless `keep_first` or `keep_last` is false.
    `budget` is given in tokens, in place of `chunks`, and includes the query's own chunk. With `top_p` a query takes
    that share of the chunks before its own, `chunks` at most.

    Cost: O(H · M) draws per token. A token attends at most `chunks · L` keys.
    """

    seed: int = knob(0, "another seed draws other chunks", kw_only=True)

    def chunk_scores(self, q: Tensor, n_chunks: int, cache: LayerCache, step: Step) -> Tensor:
        return random_scores(len(q), n_chunks, step, cache.index, q.device, self.seed)

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int) -> Tensor:
        return torch.zeros_like(scores)
