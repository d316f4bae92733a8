"""What a method chose, for study."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Trace:
    """What a method chose: `chosen[layer]` `[H, T, K]`, ascending, -1 for none.

    Choice c stands for the `chunk_size` tokens from `first + c · chunk_size` on. Tokens that every query attends, such
    as its own chunk or its local window, are not listed. K is 0 for a method that chooses nothing.
    """

    chunk_size: int
    chosen: list[Tensor]
    first: int = 0


class TraceRecorder:
    """Collects the choices of a prefill: `note` is called by the method, `end_block` after each block."""

    def __init__(self, n_layers: int, n_heads: int) -> None:
        self.n_heads = n_heads
        self._block: dict[int, Tensor] = {}  # what each layer chose in this block
        self._parts: list[list[Tensor]] = [[] for _ in range(n_layers)]  # a part a block

    def note(self, layer: int, chosen: Tensor) -> None:
        """Record what a layer chose in this block, `[H, T, K]`."""
        self._block[layer] = chosen

    def end_block(self, n_tokens: int) -> None:
        """Keep the choices of this block of `n_tokens`; an empty one for a layer that chose nothing."""
        nothing = torch.empty(self.n_heads, n_tokens, 0, dtype=torch.int64)
        for layer, parts in enumerate(self._parts):
            parts.append(self._block.pop(layer, nothing))

    def trace(self, choices: tuple[int, int]) -> Trace:
        """The choices of all blocks; `choices` is `Method.choices`."""
        first, size = choices
        return Trace(size, [_joined(parts) for parts in self._parts], first)


def _joined(parts: list[Tensor]) -> Tensor:
    """Choices `[H, T, K]` of several blocks, each padded with -1 to the largest K."""
    widest = max(part.shape[-1] for part in parts)
    return torch.cat([pad(part.cpu(), (0, widest - part.shape[-1]), value=-1) for part in parts], dim=1)
