"""Two files of rows as one: a saved context that is only read, and what was said since."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lce.cache.rows import Numbers, RowFile


class Stacked(RowFile):
    """The rows of `base`, which stay as they are, and behind them those of `top`, which come to be written."""

    def __init__(self, base: RowFile, top: RowFile) -> None:
        self.base = base
        self.top = top
        self.name = top.name
        self.row_shape = base.row_shape
        self.dtype = base.dtype

    @property
    def n_bytes(self) -> int:
        return self.base.n_bytes + self.top.n_bytes

    @property
    def bytes_taken(self) -> int:
        return self.base.bytes_taken + self.top.bytes_taken

    def place(self, lanes: Numbers, chunks: Numbers, size: int) -> Numbers:
        return self.base.n_rows + self.top.place(lanes, chunks, size)

    def write(self, first: int, rows: Tensor) -> None:
        self.top.write(first - self.base.n_rows, rows)

    def read(self, rows: Tensor) -> Tensor:
        found = self._of_both(rows.reshape(-1), lambda file, some: file.read(some))
        return found.view(*rows.shape, *self.row_shape)

    def read_pages(self, first: Numbers, size: int) -> Tensor:
        return self._of_both(torch.from_numpy(first), lambda file, some: file.read_pages(some.numpy(), size))

    def _of_both(self, index: Tensor, read: Callable[[RowFile, Tensor], Tensor]) -> Tensor:
        """What `read` finds from the rows `index [n]` on, `[n, …]`, wherever they are."""
        above = index >= self.base.n_rows
        if not above.any():
            return read(self.base, index)
        new = read(self.top, index[above] - self.base.n_rows)
        found = new.new_empty(len(index), *new.shape[1:])
        found[~above], found[above] = read(self.base, index[~above]), new
        return found

    def flush(self) -> None:
        self.top.flush()
