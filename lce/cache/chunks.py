"""The chunk table: what a layer's cache knows of each fixed-length run of its tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class ChunkTable:
    """Metadata of a layer's chunks, one row a chunk; M rows, `chunk_size` tokens each but perhaps the last.

    `first` and `length` `[M]` say which tokens a chunk holds; `last_use` the step that last read it; `times_selected`
    how many (head, query) pairs chose it. Where its keys and values are is the archive's to know, page by page.
    `summary` is the method's own: `[H, M, D]`, or whatever trailing shape its first `add_summaries` brought; it covers
    the `n_summaries` chunks that are complete. Rows are kept in buffers that grow by half, never a token at a time.

    Example: 40 tokens with `chunk_size=16` are three rows, `first` 0, 16, 32 and `length` 16, 16, 8.
    """

    def __init__(self, chunk_size: int, device: torch.device) -> None:
        self.chunk_size = chunk_size
        self.device = device
        self.n_chunks = 0
        self.n_summaries = 0
        self._n_committed = 0  # summaries
        self._first = torch.zeros(0, dtype=torch.int64)
        self._length = torch.zeros(0, dtype=torch.int64)
        self._last_use = torch.zeros(0, dtype=torch.int64, device=device)
        self._times_selected = torch.zeros(0, dtype=torch.int64, device=device)
        self._summary: Tensor | None = None

    @property
    def first(self) -> Tensor:
        return self._first[: self.n_chunks]

    @property
    def length(self) -> Tensor:
        return self._length[: self.n_chunks]

    @property
    def last_use(self) -> Tensor:
        return self._last_use[: self.n_chunks]

    @property
    def times_selected(self) -> Tensor:
        return self._times_selected[: self.n_chunks]

    @property
    def summary(self) -> Tensor | None:
        """`[H, n_summaries, …]`, a view; None before the first complete chunk."""
        return None if self._summary is None else self._summary[:, : self.n_summaries]

    def cover(self, n_tokens: int) -> None:
        """Make the rows cover tokens `0..n_tokens-1`. Time: O(rows changed)."""
        size, before = self.chunk_size, self.n_chunks
        self.n_chunks = -(-n_tokens // size)
        if self.n_chunks > len(self._first):
            self._grow(max(self.n_chunks, len(self._first) * 3 // 2))
        if self.n_chunks > before:  # a discarded pass may have left its marks here
            self._last_use[before : self.n_chunks] = 0
            self._times_selected[before : self.n_chunks] = 0
        changed = slice(max(0, min(before, self.n_chunks) - 1), self.n_chunks)
        starts = torch.arange(changed.start, changed.stop) * size
        self._first[changed] = starts
        self._length[changed] = (n_tokens - starts).clamp(max=size)

    def add_summaries(self, summaries: Tensor) -> None:
        """Append the summaries `[H, m, …]` of the next m complete chunks."""
        stop = self.n_summaries + summaries.shape[1]
        capacity = 0 if self._summary is None else self._summary.shape[1]
        if self._summary is None or stop > capacity:
            grown = summaries.new_empty(summaries.shape[0], max(stop, capacity * 3 // 2, 16), *summaries.shape[2:])
            if self._summary is not None:
                grown[:, : self.n_summaries] = self._summary[:, : self.n_summaries]
            self._summary = grown
        self._summary[:, self.n_summaries : stop] = summaries
        self.n_summaries = stop

    def commit(self) -> None:
        """Keep the summaries added since the last commit."""
        self._n_committed = self.n_summaries

    def discard(self, n_tokens: int) -> None:
        """Go back to the last commit, when the rows covered tokens `0..n_tokens-1`."""
        self.cover(n_tokens)
        self.n_summaries = self._n_committed

    def note_use(self, chunk_ids: Tensor, step: int) -> None:
        """Count choices: `chunk_ids` of any shape, -1 for none. No synchronisation with the device."""
        flat = chunk_ids.reshape(-1)
        chosen = flat >= 0
        rows = flat.clamp(min=0)
        self._times_selected.scatter_add_(0, rows, chosen.to(torch.int64))
        self._last_use.scatter_reduce_(0, rows, chosen.to(torch.int64) * step, reduce="amax")

    def copy(self) -> ChunkTable:
        """A table of its own with the same rows."""
        table = ChunkTable(self.chunk_size, self.device)
        table.n_chunks, table.n_summaries, table._n_committed = self.n_chunks, self.n_summaries, self._n_committed
        for name in _ROWS:
            setattr(table, name, getattr(self, name).clone())
        table._summary = None if self._summary is None else self._summary[:, : self.n_summaries].clone()
        return table

    def tensors(self) -> dict[str, Tensor]:
        """What `restore` needs beside the number of tokens."""
        known = {"last_use": self.last_use, "times_selected": self.times_selected}
        return known if self.summary is None else {**known, "summary": self.summary}

    def restore(self, n_tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Be the table that `tensors` were taken of, of `n_tokens` tokens."""
        self.cover(n_tokens)
        self.last_use[:], self.times_selected[:] = tensors["last_use"], tensors["times_selected"]
        if "summary" in tensors:
            self.add_summaries(tensors["summary"])
        self.commit()

    @property
    def n_bytes(self) -> int:
        """Bytes held for metadata and summaries."""
        buffers = [getattr(self, name) for name in _ROWS] + ([] if self._summary is None else [self._summary])
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def _grow(self, capacity: int) -> None:
        for name in _ROWS:
            old = getattr(self, name)
            new = old.new_zeros(capacity)
            new[: len(old)] = old
            setattr(self, name, new)


_ROWS = ("_first", "_length", "_last_use", "_times_selected")
