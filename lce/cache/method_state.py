"""What a method keeps in a layer besides keys and values: chunk summaries, token rows, recent keys, other tensors.

Writes never change committed numbers, so a mark, to which a state can go back, is only a reference or a number. Most
states have rows, written at the index of a token or a chunk; the next pass overwrites rows of an interrupted pass. In
`OpenChunk` and `Staged`, a pass makes a new tensor, which replaces the old tensor at the commit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from lce.attention import append
from lce.cache.shared import SPARE, ForFork, RowBuffer, own_memory
from lce.profiling import count_compared, timed

Held = tuple[Tensor | None, int]  # a tensor (None before the first write), and a number: which rows the tensor has
NOTHING: Held = (None, 0)
LEAST_POINTS, MOST_POINTS = 6, 32  # to which a state can go back that has no rows: see `Staged`


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: its dtype, its shape, the offset of its first byte, and its size in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    n_bytes: int


@dataclass(eq=False)
class MethodState(ABC):
    """One named part of what a method keeps in a layer: a tensor and a number, replaced in one assignment.

    `Method.state` names these parts. Subclasses' docstrings say what the number means.
    """

    floats: ClassVar[bool] = True  # whether the tensor's dtype must be floating-point
    forgets: ClassVar[bool] = True  # whether the state of a longer text may be unable to go back to this length
    in_place: ClassVar[bool] = False  # whether a pass that `has_space` only reads and writes the tensor's rows
    most_points: ClassVar[int] = 0  # the number of `points` that a file may have
    # Earlier tensors with their numbers, ascending, to be saved, and restored before the present one.
    points: tuple[Held, ...] = field(default=(), init=False)
    _held: Held = field(default=NOTHING, init=False)
    _next: Held = field(default=NOTHING, init=False)

    @abstractmethod
    def most_bytes(self, n_tokens: int, block: int) -> int:
        """Return the most bytes, spare rows included, after `n_tokens` tokens read in blocks of at most `block`."""

    @abstractmethod
    def agrees(self, tensor: FileTensor, number: int, n_tokens: int) -> bool:
        """Return whether a file's tensor and number are possible for this state after `n_tokens` tokens."""

    def committed(self, n_tokens: int) -> Held:
        """Return tensor and number of the state of the first `n_tokens` tokens. No later pass changes the tensor."""
        return self._held

    def restore(self, held: Held) -> None:
        """Restore the state from a tensor and a number that `committed` returned."""
        self._held = held

    def commit(self, n_tokens: int = 0) -> None:
        """Commit the pass that just ended; the text has `n_tokens` tokens now. May be repeated."""
        if self._next[0] is not None:
            self._held, self._next = self._next, NOTHING  # assigned left to right: an interruption may come between

    def discard(self) -> None:
        """Drop what an interrupted pass wrote. May be repeated."""
        self._next = NOTHING

    @property
    def memory(self) -> Tensor | None:
        """The state's tensor; None before the first write."""
        return self._held[0]

    @property
    def buffer(self) -> Tensor:
        """The state's tensor. Only for use after the first write."""
        assert self.memory is not None, "nothing was written yet"
        return self.memory

    @property
    def n_bytes(self) -> int:
        """The bytes that this state's tensors take now."""
        return sum(tensor.nbytes for tensor, _ in (self._held, self._next, *self.points) if tensor is not None)

    def has_space(self, start: int) -> bool:
        """Return whether a decode step of the token at index `start` needs no new memory for this state."""
        return True

    def make_space(self, start: int) -> None:  # noqa: B027
        """Allocate memory for a decode step of the token at index `start`, unless this state has no tensor yet."""

    def steady(self, start: int) -> Held:
        """Return tensor and number, or `NOTHING` if a pass of token `start` does more than write the tensor's rows."""
        return self._held if self.in_place and self.has_space(start) else NOTHING

    def nearest(self, n_tokens: int, length: int) -> int:
        """Return the largest length, at most `n_tokens`, to which this state of `length` tokens can go back."""
        return n_tokens if n_tokens == length else 0

    def mark(self, n_tokens: int) -> Held:
        """Return a mark of the state at `n_tokens` tokens, for `as_of`; `nearest` must allow this. Copies no rows."""
        return self._held if n_tokens else NOTHING

    def as_of(self, mark: Held) -> Self:
        """Return this state as it was at `mark`. The result replaces this object, because the two share rows."""
        other = copy(self)
        other._go_back(mark)
        other.discard()
        return other

    def _go_back(self, mark: Held) -> None:
        self._held = mark

    def shareable(self, n_tokens: int) -> list[tuple[RowBuffer, int, int]]:
        """Return arguments of `lce.cache.shared.share`: the buffers that a fork of the first `n_tokens` can share."""
        return []

    def fork(self, n_tokens: int, for_fork: ForFork) -> Self:
        """Return a copy of the state of the first `n_tokens` for another context; rows are copied or shared."""
        other = copy(self)
        other._held = self.committed(n_tokens)
        other.discard()
        return other


@dataclass(eq=False)
class GrowingRows(MethodState):
    """A state with rows along `axis` of one buffer. A full buffer grows by half. Forks share the buffer.

    A row stands for `tokens_per_row` tokens and takes at most `row_bytes` bytes. Memory plans use both numbers before a
    token is read. The state's number is how many rows were written.
    """

    forgets: ClassVar[bool] = False
    axis: ClassVar[int] = 0
    fewest: ClassVar[int] = 64  # a buffer is allocated with at least this many rows
    row_bytes: int
    tokens_per_row: int = 1
    _rows: RowBuffer | None = field(default=None, init=False)  # None before the first write
    _n_rows: int = field(default=0, init=False)  # the number of rows that were written

    def write(self, rows: Tensor, start: int) -> None:
        """Write `rows` at row indices from `start` on. Time and bytes: O(rows), amortised."""
        stop = start + rows.shape[self.axis]
        self._prepare(start, stop, rows)
        self.buffer.narrow(self.axis, start, stop - start).copy_(rows)

    def _prepare(self, start: int, stop: int, like: Tensor) -> None:
        """Make rows `start..stop-1`, of the shape and dtype of `like`, rows that may be written, and count them."""
        buffer = self._rows
        assert start <= self._n_rows, "rows before these were not written"
        if buffer is None or stop > buffer.capacity:
            shape = list(like.shape)
            shape[self.axis] = self._capacity(stop, 0 if buffer is None else buffer.capacity)
            grown = own_memory(shape, like.dtype, like.device)
            if buffer is not None:
                grown.narrow(self.axis, 0, start).copy_(buffer.tensor.narrow(self.axis, 0, start))
            buffer = RowBuffer(grown, self.axis)
        buffer.prepare(start, stop)
        self._rows, self._n_rows = buffer, stop

    @timed("cache", count_compared)
    def span(self, start: int, stop: int) -> Tensor:
        """Return rows `start..stop-1`, a view."""
        assert stop <= self._n_rows, "rows that were not written"
        return self.buffer.narrow(self.axis, start, stop - start)

    def allocated(self, n_rows: int) -> Tensor:
        """Return the first `n_rows` rows, or all if the buffer has fewer. Rows not written yet may hold anything."""
        return self.buffer.narrow(self.axis, 0, min(n_rows, self.buffer.shape[self.axis]))

    @property
    def memory(self) -> Tensor | None:
        return None if self._rows is None else self._rows.tensor

    @property
    def n_bytes(self) -> int:
        return 0 if self._rows is None else self._rows.n_bytes

    def _rows_of(self, n_tokens: int) -> int:
        return min(self._n_rows, n_tokens // self.tokens_per_row)

    def committed(self, n_tokens: int) -> Held:
        n_rows = self._rows_of(n_tokens)
        return self.buffer.narrow(self.axis, 0, n_rows) if n_rows else None, n_rows

    def restore(self, held: Held) -> None:
        tensor, self._n_rows = held
        self._rows = None if tensor is None else RowBuffer(tensor, self.axis)

    def agrees(self, tensor: FileTensor, number: int, n_tokens: int) -> bool:
        n_rows = tensor.shape[self.axis] if len(tensor.shape) > self.axis else -1
        return number == n_rows <= n_tokens // self.tokens_per_row and tensor.n_bytes <= n_rows * self.row_bytes

    def nearest(self, n_tokens: int, length: int) -> int:
        return n_tokens

    def mark(self, n_tokens: int) -> Held:
        return None, self._rows_of(n_tokens)

    def _go_back(self, mark: Held) -> None:
        self._n_rows = mark[1]  # rows written before the mark are still in the buffer
        self._rows = self._rows if self._n_rows else None  # the next ones may have another shape

    def shareable(self, n_tokens: int) -> list[tuple[RowBuffer, int, int]]:
        n_rows = self._rows_of(n_tokens)
        return [] if self._rows is None else [(self._rows, n_rows, 2 * n_rows + SPARE // self.tokens_per_row)]

    def fork(self, n_tokens: int, for_fork: ForFork) -> Self:
        other = copy(self)
        other._n_rows = self._rows_of(n_tokens)
        other._rows = self._rows.fork(other._n_rows, for_fork) if self._rows and other._n_rows else None
        return other

    def most_bytes(self, n_tokens: int, block: int) -> int:
        n_rows = n_tokens // self.tokens_per_row
        return self._capacity(n_rows, n_rows) * self.row_bytes if n_rows else 0

    def _capacity(self, n_rows: int, before: int) -> int:
        return max(n_rows, before * 3 // 2, self.fewest)

    def completes(self, start: int) -> bool:
        """Return whether the token at index `start` is the last one of a row."""
        return not (start + 1) % self.tokens_per_row

    def has_space(self, start: int) -> bool:
        row = start // self.tokens_per_row
        return self._rows is None or not self.completes(start) or row < min(self._n_rows + 1, self._rows.capacity)

    def make_space(self, start: int) -> None:
        if self._rows is not None and self.completes(start) and (row := start // self.tokens_per_row) >= self._n_rows:
            self._prepare(row, row + 1, self._rows.tensor)

    def write_on_device(self, row: Tensor, at: Tensor) -> None:
        """Write the row at index `at [1]`, a tensor on the device. There must be space."""
        self.buffer.index_copy_(self.axis, at, row.to(self.buffer.dtype))


class TokenRows(GrowingRows):
    """A state with a row of R numbers for each token, such as a key projected to R dimensions."""


class Summaries(GrowingRows):
    """A state with a summary of each of M complete chunks, `[S, M, …]` for S heads. One chunk has `[S, 1, …]`."""

    axis: ClassVar[int] = 1
    fewest: ClassVar[int] = 16

    def steady(self, start: int) -> Held:
        return NOTHING if self.completes(start) else (self.memory, self._n_rows)


@dataclass(eq=False)
class RecentRows(MethodState):
    """A state with the rows `[heads, n, D]` of the last `n_kept` tokens and of the current block.

    The state's number is the index of the first row's token. Example: recent keys, rotated to their positions, so that
    queries see near keys at their true distance. Time: O(1) per token, amortised. Bytes: `2 · n_kept` rows and a block.

    If `remade`, the method computes `missing` rows again after a truncation. Otherwise the state can only go back to a
    length before which it still has `n_kept` rows. So that it can go back by a fourth of the text, it keeps the rows of
    this fourth, too: an eighth of the bytes of keys and values, and up to a fourth of that for rows to come. With a
    `grid`, it only goes back to multiples of `grid`.
    """

    in_place: ClassVar[bool] = True
    n_kept: int
    row_bytes: int
    remade: bool = False
    grid: int = 1

    def _kept(self, n_tokens: int) -> int:
        """Return the number of rows that are kept after `n_tokens` tokens, if there are so many."""
        return self.n_kept + (0 if self.remade else n_tokens // 4)

    def write(self, rows: Tensor, start: int) -> None:
        """Append the rows `[heads, T, D]` of tokens `start..start+T-1`."""
        (buffer, first), stop = self._held, start + rows.shape[1]
        if buffer is None or stop - first > buffer.shape[1]:
            buffer, first = self._grown(rows, start, rows.shape[1])
        append(rows, rows, buffer, buffer, start - first)  # takes two tensors, which here are one
        self._held = (buffer, first)

    def _grown(self, like: Tensor, start: int, n_new: int) -> tuple[Tensor, int]:
        buffer, first = self._held
        kept = 0 if buffer is None else min(start - first, self._kept(start))
        grown = like.new_empty(like.shape[0], kept + max(n_new, self.n_kept, kept // 4), like.shape[2])
        if buffer is not None:
            grown[:, :kept] = buffer[:, start - first - kept : start - first]
        return grown, start - kept

    def has_space(self, start: int) -> bool:
        buffer, first = self._held
        return buffer is not None and start - first < buffer.shape[1]

    def make_space(self, start: int) -> None:
        if self._held[0] is not None and not self.has_space(start):
            self._held = self._grown(self._held[0], start, 1)

    def write_on_device(self, rows: Tensor, at: Tensor) -> None:
        """Write the row `[heads, 1, D]` of the token at index `at [1]`, a tensor on the device. There must be space."""
        self.buffer.index_copy_(1, at - self.first, rows.to(self.buffer.dtype))

    @property
    def first(self) -> int:
        """The index of the token to which the buffer's first row belongs."""
        return self._held[1]

    def span(self, start: int, stop: int) -> Tensor:
        """Return the rows of tokens `start..stop-1`, a view; at most `n_kept` of them are before the current block."""
        assert self.first <= start, "rows that are no longer kept"
        return self.buffer[:, start - self.first : stop - self.first]

    def missing(self, start: int) -> range:
        """Return the indices of tokens before `start` whose rows are missing since the text was truncated."""
        return range(max(0, start - self.n_kept) if self._held[0] is None else start, start)

    def committed(self, n_tokens: int) -> Held:
        buffer, first = self._held
        start = max(first, n_tokens - self._kept(n_tokens))
        return None if buffer is None else buffer[:, start - first : n_tokens - first].clone(), start

    def agrees(self, tensor: FileTensor, number: int, n_tokens: int) -> bool:
        possible = max(0, n_tokens - self._kept(n_tokens)) <= number <= max(0, n_tokens - self.n_kept)
        return possible and _has_rows(tensor, n_tokens - number, self.row_bytes)

    def nearest(self, n_tokens: int, length: int) -> int:
        if n_tokens < length:
            n_tokens -= n_tokens % self.grid
        return n_tokens if n_tokens == length or self.remade or self._has(n_tokens) else 0

    def mark(self, n_tokens: int) -> Held:
        return (None, n_tokens) if self.remade else super().mark(n_tokens)

    def _go_back(self, mark: Held) -> None:
        if not (self.remade and self._has(mark[1])):
            self._held = mark

    @property
    def forgets(self) -> bool:  # type: ignore[override]
        return not self.remade

    def _has(self, n_tokens: int) -> bool:
        return self._held[0] is not None and self._held[1] <= max(0, n_tokens - self.n_kept)

    def most_bytes(self, n_tokens: int, block: int) -> int:
        if n_tokens <= self.n_kept:
            return self.n_kept * self.row_bytes
        kept = min(n_tokens, self._kept(n_tokens))
        return (kept + max(self.n_kept, kept // 4, min(block, n_tokens - self.n_kept))) * self.row_bytes


def _has_rows(tensor: FileTensor, n_rows: int, row_bytes: int) -> bool:
    return len(tensor.shape) == 3 and tensor.shape[1] == n_rows and tensor.n_bytes == n_rows * row_bytes


@dataclass(eq=False)
class OpenChunk(MethodState):
    """A state with rows `[heads, L, D]` of the tokens in the open chunk. The state's number is the chunk's index.

    Example: queries that wait for their chunk to be complete. A pass that enters another chunk writes to a new buffer,
    which replaces the old one at the commit.
    """

    forgets: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    size: int
    row_bytes: int
    _marked: Tensor | None = field(default=None, init=False)  # a buffer that a mark refers to: it must not change

    def write(self, rows: Tensor, start: int) -> None:
        """Write the rows `[heads, T, D]` of tokens `start..start+T-1`, all of one chunk. Time and bytes: O(T)."""
        chunk_id, offset = divmod(start, self.size)
        in_open = chunk_id == self._held[1]
        buffer, number = self._held if in_open else self._next
        if buffer is None or number != chunk_id:
            buffer = rows.new_zeros(rows.shape[0], self.size, rows.shape[2])
        append(rows, rows, buffer, buffer, offset)  # as in `RecentRows`
        if in_open:
            self._held = (buffer, chunk_id)
        else:
            self._next = (buffer, chunk_id)

    def has_space(self, start: int) -> bool:
        return self._held[0] is not None and self._held[1] == start // self.size

    def make_space(self, start: int) -> None:
        """If token `start` begins a chunk, reuse the previous chunk's memory, unless a mark refers to that memory."""
        buffer, chunk_id = self._held
        if buffer is not None and not start % self.size and chunk_id == start // self.size - 1:
            self._held = (torch.empty_like(buffer) if buffer is self._marked else buffer, chunk_id + 1)

    def mark(self, n_tokens: int) -> Held:
        self._marked = self._held[0]
        return super().mark(n_tokens)

    def write_on_device(self, rows: Tensor, offset: Tensor) -> None:
        """Write the row `[heads, 1, D]` of the open chunk's token at `offset [1]`, a tensor on the device."""
        self.buffer.index_copy_(1, offset, rows.to(self.buffer.dtype))

    def in_chunk(self) -> Tensor:
        """Return all rows, as of one chunk of one context: `[heads, 1, L, D]`. Later rows may hold anything."""
        return self.buffer[:, None]

    def span(self, start: int, stop: int) -> Tensor:
        """Return the rows of tokens `start..stop-1` of the open chunk, committed or of this pass, a view."""
        chunk_id, first = start // self.size, start % self.size
        rows = next((rows for rows, number in (self._held, self._next) if number == chunk_id), None)
        assert rows is not None, "rows of a chunk that is not open"
        return rows[:, first : first + stop - start]

    def agrees(self, tensor: FileTensor, number: int, n_tokens: int) -> bool:
        current, rest = divmod(n_tokens, self.size)
        return (number == current if rest else number <= current) and _has_rows(tensor, self.size, self.row_bytes)

    def nearest(self, n_tokens: int, length: int) -> int:
        chunk_id = n_tokens // self.size
        return n_tokens if chunk_id == length // self.size else chunk_id * self.size

    def most_bytes(self, n_tokens: int, block: int) -> int:
        return self.size * self.row_bytes * (2 if n_tokens > self.size else 1)

    def committed(self, n_tokens: int) -> Held:
        rows, chunk_id = self._held
        if rows is not None:  # a discarded pass, or a truncated text, may have left rows after the committed ones
            rows = rows.clone()
            rows[:, max(0, min(n_tokens - chunk_id * self.size, self.size - 1)) :] = 0  # a chunk's last row is not read
        return rows, min(chunk_id, n_tokens // self.size)


@dataclass(eq=False)
class Staged(MethodState):
    """A state with one tensor, replaced as a whole at a commit. `bound(n_tokens, block)` is the most bytes it takes.

    The state's number is how many tokens the text had when the tensor was committed; 0 means unknown.

    With a `grid`, copies of earlier tensors are kept as `points` to which the state can go back, all at multiples of
    `grid`: as many as take `point_bytes` for each token of the text, at least `LEAST_POINTS`, at most `MOST_POINTS`.
    The last two always stay, for the next text differs at the end as a rule; earlier ones are closest towards the end
    and at the beginning. Generated tokens make a point only where they are a sixteenth of the text.
    """

    floats: ClassVar[bool] = False
    bound: Callable[[int, int], int]
    grid: int = 0
    point_bytes: int = 0

    @property
    def value(self) -> Tensor | None:
        """The committed tensor, which is never written in place."""
        return self._held[0]

    def has_space(self, start: int) -> bool:
        return self.value is not None  # a recorded step reads the tensor

    @property
    def latest(self) -> Tensor | None:
        """The tensor that this pass staged, or the committed one if this pass staged none."""
        return self.value if self._next[0] is None else self._next[0]

    def stage(self, value: Tensor) -> None:
        """Keep `value` as the tensor that the commit of this pass will put in place."""
        self._next = (value, 0)

    def commit(self, n_tokens: int = 0) -> None:
        before = self._held[1]
        self._next = (self._next[0], n_tokens)
        super().commit(n_tokens)
        self._add_point(before)

    def _add_point(self, before: int = 0) -> None:
        """Make a point of the present tensor if it is on the grid; give up a point if there are too many then."""
        (value, n_tokens), points = self._held, self.points
        if value is None or not self.grid or n_tokens % self.grid:
            return
        new = n_tokens - (points[-1][1] if points else 0)
        if new <= 0 or (n_tokens == before + 1 and new < n_tokens // 16):  # the last token was generated
            return
        points = (*points, (value.clone(), n_tokens))
        n_bytes = sum(x.nbytes for x, _ in points if x is not None)
        if len(points) > LEAST_POINTS and (n_bytes > n_tokens * self.point_bytes or len(points) > MOST_POINTS):
            at = [0, *(n for _, n in points)]
            gaps = [
                (at[i + 1] - at[i - 1]) / min(8 * (at[i - 1] + self.grid), n_tokens - at[i - 1])
                for i in range(1, len(points) - 1)
            ]
            drop = gaps.index(min(gaps))
            points = points[:drop] + points[drop + 1 :]
        self.points = points

    @property
    def most_points(self) -> int:  # type: ignore[override]
        return MOST_POINTS if self.grid else 0

    def restore(self, held: Held) -> None:
        self._held = held
        self._add_point()

    def agrees(self, tensor: FileTensor, number: int, n_tokens: int) -> bool:
        return number <= n_tokens and tensor.n_bytes <= self.bound(n_tokens, n_tokens)

    def nearest(self, n_tokens: int, length: int) -> int:
        value, since = self._held
        if value is None or n_tokens == length or 0 < since <= n_tokens:
            return n_tokens
        return max((n for _, n in self.points if n <= n_tokens), default=0)

    def mark(self, n_tokens: int) -> Held:
        return next((point for point in self.points if point[1] == n_tokens < self._held[1]), super().mark(n_tokens))

    def _go_back(self, mark: Held) -> None:
        self.points = tuple(point for point in self.points if point[1] <= mark[1])
        super()._go_back(mark)

    def most_bytes(self, n_tokens: int, block: int) -> int:
        most = self.bound(n_tokens, block)
        if not self.grid:
            return most
        n_points = min(MOST_POINTS, n_tokens // self.grid)
        return most + min(n_points * most, max(LEAST_POINTS * most, n_tokens * self.point_bytes))
