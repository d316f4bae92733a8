"""What a method chose, for study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Trace:
    """What a method chose: `chosen[layer]` `[H, T, K]`, ascending, -1 for none.

    Choice c stands for the `chunk_size` tokens from `first + c · chunk_size` on. What a query attends unasked, its own
    chunk or its local window, is not listed. Empty for a method that chooses nothing.
    """

    chunk_size: int
    chosen: list[Tensor]
    first: int = 0

    @classmethod
    def of(cls, seen: Sequence[Sequence[Tensor]], choices: tuple[int, int]) -> Self:
        """A trace of what each layer chose in each block, `[H, T, K]`; `choices` as `Method.choices` has it."""
        first, size = choices
        widest = [max(part.shape[-1] for part in parts) for parts in seen]
        chosen = [
            torch.cat([_widened(part.cpu(), width) for part in parts], dim=1)
            for parts, width in zip(seen, widest, strict=True)
        ]
        return cls(size, chosen, first)


def _widened(chosen: Tensor, width: int) -> Tensor:
    """Chosen chunks `[H, T, K]` as `[H, T, width]`, -1 behind."""
    return torch.nn.functional.pad(chosen, (0, width - chosen.shape[-1]), value=-1)
