"""Attention to sets of keys, merged by log-sum-exps, and choices by scores. Import from here, not from the files."""

from lce.attention.attention import Attention as Attention
from lce.attention.choices import best_chunks as best_chunks
from lce.attention.choices import best_runs as best_runs
from lce.attention.choices import first_best as first_best
from lce.attention.choices import runs_of_chunks as runs_of_chunks
from lce.attention.merging import Attended as Attended
from lce.attention.merging import causal_mask as causal_mask
from lce.attention.merging import combine as combine
from lce.attention.merging import join as join
from lce.attention.merging import merge as merge
from lce.attention.scores import SCORES_AT_ONCE as SCORES_AT_ONCE
from lce.attention.scores import attention_sums as attention_sums
from lce.attention.scores import best_below_top as best_below_top
from lce.attention.scores import bound_scores as bound_scores
from lce.attention.scores import dot_products as dot_products
from lce.attention.scores import principal_directions as principal_directions
from lce.attention.scores import products as products
from lce.attention.scores import scores_at_once as scores_at_once
from lce.attention.scores import spread as spread
from lce.attention.scores import token_scores as token_scores
from lce.attention.tiles import Runs as Runs
from lce.attention.tiles import Tiles as Tiles
from lce.attention.turn import Turn as Turn
from lce.attention.turn import append as append
from lce.attention.turn import rotate as rotate
