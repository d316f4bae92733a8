"""Rows that lie in the memory of several contexts: what a recorded step of several lanes reads and writes on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lce import gpu

ALIGNED = 16  # the bytes of which addresses are multiples, so that a thread reads as many at once


@dataclass(frozen=True, eq=False)
class LaneRows:
    """Rows of numbers of B contexts, `shape` `[heads, rows, …]` each: at most as many rows as the longest one may have.

    `table [B, heads]` (int64, on the device) has the address of each head's row 0. Rows of the first `count [1]`
    contexts may be written; the others stand in for none, so that B is one of a few numbers.
    """

    table: Tensor
    count: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    first = 0  # the first row that there is

    def allocated(self, n: int) -> LaneRows:
        """Return the first `n` rows."""
        return replace(self, shape=(self.shape[0], n, *self.shape[2:]))

    def write_on_device(self, rows: Tensor, at: Tensor) -> None:
        """Write a row of each context, `rows [heads, B, …]`, at index `at [B]`; below 0: none. One launch."""
        rows = rows.flatten(2)
        gpu.elementwise.append(rows, rows, self, self, at, None, None)

    def take(self, first: Tensor | None, n: int) -> Tensor:
        """Return copies `[heads, B, n, …]` of rows `first[b]..first[b] + n - 1`, `first [B]`; None: from row 0 on."""
        return gpu.elementwise.take_lanes(self, first, n)

    def in_chunk(self) -> Tensor:
        """Return copies of all rows `[heads, B, rows, …]`."""
        return self.take(None, self.shape[1])
