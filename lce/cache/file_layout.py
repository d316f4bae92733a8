"""Where the parts of a context file are, in bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lce.cache.layout import CacheLayout
from lce.cache.row_file import CHECK_BYTES


class FileLayout:
    """The byte offsets in a context file of `n_tokens` tokens: header, rows, checksums of rows, small tensors.

    The first `row_tokens` tokens have rows: all tokens or, if the format is lossy, only the tokens of old chunks. Later
    tokens are then in small tensors. A head group has `group_rows` rows, extra rows of pages included, and the file has
    `n_rows`. Rows begin at byte `rows_start`, checksums at `checks_start`, small tensors at `small_start`. The space
    for the header is ample.
    """

    def __init__(self, cache: CacheLayout, n_tokens: int) -> None:
        self.cache = cache
        self.n_tokens = n_tokens
        self.row_tokens = cache.old(n_tokens) if cache.format.rounds else n_tokens
        self.group_rows: int = file_rows(cache, self.row_tokens)
        self.n_rows = cache.n_layers * cache.n_groups * self.group_rows
        self.rows_start = (16 + 8 * cache.n_layers) * 4096
        self.checks_start = self.rows_start + self.n_rows * cache.format.row_bytes
        self.small_start = self.checks_start + self.n_rows * CHECK_BYTES


def file_rows(layout: CacheLayout, n_tokens: int | NDArray[np.int64]) -> Any:
    """Return how many rows of a file the first `n_tokens` tokens (a number or an array) of a head group take."""
    return n_tokens + n_tokens // layout.chunk_size * layout.format.extra_rows
