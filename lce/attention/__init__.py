"""Attention as a merge of parts, and choices by scores: the one door to the kernels. Its files are private."""

from lce.attention.attention import Attention
from lce.attention.choices import PlainChoice, best_chunks, first_best, plain_runs, runs_of_chunks
from lce.attention.merging import Attended, causal_mask, combine, merge
from lce.attention.runs import Runs
from lce.attention.scores import (
    SCORES_AT_ONCE,
    attention_sums,
    best_below_top,
    bound_scores,
    dot_products,
    principal_directions,
    products,
    scores_at_once,
    spread,
    token_scores,
)
from lce.attention.tiles import Tiles
from lce.attention.turn import Turn, append, rotate

__all__ = [
    "SCORES_AT_ONCE",
    "Attended",
    "Attention",
    "PlainChoice",
    "Runs",
    "Tiles",
    "Turn",
    "append",
    "attention_sums",
    "best_below_top",
    "best_chunks",
    "bound_scores",
    "causal_mask",
    "combine",
    "dot_products",
    "first_best",
    "merge",
    "plain_runs",
    "principal_directions",
    "products",
    "rotate",
    "runs_of_chunks",
    "scores_at_once",
    "spread",
    "token_scores",
]  # fmt: skip
