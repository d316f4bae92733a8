"""What a method keeps of a layer's text besides keys and values: summaries, token rows, recent keys, tensors.

Rows are written by their index, a chunk's or a token's: an interrupted pass leaves rows behind the committed ones, and
the next pass overwrites them. What cannot be written that way (`OpenChunk`, `Staged`) takes part in commits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from typing import Self

import torch
from torch import Tensor


class MethodState(ABC):
    """One thing that a method keeps in each layer; methods name theirs in `Method.state`."""

    @abstractmethod
    def most_bytes(self, n_tokens: int, block: int) -> int:
        """The most bytes held once `n_tokens` were read in blocks of at most `block`, spare rows included."""

    @abstractmethod
    def copy(self, n_tokens: int) -> Self:
        """A state of its own with what this one has of the first `n_tokens`."""

    @abstractmethod
    def tensors(self, n_tokens: int) -> dict[str, Tensor]:
        """What `restore` needs to be the state of the first `n_tokens` again; empty where nothing is kept yet."""

    @abstractmethod
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Be the state that `tensors` were taken of."""

    @property
    @abstractmethod
    def n_bytes(self) -> int:
        """Bytes held now."""

    def commit(self) -> None:  # noqa: B027  # most states have nothing to do here
        """Keep what the pass that just ended wrote."""

    def discard(self) -> None:  # noqa: B027
        """Forget what an interrupted pass wrote."""


class GrowingRows(MethodState):
    """Rows from index 0 on along `axis` of one buffer. It grows by half, never a row at a time.

    A row stands for `tokens_per_row` tokens and takes `row_bytes`, as declared for plans made before anything is read.
    """

    axis = 0
    fewest = 64  # rows of the first buffer

    def __init__(self, row_bytes: int, tokens_per_row: int = 1) -> None:
        self.row_bytes = row_bytes
        self.tokens_per_row = tokens_per_row
        self._held: tuple[Tensor | None, int] = (None, 0)  # the buffer, and how many of its rows were written

    def write(self, rows: Tensor, start: int) -> None:
        """Put `rows` at index `start` and on. Time and bytes: O(rows), amortised."""
        buffer, _ = self._held
        stop = start + rows.shape[self.axis]
        if buffer is None or stop > buffer.shape[self.axis]:
            shape = list(rows.shape)
            shape[self.axis] = self._capacity(stop, 0 if buffer is None else buffer.shape[self.axis])
            grown = rows.new_empty(shape)
            if buffer is not None:
                grown.narrow(self.axis, 0, start).copy_(buffer.narrow(self.axis, 0, start))
            buffer = grown
        buffer.narrow(self.axis, start, stop - start).copy_(rows)
        self._held = (buffer, stop)

    def span(self, start: int, stop: int) -> Tensor:
        """Rows `start..stop-1`, a view."""
        buffer, n_rows = self._held
        assert buffer is not None, "nothing was written yet"
        assert stop <= n_rows, "rows that were not written"
        return buffer.narrow(self.axis, start, stop - start)

    def most_bytes(self, n_tokens: int, block: int) -> int:
        n_rows = n_tokens // self.tokens_per_row
        return self._capacity(n_rows, n_rows) * self.row_bytes if n_rows else 0

    def copy(self, n_tokens: int) -> Self:
        other = copy(self)
        other._held = (None, 0)
        other.restore({name: x.clone() for name, x in self.tensors(n_tokens).items()})
        return other

    def tensors(self, n_tokens: int) -> dict[str, Tensor]:
        buffer, n_rows = self._held
        n_rows = min(n_rows, n_tokens // self.tokens_per_row)
        return {} if buffer is None else {"rows": buffer.narrow(self.axis, 0, n_rows)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        rows = tensors.get("rows")
        self._held = (rows, 0 if rows is None else rows.shape[self.axis])

    @property
    def n_bytes(self) -> int:
        return _bytes_of(self._held[0])

    def _capacity(self, n_rows: int, before: int) -> int:
        return max(n_rows, before * 3 // 2, self.fewest)


class TokenRows(GrowingRows):
    """A row of numbers `[R]` a token: low-dim keys, for example."""


class Summaries(GrowingRows):
    """A summary a complete chunk, `[S, M, …]`: `row_bytes` for all S together, `tokens_per_row` the chunk size."""

    axis = 1
    fewest = 16


class RecentRows(MethodState):
    """The last `keep` rows `[heads, n, D]` and those of the block at work: keys at their positions, for example.

    Near keys are then seen at their true distance without being rotated again for every query, whatever the cache's
    own keys are. Time: O(1) a token, amortised. Bytes: at most `2 · keep` rows, and a block's.
    """

    def __init__(self, keep: int, row_bytes: int) -> None:
        self.keep = keep
        self.row_bytes = row_bytes
        self._held: tuple[Tensor | None, int] = (None, 0)  # the buffer, and which token its first row is

    def write(self, rows: Tensor, start: int) -> None:
        """Put the rows `[heads, T, D]` of tokens `start..start+T-1` behind those of the tokens before them."""
        buffer, first = self._held
        stop = start + rows.shape[1]
        if buffer is None or stop - first > buffer.shape[1]:
            kept = 0 if buffer is None else min(start - first, self.keep)
            grown = rows.new_empty(rows.shape[0], kept + max(rows.shape[1], self.keep), rows.shape[2])
            if buffer is not None:
                grown[:, :kept] = buffer[:, start - first - kept : start - first]
            buffer, first = grown, start - kept
        buffer[:, start - first : stop - first] = rows
        self._held = (buffer, first)

    def span(self, start: int, stop: int) -> Tensor:
        """The rows of tokens `start..stop-1`, a view; `start` is at most `keep` before the block at work."""
        buffer, first = self._held
        assert buffer is not None, "nothing was written yet"
        assert first <= start, "rows that are no longer kept"
        return buffer[:, start - first : stop - first]

    def most_bytes(self, n_tokens: int, block: int) -> int:
        if n_tokens <= self.keep:
            return self.keep * self.row_bytes
        return (self.keep + max(self.keep, min(block, n_tokens - self.keep))) * self.row_bytes

    def copy(self, n_tokens: int) -> RecentRows:
        other = RecentRows(self.keep, self.row_bytes)
        buffer, first = self._held
        if buffer is not None:
            kept = min(n_tokens - first, self.keep)
            other._held = (buffer[:, n_tokens - first - kept : n_tokens - first].clone(), n_tokens - kept)
        return other

    def tensors(self, n_tokens: int) -> dict[str, Tensor]:
        buffer, first = self.copy(n_tokens)._held
        return {} if buffer is None else {"rows": buffer, "first": torch.tensor(first)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._held = (tensors["rows"], int(tensors["first"])) if tensors else (None, 0)

    @property
    def n_bytes(self) -> int:
        return _bytes_of(self._held[0])


class OpenChunk(MethodState):
    """Rows `[heads, L, D]` of the tokens in the chunk that is not complete yet: pending queries, for example.

    A pass that enters another chunk writes to a buffer of its own, which takes over at the commit.
    """

    def __init__(self, size: int, row_bytes: int) -> None:
        self.size = size
        self.row_bytes = row_bytes
        self._open: tuple[int, Tensor | None] = (0, None)  # which chunk, and its rows
        self._entered: tuple[int, Tensor | None] = (0, None)

    def write(self, rows: Tensor, start: int) -> None:
        """Put the rows `[heads, T, D]` of tokens `start..start+T-1`, all of one chunk. Time and bytes: O(T)."""
        chunk_id, offset = divmod(start, self.size)
        held = self._open if chunk_id == self._open[0] else self._entered
        if held[1] is None or held[0] != chunk_id:
            held = (chunk_id, rows.new_zeros(rows.shape[0], self.size, rows.shape[2]))
        assert held[1] is not None
        held[1][:, offset : offset + rows.shape[1]] = rows
        if chunk_id == self._open[0]:
            self._open = held
        else:
            self._entered = held

    def span(self, start: int, stop: int) -> Tensor:
        """The rows of tokens `start..stop-1` of the open chunk, a view."""
        chunk_id, rows = self._open
        assert rows is not None, "nothing was written yet"
        assert chunk_id == start // self.size, "rows of a chunk that is not open"
        return rows[:, start - chunk_id * self.size : stop - chunk_id * self.size]

    def commit(self) -> None:
        if self._entered[1] is not None:
            self._open, self._entered = self._entered, (0, None)

    def discard(self) -> None:
        self._entered = (0, None)

    def most_bytes(self, n_tokens: int, block: int) -> int:
        return self.size * self.row_bytes * (2 if n_tokens > self.size else 1)

    def copy(self, n_tokens: int) -> OpenChunk:
        other = OpenChunk(self.size, self.row_bytes)
        chunk_id, rows = self._open
        other._open = (chunk_id, None if rows is None else rows.clone())
        return other

    def tensors(self, n_tokens: int) -> dict[str, Tensor]:
        chunk_id, rows = self._open
        return {} if rows is None else {"rows": rows, "chunk": torch.tensor(chunk_id)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._open = (int(tensors["chunk"]), tensors["rows"]) if tensors else (0, None)

    @property
    def n_bytes(self) -> int:
        return _bytes_of(self._open[1]) + _bytes_of(self._entered[1])


class Staged(MethodState):
    """One tensor, replaced as a whole from the next commit on; `bound(n_tokens, block)` is the most bytes it takes."""

    def __init__(self, bound: Callable[[int, int], int]) -> None:
        self.bound = bound
        self.value: Tensor | None = None  # the committed one: never written in place
        self._next: Tensor | None = None

    def stage(self, value: Tensor) -> None:
        """Make `value` the committed tensor once this pass commits."""
        self._next = value

    @property
    def latest(self) -> Tensor | None:
        """What this pass staged, else what is committed."""
        return self.value if self._next is None else self._next

    def commit(self) -> None:
        self.value, self._next = self.latest, None

    def discard(self) -> None:
        self._next = None

    def most_bytes(self, n_tokens: int, block: int) -> int:
        return self.bound(n_tokens, block)

    def copy(self, n_tokens: int) -> Staged:
        other = Staged(self.bound)
        other.value = self.value  # shared: nobody writes to it
        return other

    def tensors(self, n_tokens: int) -> dict[str, Tensor]:
        return {} if self.value is None else {"value": self.value}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.value = tensors.get("value")

    @property
    def n_bytes(self) -> int:
        return _bytes_of(self.value)


def _bytes_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
