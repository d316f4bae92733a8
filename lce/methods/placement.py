"""Placements of chosen chunks. A placement decides how keys are cached and how queries are rotated to score chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lce.attention import rotate
from lce.methods.parts import CHOSEN, Part
from lce.methods.step import Step


class Placement(ABC):
    """A rule for the positions at which a query sees its chosen chunks and its own chunk."""

    def key_positions(self, indices: Tensor, size: int) -> Tensor | None:
        """Return the positions at which keys are cached; None: keys are unrotated."""
        return None

    @abstractmethod
    def part(self, i: Tensor, size: int, n_slots: int, most: int) -> Part:
        """Return the `Part` of the chunks that queries `i [T]` choose: at most `most` each, in `n_slots` slots."""

    def scored(self, q: Tensor, step: Step, size: int) -> Tensor:
        """Return the block's unrotated queries `q`, rotated as the placement's scores of chunks need them."""
        return q


class SideBySide(Placement):
    """The placement of LongHeads: chosen chunks side by side from position 0, then the own chunk, within the window."""

    def key_positions(self, indices: Tensor, size: int) -> Tensor | None:
        return indices % size

    def part(self, i: Tensor, size: int, n_slots: int, most: int) -> Part:
        """Return the `Part`. Chunks are cached at positions 0..L-1, so the query's position is lower by s·L for slot s.

        Example: L = 4, two slots, index 13 (own chunk 3, offset 1): the query is at 9 for slot 0, at 5 for slot 1.
        """
        taken = (i // size).clamp(max=most)
        behind = (taken[:, None] - torch.arange(n_slots, device=i.device)).clamp(min=0) * size
        return Part(CHOSEN, behind + (i % size)[:, None], n_slots=taken)


class TruePositions(Placement):
    """The placement of chosen chunks at their true positions, for speed with models whose window is long."""

    def key_positions(self, indices: Tensor, size: int) -> Tensor | None:
        return indices

    def part(self, i: Tensor, size: int, n_slots: int, most: int) -> Part:
        return Part(CHOSEN, i)

    def scored(self, q: Tensor, step: Step, size: int) -> Tensor:
        return rotate(q, step.true_turn(q))


class ConstantDistance(Placement):
    """The placement of chosen chunks at one distance, the chunk size L. The own chunk is at distances 0 to L - 1."""

    def part(self, i: Tensor, size: int, n_slots: int, most: int) -> Part:
        return Part(CHOSEN, size)

    def scored(self, q: Tensor, step: Step, size: int) -> Tensor:
        return rotate(q, step.far_turn(size, q))


PLACEMENTS: dict[str, Placement] = {
    "side_by_side": SideBySide(), "true": TruePositions(), "constant": ConstantDistance(),
}  # fmt: skip
