"""`Turn`: the rotation of a vector to a position, as cosines and sines (RoPE, Su et al., 2021)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lce import gpu
from lce.kernels.elementwise import elementwise


class Turn(NamedTuple):
    """A rotation as cosines and sines, `[..., D/2]` each: one angle for each pair of dimensions."""

    cos: Tensor
    sin: Tensor

    def at(self, *index: Any) -> "Turn":
        """Return the rotations at `index`, an index into the leading dimensions; `None` inserts a dimension."""
        return Turn(self.cos[index], self.sin[index])


class SlotTurns(NamedTuple):
    """A rotation for each of K slots of T queries: `table [P, D/2]` has the rotations, `rows [T, K]` their numbers.

    `rows` is int64; `[T, 1]` if one rotation serves all slots of a query, or `[1, 1]`. Slots share a table's entries.
    """

    table: Turn
    rows: Tensor

    def at(self, queries: slice) -> "SlotTurns":
        """Return the rotations of some queries."""
        return self if len(self.rows) == 1 else SlotTurns(self.table, self.rows[queries])


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Rotate `x [..., D]` by `turn [..., D/2]`; the leading dimensions of both broadcast.

    Dimension i is paired with dimension i + D/2, as in published checkpoints. Time and memory: O(size of the result).
    """
    cos, sin = turn
    if elementwise.runs_on(x) and cos.dtype is x.dtype:
        return elementwise.rotate(x, cos, sin)
    if gpu.launching.runs_on(x):
        return gpu.elementwise.rotate(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    left, right = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    return torch.cat((left, right), dim=-1).to(x.dtype)


def append(k: Tensor, v: Tensor, into_k: Tensor, into_v: Tensor, at: int | Tensor, turn: Turn | None = None) -> None:
    """Write `k v [G, T, D]` to rows `at..at+T-1` of `into_k into_v [G, n, D]`; `turn [T, D/2]`, if given, rotates k.

    `at` may be one int64 on the device, so that one CUDA graph of a step serves all positions.
    """
    alike = k.dtype is into_k.dtype is v.dtype
    if alike and (turn is None or turn.cos.dtype is k.dtype) and not isinstance(at, Tensor) and elementwise.runs_on(k):
        elementwise.append(k, v, into_k, into_v, at, *(turn or (None, None)))
    elif alike and gpu.launching.runs_on(k):
        gpu.elementwise.append(k, v, into_k, into_v, at, *(turn or (None, None)))
    else:
        rows = at + torch.arange(k.shape[1], device=k.device)
        for x, into in ((k if turn is None else rotate(k, turn), into_k), (v, into_v)):
            into.index_copy_(1, rows, x.to(into.dtype))
