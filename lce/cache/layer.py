"""One layer of a KV cache: its buffer of recent tokens, the tiers below, and the method's state.

If the storage format is lossy (int8), a pass that begins at token s sees the tokens before `layout.old(s)` rounded, and
later tokens unrounded. A token is rounded once, in the buffer, whatever the budget. Tiers pack rounded numbers exactly.
"""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lce.attention import ROW, Tiles, Turn, append, append_rows, widened
from lce.cache.layout import CacheLayout, segment_of
from lce.cache.limits import Limits
from lce.cache.method_state import Held, MethodState, RecentRows
from lce.cache.shared import SPARE, ForFork, RowBuffer, own_memory
from lce.cache.tier import UNBOUNDED
from lce.cache.tiers import TierStack
from lce.errors import CapacityError, UsageError
from lce.kernels.elementwise.elementwise import take_rows
from lce.profiling import timed
from lce.sizes import size_text
from lce.system import free_memory

S = TypeVar("S", bound=MethodState)
Unrounded = tuple[int, Tensor]  # the index of the first of n tokens, and their keys and values `[2, G, n, D]`


class KVBuffer:
    """A buffer of keys and values `k v [G, capacity, stored_dim]`, from token `first` on. It has whole chunks."""

    def __init__(self, layout: CacheLayout, capacity: int, first: int = 0, n_sure: int = 0) -> None:
        """Allocate a buffer, of which at least `n_sure` tokens will be written."""
        self.layout, self.expected = layout, False  # whether `kv.expect` was called
        self.first = first
        self._index: Tensor | None = None
        form = layout.format
        shape = (layout.n_kv_heads, layout.whole_chunks(capacity), form.stored_dim)
        try:
            huge = 2 * n_sure >= capacity
            tensors = [own_memory(shape, form.stored_dtype, layout.device, huge) for _ in range(2)]
        except RuntimeError as error:
            needed = shape[1] * layout.token_bytes // layout.n_layers
            raise CapacityError(
                f"no memory for {shape[1]:,} tokens in the cache: {size_text(needed)} a layer "
                "for keys and values; ask for fewer tokens, or give --kv-host-budget and --spill-dir"
            ) from error
        self.rows = [RowBuffer(x, axis=1) for x in tensors]

    @property
    def k(self) -> Tensor:
        """The keys, `[G, capacity, D]`."""
        return self.rows[0].tensor

    @property
    def v(self) -> Tensor:
        """The values, `[G, capacity, D]`."""
        return self.rows[1].tensor

    @property
    def capacity(self) -> int:
        """The largest number of tokens that fit in the buffer."""
        return self.rows[0].capacity

    @property
    def index(self) -> Tensor:
        """The number of the tile in `tiles`, for each KV head and each chunk of the buffer: `[G, chunks]`."""
        n_tiles = len(self.k) * self.capacity // self.layout.chunk_size
        if self._index is None or self._index.numel() != n_tiles:
            self._index = torch.arange(n_tiles, device=self.k.device).view(len(self.k), -1)
        return self._index

    @property
    def n_bytes(self) -> int:
        """The bytes that the buffer's keys and values take."""
        return sum(rows.n_bytes for rows in self.rows)

    def prepare(self, start: int, stop: int) -> None:
        """Prepare to write tokens `start..stop-1`, so that forks do not see the new values. Call before writing."""
        for rows in self.rows:
            rows.prepare(start - self.first, stop - self.first)

    def fork(self, stop: int, for_fork: ForFork) -> "KVBuffer":
        """Return a buffer for another context with the tokens before `stop`, shared if possible."""
        n = stop - self.first
        if not n or not self.rows[0].can_share(n):
            return self.replaced(self.first, n, stop)
        other = copy(self)
        other.rows = [rows.fork(n, for_fork) for rows in self.rows]
        return other

    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of tokens `start..stop-1`, views `[G, stop - start, D]`."""
        here = slice(start - self.first, stop - self.first)
        return self.k[:, here], self.v[:, here]

    def tiles(self, n_chunks: int) -> Tiles:
        """Return the buffer as tiles, one for each chunk and KV head. The text has `n_chunks` complete chunks."""
        size, index = self.layout.chunk_size, self.index
        shape = (index.numel(), size, self.k.shape[-1])
        if before := self.first // size:  # chunks before the buffer have no tile
            index = torch.nn.functional.pad(index[:, : n_chunks - before], (before, 0), value=-1)
        return Tiles(self.k.view(shape), self.v.view(shape), index)

    def replaced(self, first: int, capacity: int, stop: int) -> "KVBuffer":
        """Return a new buffer of `capacity` tokens, with copies of tokens `first..stop-1`."""
        other = KVBuffer(self.layout, capacity, first, stop - first)
        other.fill(first, *self.span(first, stop))
        return other

    @torch.inference_mode()  # the tensors may have been made in inference mode
    def fill(self, start: int, k: Tensor, v: Tensor) -> None:
        """Overwrite the tokens from `start` on with `k v [G, n, D]`."""
        stop = start + k.shape[1]
        self.prepare(start, stop)
        for x, new in zip(self.span(start, stop), (k, v), strict=True):
            x.copy_(new)


@dataclass(eq=False)
class LayerCache:
    """The keys and values of one layer, and the method's state.

    Methods ask for a span, for tokens or for chunks, and never learn which tier had the data. While all tokens are in
    the buffer, `stack` is None: there are no tiers. `state` maps the names of `Method.state` to the states. `length`
    counts committed tokens; `stop` adds tokens of this pass. A lossy format has rounded the first `rounded` tokens.
    """

    index: int
    layout: CacheLayout
    buffer: KVBuffer
    stack: TierStack | None
    state: Mapping[str, MethodState]
    length: int = 0
    rounded: int = 0

    def __post_init__(self) -> None:
        self.rounded = max(self.rounded, self.buffer.first)
        self.stop = self.length

    @property
    def tiers(self) -> TierStack:
        """The tiers, which have the tokens before the buffer. Only for use if there are tiers."""
        assert self.stack is not None, "everything is in the buffer"
        return self.stack

    @property
    def turned(self) -> bool:
        """Whether keys are cached unrotated, and turned to the method's `key_positions` when they are attended."""
        return self.layout.access.turned and self.index not in self.layout.sliding_layers

    @property
    def whole(self) -> tuple[Tensor, Tensor]:
        """The keys and values `[G, capacity, D]` of a buffer that holds all tokens: row i is token i."""
        assert self.stack is None, "some tokens are in the tiers"
        return self.buffer.k, self.buffer.v

    def recent(self, name: str) -> tuple[Tensor, Tensor, int]:
        """Return the recent keys in the state `name`, the values of the same tokens, and the index of the first one."""
        recent, values = self.kept(RecentRows, name), self.whole[1]
        values = values[:, recent.first : recent.first + recent.buffer.shape[1]]
        return recent.buffer[:, : values.shape[1]], values, recent.first

    def chunks_at(self, first: Tensor, size: int) -> list[Tensor]:
        """Return copies `[G, 1, size, D]` of keys and values of `size` tokens from `first [1]` on, on the device."""
        rows = first + torch.arange(size, device=first.device)
        return [x.index_select(1, rows)[:, None] for x in self.whole]

    def kept(self, kind: type[S], name: str) -> S:
        """Return the method's state `name`, which must be an instance of `kind`."""
        state = self.state[name]
        assert isinstance(state, kind), f"{name} is a {type(state).__name__}"
        return state

    @timed("cache")
    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return tokens `start..stop-1`: keys at the method's `key_positions`, and values, `[G, stop - start, D]` each.

        A view if the tokens are in the buffer, else a copy; if the device stores 8 bits, a copy in the model's dtype.
        """
        k, v = self.stored(start, stop)
        return self.readable(k), self.readable(v)

    def stored(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return what `span` returns, in the dtype that the device stores. `Attention.dense` takes this dtype, too."""
        first, size = self.buffer.first and self._bring(), self.layout.chunk_size
        if start >= first:
            return self.buffer.span(start, stop)
        begin, border = start // size, min(stop, first)
        old = self.tiers.chunks(self.index, begin, -(-border // size))
        k, v = (x[:, start - begin * size : border - begin * size] for x in old)
        if stop <= first:
            return k, v
        recent_k, recent_v = self.buffer.span(first, stop)
        return torch.cat((k, recent_k), dim=1), torch.cat((v, recent_v), dim=1)

    @property
    def resident_from(self) -> int:
        """The index of the first token whose rows are in the buffer, and are read without a copy."""
        return self.buffer.first

    def segments(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield start and stop of spans of tokens `start..stop-1` that are small enough to be copied.

        The cuts are multiples of `segment_of(layout)`, so that sums over spans have the same bits wherever tokens are.
        """
        segment = segment_of(self.layout)
        if start < self.buffer.first:  # asked for before it is read, so that the first span brings all
            self.tiers.n_read[self.index] += (min(stop, self.buffer.first) - start) * self.layout.n_groups
        while start < stop:
            border = min((start // segment + 1) * segment, stop)
            yield start, border
            start = border

    def readable(self, rows: Tensor) -> Tensor:
        """Return stored rows as vectors in the model's dtype."""
        return widened(rows, self.layout.head_dim, self.layout.dtype) if rows.dtype is ROW else rows

    @timed("cache")
    def tokens(self, index: Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return copies `k v [G, n, D]`, in the stored dtype, of ascending tokens `index [n]`, maybe to `into`."""
        first = self.buffer.first and self._bring()
        if not first:
            into = None if into is None else into.view(self.buffer.k.dtype)
            return take_rows((self.buffer.k, self.buffer.v), index, into)
        numbers = index.cpu().numpy()
        n_old = int(np.searchsorted(numbers, first))
        old = self.tiers.tokens(self.index, numbers[:n_old])
        recent = index[n_old:] - first
        k, v = (x.index_select(1, recent) for x in (self.buffer.k, self.buffer.v))
        return torch.cat((old[0], k), dim=1), torch.cat((old[1], v), dim=1)

    def values(self, index: Tensor) -> Tensor:
        """Copy the values `[G, n, D]` of tokens `index [G, n]`: each KV head has its own tokens, in any order."""
        v = self.buffer.v
        if self.buffer.first:
            tokens, index = index.unique(return_inverse=True)
            v = self.tokens(tokens)[1]
        return self.readable(v.gather(1, index[..., None].expand(-1, -1, v.shape[-1])))

    def tiles(self, chunk_ids: Tensor) -> Iterator[Tiles]:
        """Yield, in rounds, the complete chunks that query heads chose, `chunk_ids [H, T, K]`, as tiles for attention.

        Chunks in the tiers come first: see `TierStack.rounds`. Chunks in the buffer come last, without a copy. A round
        has later chunks of a KV head than the rounds before. All rounds together wait for the device once.
        """
        first, size = self.buffer.first and self._bring(), self.layout.chunk_size
        n_old, n_chunks = first // size, self.stop // size
        if not n_old:
            yield self.buffer.tiles(n_chunks)
        else:
            yield from self._rounds(chunk_ids, n_old, n_chunks)

    def _rounds(self, chunk_ids: Tensor, n_old: int, n_chunks: int) -> Iterator[Tiles]:
        device, n_kv_heads = self.buffer.k.device, self.layout.n_kv_heads
        heads = torch.arange(len(chunk_ids), device=device) // (len(chunk_ids) // n_kv_heads)
        column = torch.where(chunk_ids < 0, n_chunks, chunk_ids)  # -1 (no choice) is counted in an extra column
        asked = (heads[:, None, None] * (n_chunks + 1) + column).view(-1)
        wanted = torch.zeros(n_kv_heads * (n_chunks + 1), dtype=torch.bool, device=device).index_fill_(0, asked, True)
        wanted = wanted.view(n_kv_heads, -1)[:, :n_chunks].cpu()  # the only wait for the device
        pages = wanted[:, :n_old].unflatten(0, (-1, self.layout.page_heads)).any(dim=1)  # [groups, old chunks]
        for tiles in self.tiers.rounds(self.index, pages.numpy()):
            yield Tiles(tiles.k, tiles.v, torch.nn.functional.pad(tiles.index, (0, n_chunks - n_old), value=-1))
        if wanted[:, n_old:].any() or not pages.any():
            yield self.buffer.tiles(n_chunks)

    def _bring(self) -> int:
        """Move all tokens to the buffer, once as many were read from the tiers as these have. Return its first token.

        So a context from a file that is used for long becomes one in memory, for at most twice the cost of what it
        reads. Nothing moves if a budget limits the memory, or less than twice the bytes are free.
        """
        buffer, layout = self.buffer, self.layout
        few = self.tiers.n_read[self.index] < buffer.first * layout.n_groups
        if few or self.tiers.growing or Limits(layout).budget is not None:
            return buffer.first
        n_left = layout.first_layer + layout.n_layers - self.index
        free, self.tiers.n_read[self.index] = free_memory(layout.device), 0
        if free is not None and free < 2 * buffer.first * layout.token_bytes * n_left // layout.n_layers:
            return buffer.first
        whole = KVBuffer(layout, buffer.first + buffer.capacity)
        for start, stop in self.segments(0, buffer.first):
            whole.fill(start, *self.tiers.chunks(self.index, start // layout.chunk_size, stop // layout.chunk_size))
        whole.fill(buffer.first, *buffer.span(buffer.first, self.stop))
        self.buffer = whole
        return 0

    def write(self, k: Tensor, v: Tensor, turn: Turn | None = None, at: Tensor | None = None) -> None:
        """Write a block's keys and values `[G, T, D]` after the committed ones; `turn [T, D/2]`, if given, rotates k.

        With `at [1]`, a tensor on the device, one token is written at that index: the buffer must have space, and the
        caller ends with `KVCache.appended`. Time and bytes: O(T).
        """
        layout, shape = self.layout, k.shape
        if v.shape != shape or (shape[0], shape[2:]) != (layout.n_kv_heads, (layout.head_dim,)):
            expected = f"[{layout.n_kv_heads}, T, {layout.head_dim}]"  # fewer heads would be broadcast silently
            raise UsageError(f"keys {list(k.shape)} and values {list(v.shape)} for the cache; expected {expected} each")
        if at is not None:
            append(k, v, *self.whole, at, turn)
            return
        if layout.format.rounds:
            self.round_old()
        self.extend(self.length + shape[1])
        write = append_rows if self.buffer.k.dtype is ROW else append
        write(k, v, self.buffer.k, self.buffer.v, self.length - self.buffer.first, turn)

    def extend(self, stop: int) -> None:
        """Prepare to write the tokens from the committed ones up to `stop - 1`. May be repeated."""
        if stop - self.buffer.first > self.buffer.rows[0].capacity:
            self.reserve(stop)
        self.stop = stop
        self.buffer.prepare(self.length, stop)

    def commit(self) -> None:
        """Commit the tokens of this pass. May be repeated."""
        self.length = self.stop
        for state in self.state.values():
            state.commit(self.length)

    def discard(self) -> None:
        """Drop the tokens written since the last commit. May be repeated."""
        self.stop = self.length
        for state in self.state.values():
            state.discard()

    def reserve(self, n_tokens: int) -> None:
        """Make the buffer large enough for `n_tokens` in all. If old chunks go to tiers, they are moved there first."""
        wanted = n_tokens
        if n_tokens - self.buffer.first <= self.buffer.capacity:
            return
        if self.stack is None:
            wanted = max(n_tokens, min(self.buffer.capacity * 3 // 2, Limits(self.layout).resident_tokens))
        elif self.stack.growing:
            self.retire()
            if n_tokens - self.buffer.first <= self.buffer.capacity:
                return
        self.buffer = self.buffer.replaced(self.buffer.first, wanted - self.buffer.first, self.length)

    def retire(self) -> None:
        """Move to the tiers the chunks that local attention no longer sees. Recent tokens stay in the buffer."""
        size, first = self.layout.chunk_size, self.buffer.first
        most = self.rounded if self.layout.format.rounds else self.length
        border = max(first, min(self.layout.old(self.length), most))
        if border > first:
            self.tiers.add(self.index, first // size, *self.buffer.span(first, border))
        capacity = max(Limits(self.layout).recent_tokens, self.layout.whole_chunks(self.length - border))
        if border > first or capacity < self.buffer.capacity:
            self.buffer = self.buffer.replaced(border, capacity, self.length)

    def round_old(self) -> None:
        """Round complete chunks that local attention no longer sees. `write` first checks its arguments."""
        border = self.layout.old(self.length)
        if border > self.rounded:
            self.buffer.prepare(self.rounded, border)
            self.layout.format.round(*self.buffer.span(self.rounded, border))
            self.rounded = border

    def as_of(self, n_tokens: int, marks: Mapping[str, Held], unrounded: Unrounded | None = None) -> "LayerCache":
        """Return this layer's cache as it was at `n_tokens` tokens, with `marks` of the method's states: see `Mark`.

        The returned cache replaces this one. Tokens within the reach of local attention are copied from the tiers to
        the buffer. Pages of chunks that are no longer complete stay in the tiers, where nothing reads them, until
        `TierStack.add` replaces them. Without `unrounded`, tokens that were rounded since then stay rounded.
        """
        layout, buffer = self.layout, self.buffer
        border = layout.old(n_tokens)
        if border < buffer.first:
            buffer = KVBuffer(layout, max(Limits(layout).recent_tokens, n_tokens - border), border)
            buffer.fill(border, *self.stored(border, n_tokens))
        rounded = min(self.rounded, border)
        if unrounded is not None:
            rounded = min(rounded, unrounded[0])
            if buffer is self.buffer:
                self.rounded = max(rounded, buffer.first)  # after an interruption here, the tokens are rounded again
            first = max(unrounded[0], buffer.first)
            buffer.fill(first, *unrounded[1][:, :, first - unrounded[0] :])
        state = {name: state.as_of(marks[name]) for name, state in self.state.items()}
        return LayerCache(self.index, layout, buffer, self.stack, state, n_tokens, rounded)

    def shareable(self) -> list[tuple[RowBuffer, int, int]]:
        """Return arguments for `share`. A buffer beside growing tiers is left out, because it is soon replaced."""
        found, most = [], Limits(self.layout).resident_tokens
        if self.stack is not None and most < UNBOUNDED:
            most = self.buffer.capacity  # the device's pool takes the rest of the budget
        if self.stack is None or not self.stack.growing:
            n = self.length - self.buffer.first
            found = [(rows, n, min(self.layout.whole_chunks(2 * n + SPARE), most)) for rows in self.buffer.rows]
        return found + [each for state in self.state.values() for each in state.shareable(self.length)]

    def fork(self, stack: TierStack | None, for_fork: ForFork) -> "LayerCache":
        """Return a layer for another context, with the tiers `stack`. Committed tokens are shared if possible."""
        if stack is not None and stack.growing:
            buffer = self.buffer.replaced(self.buffer.first, self.buffer.capacity, self.length)
        else:
            buffer = self.buffer.fork(self.length, for_fork)
        state = {name: state.fork(self.length, for_fork) for name, state in self.state.items()}
        return LayerCache(self.index, self.layout, buffer, stack, state, self.length, self.rounded)
