"""Attention as a merge of parts: the one door to the kernels. The files behind it are its own affair."""

from lce.attention.attention import Attention
from lce.attention.parts import Part, causal_mask, combine, merge
from lce.attention.runs import Runs
from lce.attention.tiles import Tiles
from lce.attention.turn import Turn, append, rotate

__all__ = ["Attention", "Part", "Runs", "Tiles", "Turn", "append", "causal_mask", "combine", "merge", "rotate"]
