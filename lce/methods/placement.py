"""Placements of chosen chunks. A placement decides how keys are cached and how queries are rotated to score chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lce.attention import Turn, rotate
from lce.methods.parts import CHOSEN, Part
from lce.methods.step import Step


class Placement(ABC):
    """A rule for the positions at which a query sees its chosen chunks and its own chunk."""

    true_within: ClassVar[bool] = False  # whether distances are true if a query attends all chunks before its own
    exact: ClassVar[bool] = False  # whether the own chunk is seen by recent keys, although keys are cached rotated

    def key_positions(self, indices: Tensor, size: int) -> Tensor | None:
        """Return the positions at which keys are cached; None: keys are unrotated."""
        return None

    @abstractmethod
    def part(self, i: Tensor, size: int, n_slots: int, most: int) -> Part:
        """Return the `Part` of the chunks that queries `i [T]` choose: at most `most` each, in `n_slots` slots."""

    def bands(self, i: Tensor, size: int) -> Tensor | None:
        """Return the `Part.bands` of queries `i [T]`; None: positions do not differ by a range of chunks."""
        return None

    def scored(self, q: Tensor, step: Step, size: int) -> list[Tensor]:
        """Return the block's unrotated queries `q`, rotated to score chunks: once for all chunks, or for each band."""
        return [q]


class SideBySide(Placement):
    """The placement of LongHeads: chosen chunks side by side from position 0, then the own chunk, within the window."""

    true_within: ClassVar[bool] = True

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

    true_within: ClassVar[bool] = True

    def key_positions(self, indices: Tensor, size: int) -> Tensor | None:
        return indices

    def part(self, i: Tensor, size: int, n_slots: int, most: int) -> Part:
        return Part(CHOSEN, i)

    def scored(self, q: Tensor, step: Step, size: int) -> list[Tensor]:
        return [rotate(q, step.true_turn(q))]


@dataclass(frozen=True)
class ConstantDistance(Placement):
    """The placement of chosen chunks at one distance, by default the chunk size L. Other tokens: true distances."""

    distance: int | None = None

    def part(self, i: Tensor, size: int, n_slots: int, most: int) -> Part:
        return Part(CHOSEN, self.distance or size)

    def scored(self, q: Tensor, step: Step, size: int) -> list[Tensor]:
        return [rotate(q, step.far_turn(self.distance or size, q))]


@dataclass(frozen=True)
class GroupedPositions(Placement):
    """The placement of Self-Extend: chosen keys at `j // group`, the query at `i // group + reach - reach // group`.

    At most `reach` tokens, those of the own chunk and of chunks seen with it, are at true distances.
    """

    group: int
    reach: int
    exact: ClassVar[bool] = True

    def key_positions(self, indices: Tensor, size: int) -> Tensor | None:
        return indices // self.group

    def query_at(self, i: Tensor) -> Tensor:
        """Return the positions from which queries `i [T]` see chosen keys."""
        return i // self.group + self.reach - self.reach // self.group

    def part(self, i: Tensor, size: int, n_slots: int, most: int) -> Part:
        return Part(CHOSEN, self.query_at(i))

    def scored(self, q: Tensor, step: Step, size: int) -> list[Tensor]:
        turn = step.once("grouped turn", lambda: step.rope.turn(self.query_at(step.positions(q.device)), q.dtype))
        return [rotate(q, turn)]


@dataclass(frozen=True)
class DualPositions(Placement):
    """The placement of Dual Chunk Attention, by large chunks of `chunk_size` tokens: key j is at `j mod chunk_size`.

    The query i is at `i mod chunk_size` for its own large chunk, at `min(chunk_size + i mod chunk_size, far)` for the
    previous one, and at `far` for older ones. `chunk_size` is a multiple of the chunk size L.
    """

    chunk_size: int
    far: int

    def key_positions(self, indices: Tensor, size: int) -> Tensor | None:
        return indices % self.chunk_size

    def bands(self, i: Tensor, size: int) -> Tensor | None:
        """Return the first chunks of the previous large chunk and of the own one."""
        own = i // self.chunk_size * (self.chunk_size // size)
        return torch.stack((own - self.chunk_size // size, own), dim=1)

    def query_at(self, i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the positions from which queries `i [T]` see older large chunks, the previous one, the own one."""
        offset = i % self.chunk_size
        return torch.full_like(i, self.far), (self.chunk_size + offset).clamp(max=self.far), offset

    def part(self, i: Tensor, size: int, n_slots: int, most: int) -> Part:
        return Part(CHOSEN, torch.stack(self.query_at(i), dim=1), bands=self.bands(i, size))

    def scored(self, q: Tensor, step: Step, size: int) -> list[Tensor]:
        def make() -> list[Turn]:
            return [step.rope.turn(at, q.dtype) for at in self.query_at(step.positions(q.device))]

        return [rotate(q, turn) for turn in step.once("dual turns", make)]


PLACEMENTS: dict[str, Placement] = {
    "side_by_side": SideBySide(),
    "true": TruePositions(),
    "constant": ConstantDistance(),
}
