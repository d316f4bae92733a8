"""The runs of tokens that the query of a decode step sees, as numbers on the device, each with a turn."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lce.attention.turn import Turn


@dataclass(frozen=True)
class Runs:
    """S runs of tokens for a query: run s of head c is the tokens `first[c, s] .. first[c, s] + count[c, s] - 1`.

    `first count [C, S]`, int64, where C is 1 (all heads alike), G (one for each KV head) or H. A run with count 0 is
    empty. The query sees run s turned by `turns[turn[s]]`: `turn [S]`, int64, `turns [n, D/2]`. No count exceeds
    `most`, which the host knows. Shapes do not depend on the text's length, so a step can be recorded once and
    replayed.

    Example: chunk 3 of 256 tokens, and 17 tokens of chunk 5: `first [[768, 1280]]`, `count [[256, 17]]`, `most 256`.
    """

    first: Tensor
    count: Tensor
    turn: Tensor
    turns: Turn
    most: int
