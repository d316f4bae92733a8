"""Where a query sees the chunks that it chose: how keys are cached and which query is scored follow from it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lce.attention import Turn, rotate
from lce.methods.step import Step


class Placement(ABC):
    """Where a query sees the chunks that it chose, and its own chunk."""

    def key_positions(self, indices: Tensor, size: int) -> Tensor | None:
        """Where keys are rotated to before they are cached; None: left unrotated."""
        return None

    @abstractmethod
    def slot_turns(self, q: Tensor, step: Step, size: int, n_slots: int, most: int) -> Turn:
        """What turns a query for each of `n_slots` choices, `[T, n_slots, D/2]`, or `[T, 1, D/2]` for all alike.

        `most` is how many chunks a query may choose.
        """

    @abstractmethod
    def distances(self, chosen: Tensor, index: Tensor, size: int, most: int) -> Tensor:
        """The least and the largest distance at which queries `index [T]` see choices `[H, T, K]`: `[H, T, K, 2]`."""

    def slots(self, chosen: Tensor, step: Step, size: int, most: int) -> Tensor:
        """Choices `[H, T, K]`, -1 behind the last, in the slots that `slot_turns` means, where some have fewer."""
        return chosen

    def scored(self, q: Tensor, step: Step, size: int) -> Tensor:
        """The block's queries as `score` is given them."""
        return q


class SideBySide(Placement):
    """Chosen chunks side by side from position 0, the own chunk right after them: all within the window (LongHeads)."""

    def key_positions(self, indices: Tensor, size: int) -> Tensor | None:
        return indices % size

    def slot_turns(self, q: Tensor, step: Step, size: int, n_slots: int, most: int) -> Turn:
        """A chunk cached at offsets 0..L-1 is seen at slot s by turning the query back by s·L.

        Example: L = 4, two slots, index 13 (own chunk 3, offset 1): the query is at 9 for slot 0, at 5 for slot 1.
        """
        indices = step.positions(q.device)
        taken = (indices // size).clamp(max=most)[:, None]
        behind = (taken - torch.arange(n_slots, device=q.device)).clamp(min=0) * size
        return step.rope.turn(behind + (indices % size)[:, None], q.dtype)

    def distances(self, chosen: Tensor, index: Tensor, size: int, most: int) -> Tensor:
        """Chosen chunks stand right before the own one, the last of them nearest.

        Example: L = 4, index 13 (offset 1), chunks 0 and 2: chunk 2 at 2 to 5, chunk 0 at 6 to 9.
        """
        behind = (chosen >= 0).sum(-1, keepdim=True) - torch.arange(chosen.shape[-1], device=chosen.device)
        farthest = behind * size + (index % size)[:, None]
        return torch.stack((farthest - size + 1, farthest), dim=-1)

    def slots(self, chosen: Tensor, step: Step, size: int, most: int) -> Tensor:
        """Fewer choices stand behind empty slots, so that the own chunk is right after them for every head.

        Example: `most` is 3, a query has chunks 2 and 5: slots -1, 2, 5.
        """
        taken = (step.positions(chosen.device) // size).clamp(max=most)[:, None]
        number = torch.arange(chosen.shape[-1], device=chosen.device) - taken + (chosen >= 0).sum(-1, keepdim=True)
        return chosen.gather(-1, number.clamp(min=0)).masked_fill(number < 0, -1)


class TruePositions(Placement):
    """Chosen chunks at their true positions: for models whose window is long already, and whose users want speed."""

    def key_positions(self, indices: Tensor, size: int) -> Tensor | None:
        return indices

    def slot_turns(self, q: Tensor, step: Step, size: int, n_slots: int, most: int) -> Turn:
        return step.true_turn(q).at(slice(None), None)

    def distances(self, chosen: Tensor, index: Tensor, size: int, most: int) -> Tensor:
        farthest = index[:, None] - chosen * size
        return torch.stack((farthest - size + 1, farthest), dim=-1)

    def scored(self, q: Tensor, step: Step, size: int) -> Tensor:
        return rotate(q, step.true_turn(q))


class ConstantDistance(Placement):
    """Chosen chunks at one distance, the chunk size L. The own chunk has the distances 0 to L - 1."""

    def slot_turns(self, q: Tensor, step: Step, size: int, n_slots: int, most: int) -> Turn:
        return Turn(*(x.expand(q.shape[1], 1, -1) for x in step.far_turn(size, q)))

    def distances(self, chosen: Tensor, index: Tensor, size: int, most: int) -> Tensor:
        return torch.full((*chosen.shape, 2), size, device=chosen.device)

    def scored(self, q: Tensor, step: Step, size: int) -> Tensor:
        return rotate(q, step.far_turn(size, q))


PLACEMENTS: dict[str, Placement] = {
    "side_by_side": SideBySide(), "true": TruePositions(), "constant": ConstantDistance(),
}  # fmt: skip
