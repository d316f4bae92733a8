"""Two files of rows as one: a saved context that is only read, and what was said since."""

from __future__ import annotations

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
        flat = rows.reshape(-1)
        above = flat >= self.base.n_rows
        if not above.any():
            return self.base.read(rows)
        found = torch.empty(len(flat), *self.row_shape, dtype=self.dtype)
        found[~above] = self.base.read(flat[~above])
        found[above] = self.top.read(flat[above] - self.base.n_rows)
        return found.view(*rows.shape, *self.row_shape)

    def read_pages(self, first: Numbers, size: int) -> Tensor:
        above = first >= self.base.n_rows
        if not above.any():
            return self.base.read_pages(first, size)
        found = torch.empty(len(first), size, *self.row_shape, dtype=self.dtype)
        found[~above] = self.base.read_pages(first[~above], size)
        found[above] = self.top.read_pages(first[above] - self.base.n_rows, size)
        return found

    def flush(self) -> None:
        self.top.flush()
