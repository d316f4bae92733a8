"""Attention to sets of keys, merged by log-sum-exps, and choices by scores. Import from here, not from the files."""

from lce.attention.attention import Attention
from lce.attention.choices import best_chunks, best_runs, first_best, runs_of_chunks
from lce.attention.merging import Attended, causal_mask, combine, join, merge
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
from lce.attention.tiles import Runs, Tiles
from lce.attention.turn import Turn, append, rotate
