"""Random chunks, for analysis: a selection whose results are no better is not worth its cost."""

from __future__ import annotations

from dataclasses import dataclass

from lce.methods.base import knob
from lce.methods.oracle import BudgetedChunks
from lce.methods.registry import register
from lce.methods.selectors import Random


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

    @property
    def selector(self) -> Random:
        return Random(self.seed)
