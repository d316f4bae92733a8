"""The KV cache: one `KVCache` a context, one `LayerCache` a layer.

A pass writes its block behind what is committed and then commits once. An interrupted pass commits nothing; the next
pass overwrites what it wrote. Ctrl-C may come between any two bytecodes, so every change here is one assignment, or can
be made again: `KVCache.settle` does what an interrupted pass left undone.

With keys and values in 8 bits, a pass that begins at token s sees the tokens before `layout.old(s)` rounded, and all
others as they are. They are rounded once, in the buffer, whatever the budget; tiers keep rounded numbers as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import Enum
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lce.attention import Tiles, Turn, append
from lce.cache.layout import DEVICE, DISK, HOST, CacheLayout
from lce.cache.method_state import Held, MethodState
from lce.cache.packing import round_chunks
from lce.cache.row_file import RowFile
from lce.cache.tiers import Disk, Tier, TierStack, Traffic
from lce.errors import CapacityError, UsageError
from lce.kernels.gathering import take_rows
from lce.sizes import size_text

S = TypeVar("S", bound=MethodState)
Unrounded = tuple[int, Tensor]  # the first of some tokens, and their keys and values `[2, G, n, D]`
UNROUNDED = "unrounded"  # tokens of a layer in a file whose rows are packed: "unrounded/0"


@dataclass(frozen=True)
class Whole:
    """Residency: everything is in the buffer."""


@dataclass(frozen=True)
class Tiered:
    """Residency: recent tokens are in the buffer, complete chunks before them in the tiers."""

    tiers: TierStack


@dataclass(frozen=True)
class Opened:
    """Residency: complete chunks of a file are in the tiers, recent tokens and all later ones in the buffer."""

    tiers: TierStack


Residency = Whole | Tiered | Opened


class KVBuffer:
    """Keys and values `k v [G, capacity, D]` of the tokens from `first` on; whole chunks, and contiguous.

    Never changes its size: `replaced` makes another one.
    """

    def __init__(self, layout: CacheLayout, capacity: int, first: int = 0) -> None:
        self.layout = layout
        self.first = first
        shape = (layout.n_kv_heads, layout.whole_chunks(capacity), layout.head_dim)
        try:
            self.k, self.v = (torch.empty(shape, dtype=layout.dtype, device=layout.device) for _ in range(2))
        except RuntimeError as error:
            raise CapacityError(
                f"no memory for {shape[1]:,} tokens in the cache: {size_text(2 * shape[1] * layout.key_bytes)} a layer "
                "for keys and values; ask for fewer tokens, or give --kv-host-budget and --spill-dir"
            ) from error
        self.capacity = shape[1]  # tokens
        n_chunks = shape[1] // layout.chunk_size
        self.index = torch.arange(shape[0] * n_chunks, device=layout.device).view(shape[0], n_chunks)

    @property
    def n_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens `start..stop-1`, views `[G, stop - start, D]`."""
        here = slice(start - self.first, stop - self.first)
        return self.k[:, here], self.v[:, here]

    def tiles(self, n_chunks: int) -> Tiles:
        """The buffer as tiles. The text has `n_chunks` complete chunks; those before the buffer have no tile here."""
        size, before = self.layout.chunk_size, self.first // self.layout.chunk_size
        index = self.index
        if before:
            index = torch.nn.functional.pad(index[:, : n_chunks - before], (before, 0), value=-1)
        shape = (self.index.numel(), size, self.layout.head_dim)
        return Tiles(self.k.view(shape), self.v.view(shape), index)

    def replaced(self, first: int, capacity: int, stop: int) -> KVBuffer:
        """Another buffer of `capacity` tokens, with tokens `first..stop-1` of this one. Bytes: one copy of them."""
        other = KVBuffer(self.layout, capacity, first)
        for mine, its in zip(self.span(first, stop), other.span(first, stop), strict=True):
            its.copy_(mine)
        return other


class LayerCache:
    """The keys and values of one layer, and what the method keeps beside them.

    Methods ask for a span, for tokens or for chunks, and never learn where these were. `state` holds what the method
    keeps, by the names that its `state` gives.
    """

    def __init__(
        self, index: int, layout: CacheLayout, buffer: KVBuffer, residency: Residency,
        state: Mapping[str, MethodState], length: int = 0, rounded: int = 0,
    ) -> None:  # fmt: skip
        self.index = index
        self.layout = layout
        self.buffer = buffer
        self.residency = residency
        self.state = dict(state)
        self.length = length  # committed tokens
        self.rounded = max(rounded, buffer.first)  # tokens that are rounded, with keys and values in 8 bits
        self.stop = length  # tokens written, those of the pass under way included

    @property
    def tiers(self) -> TierStack:
        """Where the tokens before the buffer are."""
        assert not isinstance(self.residency, Whole), "everything is in the buffer"
        return self.residency.tiers

    @property
    def number(self) -> int:
        """Which layer of its device it is: tiers count from the device's first."""
        return self.index - self.layout.first_layer

    @property
    def whole(self) -> tuple[Tensor, Tensor]:
        """All rows of the buffer, `[G, capacity, D]` each, where it holds everything: row i is token i."""
        assert isinstance(self.residency, Whole), "some tokens are in the tiers"
        return self.buffer.k, self.buffer.v

    def kept(self, kind: type[S], name: str) -> S:
        """What the method keeps under a name."""
        state = self.state[name]
        assert isinstance(state, kind), f"{name} is a {type(state).__name__}"
        return state

    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens `start..stop-1`, `[G, stop - start, D]` each, placed as the method declared.

        Views where the buffer has them; else copies, so ask for what fits in memory: see `segments`.
        """
        first, size = self.buffer.first, self.layout.chunk_size
        if start >= first:
            return self.buffer.span(start, stop)
        begin, border = start // size, min(stop, first)
        old = self.tiers.chunks(self.number, begin, -(-border // size))
        k, v = (x[:, start - begin * size : border - begin * size] for x in old)
        if stop <= first:
            return k, v
        recent_k, recent_v = self.buffer.span(first, stop)
        return torch.cat((k, recent_k), dim=1), torch.cat((v, recent_v), dim=1)

    def segments(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Tokens `start..stop-1` in spans that are small enough to be copied.

        They are cut at multiples of `segment`, so that a sum over them is the same wherever the tokens are.
        """
        segment = self.layout.segment
        while start < stop:
            border = min((start // segment + 1) * segment, stop)
            yield start, border
            start = border

    def tokens(self, index: Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens `index [n]`, ascending: `[G, n, D]` each, copied; maybe to `into`, flat."""
        first = self.buffer.first
        if not first:
            return take_rows((self.buffer.k, self.buffer.v), index, into)
        numbers = index.cpu().numpy()
        n_old = int(np.searchsorted(numbers, first))
        old = self.tiers.tokens(self.number, numbers[:n_old])
        recent = index[n_old:] - first
        k, v = (
            torch.cat((a, b.index_select(1, recent)), dim=1)
            for a, b in zip(old, (self.buffer.k, self.buffer.v), strict=True)
        )
        return k, v

    def values(self, index: Tensor) -> Tensor:
        """Values of the tokens that each KV head names, `index [G, n]` in any order: `[G, n, D]`, copied.

        Waits for the device only where some of them may be in the tiers.
        """
        v = self.buffer.v
        if self.buffer.first:
            tokens, index = index.unique(return_inverse=True)
            v = self.tokens(tokens)[1]
        return v.gather(1, index[..., None].expand(-1, -1, v.shape[-1]))

    def tiles(self, chunk_ids: Tensor) -> Iterator[Tiles]:
        """The complete chunks that the query heads chose, `[H, T, K]`, as tiles for `Attention.routed`.

        In one round, without a copy, where they are in the buffer; else as many at a time as memory may hold, after one
        wait for the device.
        """
        size, n_kv_heads = self.layout.chunk_size, self.layout.n_kv_heads
        n_old, n_chunks = self.buffer.first // size, self.stop // size
        if not n_old:
            yield self.buffer.tiles(n_chunks)
            return
        device = self.buffer.k.device
        heads = torch.arange(len(chunk_ids), device=device) // (len(chunk_ids) // n_kv_heads)
        column = torch.where(chunk_ids < 0, n_chunks, chunk_ids)  # none chosen: a column behind the last chunk
        asked = (heads[:, None, None] * (n_chunks + 1) + column).view(-1)
        wanted = torch.zeros(n_kv_heads * (n_chunks + 1), dtype=torch.bool, device=device).index_fill_(0, asked, True)
        wanted = wanted.view(n_kv_heads, -1)[:, :n_chunks].cpu()  # the only wait for the device
        pages = wanted[:, :n_old].unflatten(0, (-1, self.layout.page_heads)).any(dim=1)  # [groups, old chunks]
        if wanted[:, n_old:].any() or not pages.any():
            yield self.buffer.tiles(n_chunks)
        for tiles in self.tiers.rounds(self.number, pages.numpy()):
            index = torch.nn.functional.pad(tiles.index, (0, n_chunks - n_old), value=-1)
            yield Tiles(tiles.k, tiles.v, index)

    def write(self, k: Tensor, v: Tensor, turn: Turn | None = None, at: Tensor | None = None) -> None:
        """Put a block's keys and values `[G, T, D]` behind the committed ones. Time and bytes: O(T).

        With a turn `[T, D/2]` the keys are rotated on the way. `at [1]` is the index of one token, read on the device:
        then the buffer has space for it, and whoever ends the pass says that it has the token (`appended`).
        """
        layout, shape = self.layout, k.shape
        if v.shape != shape or (shape[0], shape[2:]) != (layout.n_kv_heads, (layout.head_dim,)):
            expected = f"[{layout.n_kv_heads}, T, {layout.head_dim}]"  # fewer would be repeated silently
            raise UsageError(f"keys {list(k.shape)} and values {list(v.shape)} for the cache; expected {expected} each")
        if at is not None:
            append(k, v, *self.whole, at, turn)
            return
        stop = self.length + shape[1]
        self.round_old()
        self.reserve(stop)
        self.stop = stop
        buffer = self.buffer
        append(k, v, buffer.k, buffer.v, self.length - buffer.first, turn)

    def commit(self) -> None:
        """Keep what this pass wrote. May be repeated."""
        self.length = self.stop
        for state in self.state.values():
            state.commit(self.length)

    def discard(self) -> None:
        """Forget what was written since the last commit. May be repeated."""
        self.stop = self.length
        for state in self.state.values():
            state.discard()

    def reserve(self, n_tokens: int) -> None:
        """Make the buffer large enough for `n_tokens` in all.

        `Whole` buffers grow by half, within the budget; `Tiered` ones move old chunks to the tiers first.
        """
        layout, wanted = self.layout, n_tokens
        if n_tokens - self.buffer.first <= self.buffer.capacity:
            return
        if isinstance(self.residency, Tiered):
            self.retire()
            if n_tokens - self.buffer.first <= self.buffer.capacity:
                return
        elif isinstance(self.residency, Whole):
            wanted = max(n_tokens, min(self.buffer.capacity * 3 // 2, layout.resident_tokens))
        self.buffer = self.buffer.replaced(self.buffer.first, wanted - self.buffer.first, self.length)

    def move_to(self, residency: Tiered) -> None:
        """Leave recent tokens alone in the buffer, and the others to the tiers."""
        self.residency = residency
        self.retire()
        capacity = max(self.layout.recent_tokens, self.length - self.buffer.first)
        self.buffer = self.buffer.replaced(self.buffer.first, capacity, self.length)

    def retire(self) -> None:
        """Move complete chunks behind the reach of local attention to the tiers."""
        size, first = self.layout.chunk_size, self.buffer.first
        border = min(self.layout.old(self.length), self.rounded if self.layout.packed else self.length)
        if border > first:
            self.tiers.add(self.number, first // size, *self.buffer.span(first, border))
            capacity = max(self.layout.recent_tokens, self.length - border)  # less after a refused `move_to`
            self.buffer = self.buffer.replaced(border, capacity, self.length)

    def round_old(self) -> None:
        """Round to 8 bits what the next tokens do not see as local. Time: O(what is new of it).

        Only a pass does so, whatever the budget: a call that fails before goes back to tokens that are as they were.
        """
        border = self.layout.old(self.length)
        if self.layout.packed and border > self.rounded:
            round_chunks(*self.buffer.span(self.rounded, border), self.layout.chunk_size)
            self.rounded = border

    def unrounded(self) -> Unrounded | None:
        """A copy of the tokens that are not rounded yet, where any ever are. Bytes: local tokens, and a block."""
        if not self.layout.packed:
            return None
        return self.rounded, torch.stack(self.buffer.span(self.rounded, self.length))

    def at(self, n_tokens: int, marks: Mapping[str, Held], unrounded: Unrounded | None = None) -> LayerCache:
        """This cache when it had `n_tokens` tokens and `marks` were taken. It takes the place of this one.

        Tokens that local attention sees come back from the tiers to the buffer. Pages of chunks that are no longer
        complete stay in the tiers, unread: the buffer is in front of them, and `TierStack.add` replaces them.

        What was rounded since comes back from `unrounded`, taken with the marks; without that, it stays rounded.
        """
        layout, buffer = self.layout, self.buffer
        border = layout.old(n_tokens)
        if border < buffer.first:
            buffer = KVBuffer(layout, max(layout.recent_tokens, n_tokens - border), border)
            for x, kept in zip(buffer.span(border, n_tokens), self.span(border, n_tokens), strict=True):
                x.copy_(kept)
        rounded = min(self.rounded, border)
        if unrounded is not None:
            rounded = min(rounded, unrounded[0])
            if buffer is self.buffer:
                self.rounded = max(rounded, buffer.first)  # after an interruption this cache rounds them again
            first = max(unrounded[0], buffer.first)
            _overwrite(buffer.span(first, n_tokens), unrounded[1][:, :, first - unrounded[0] :])
        state = {name: state.at(marks[name]) for name, state in self.state.items()}
        return LayerCache(self.index, layout, buffer, self.residency, state, n_tokens, rounded)

    def copy(self, residency: Residency) -> LayerCache:
        """A cache of its own with the committed tokens; `residency` has the tiers of the other context."""
        capacity = self.length if isinstance(residency, Whole) else self.buffer.capacity
        buffer = self.buffer.replaced(self.buffer.first, capacity, self.length)
        state = {name: state.copy(self.length) for name, state in self.state.items()}
        return LayerCache(self.index, self.layout, buffer, residency, state, self.length, self.rounded)


@torch.inference_mode()  # the tensors may have been made in it
def _overwrite(held: tuple[Tensor, Tensor], kept: Tensor) -> None:
    for x, new in zip(held, kept, strict=True):
        x.copy_(new)


@dataclass(frozen=True)
class Mark:
    """A length of a cache, and what the method's states need to be those of that length again: see `KVCache.mark`.

    `unrounded` are the tokens of each layer that were not rounded to 8 bits; None where they are not known.
    """

    length: int
    states: Sequence[Mapping[str, Held]]  # by layer, then by name
    unrounded: Sequence[Unrounded | None]


class Pass(Enum):
    """What a cache is in the middle of."""

    NONE = 0
    WRITING = 1
    COMMITTING = 2


class KVCache:
    """The keys and values of one context. While all of them fit their budget there are no tiers, and nothing is done
    for any.

    A pass begins with `begin` and ends with `commit`. After an interruption, `settle` drops the block, or completes its
    commit: all layers have it, or none.

    Each device that has some of the layers has tiers of its own: `residencies`, all of one kind.
    """

    def __init__(
        self, layout: CacheLayout, layers: Sequence[LayerCache], residencies: Sequence[Residency],
        file: RowFile | None = None,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.layers = list(layers)
        self.residencies = list(residencies)
        self.file = file  # takes what memory may not hold; None: a spill file, where the layout has a folder for one
        self._pass = Pass.NONE

    @classmethod
    def empty(cls, layout: CacheLayout, capacity: int = 0, file: RowFile | None = None) -> KVCache:
        """A cache without tokens, with space for `capacity`."""
        layers = [
            LayerCache(part.first_layer + number, part, KVBuffer(part, 0), Whole(), part.make_state(part))
            for part in layout.by_device
            for number in range(part.n_layers)
        ]
        cache = cls(layout, layers, [Whole() for _ in layout.by_device], file)
        cache.reserve(capacity)
        return cache

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.layers[0].length

    @property
    def residency(self) -> Residency:
        """The residency of the first device's layers. All others are of its kind."""
        return self.residencies[0]

    @property
    def tiers(self) -> list[Tier]:
        """The tiers, fastest first, those of each device; empty while everything is in the buffers."""
        return [tier for stack in self.stacks for tier in stack]

    @property
    def stacks(self) -> list[TierStack]:
        """The tiers of each device; empty while everything is in the buffers."""
        return [residency.tiers for residency in self.residencies if not isinstance(residency, Whole)]

    @property
    def by_device(self) -> Iterator[tuple[CacheLayout, Residency, list[LayerCache]]]:
        """What each device has: its layout, its residency and its layers."""
        for part, residency in zip(self.layout.by_device, self.residencies, strict=True):
            yield part, residency, self.layers[part.first_layer : part.first_layer + part.n_layers]

    @property
    def in_file(self) -> int:
        """Tokens at the beginning that stay in the file from which the context was opened."""
        return self.layers[0].buffer.first if isinstance(self.residency, Opened) else 0

    def reserve(self, n_tokens: int) -> None:
        """Make space for `n_tokens` in all, so that appending up to there allocates nothing.

        Beyond the budget, old chunks go to the tiers from now on. Raises `CapacityError` where they cannot.
        """
        layout = self.layout
        if isinstance(self.residency, Whole) and layout.whole_chunks(n_tokens) > layout.resident_tokens:
            self.residencies = [Tiered(TierStack.empty(part, n_tokens, self.file)) for part in layout.by_device]
        for _, residency, layers in self.by_device:
            if isinstance(residency, Opened):
                recent = layout.whole_chunks(n_tokens) - layers[0].buffer.first
                if layout.budget is not None and recent > layers[0].buffer.capacity:
                    residency.tiers.shrink(recent)
            for layer in layers:
                if not isinstance(residency, Tiered):
                    layer.reserve(n_tokens)
                elif isinstance(layer.residency, Whole):
                    layer.move_to(residency)

    def prefetch(self, layer: int) -> None:
        """Begin to fetch what this layer is likely to ask for. Does nothing for a layer behind the last."""
        if not isinstance(self.residency, Whole) and layer < len(self.layers):
            self.layers[layer].tiers.prefetch(self.layers[layer].number)

    def begin(self) -> None:
        """Begin a pass, after what an interrupted one left undone."""
        self.settle()
        self._pass = Pass.WRITING

    def takes(self, n_tokens: int) -> bool:
        """Whether the last of `n_tokens` can be written where memory is already, at an index that the device knows."""
        layout = self.layout
        if not isinstance(self.residency, Whole) or layout.packed or n_tokens > self.layers[0].buffer.capacity:
            return False
        return all(state.takes(n_tokens - 1) for layer in self.layers for state in layer.state.values())

    def make_space(self, n_tokens: int) -> None:
        """Make `takes` true for the tokens behind the committed ones, up to `n_tokens`, as far as it can be."""
        self.reserve(n_tokens)
        for layer in self.layers:
            for state in layer.state.values():
                state.make_space(n_tokens - 1)

    @property
    def memory(self) -> Iterator[Tensor | None]:
        """Every tensor that a decode step reads and writes; they stay the same ones until memory grows."""
        for layer in self.layers:
            yield layer.buffer.k
            yield layer.buffer.v
            for state in layer.state.values():
                yield state.memory

    def appended(self, n_tokens: int) -> None:
        """Every layer has `n_tokens` tokens now: the pass wrote them at an index that the device knew."""
        for layer in self.layers:
            layer.stop = n_tokens

    def commit(self) -> None:
        """Keep what the pass that just ended wrote, in every layer."""
        self._pass = Pass.COMMITTING
        for layer in self.layers:
            layer.commit()
        self._pass = Pass.NONE

    def discard(self) -> None:
        """Forget what was written since the last commit, in every layer."""
        for layer in self.layers:
            layer.discard()
        self._pass = Pass.NONE

    def settle(self) -> None:
        """Complete a commit that was interrupted; forget a pass that was interrupted before it."""
        if self._pass is Pass.COMMITTING:
            self.commit()
        elif self._pass is Pass.WRITING:
            self.discard()

    def nearest(self, n_tokens: int) -> int:
        """The most tokens, at most `n_tokens`, that `truncate` can go back to.

        Keys, values, summaries and token rows go back to any token; pending queries to tokens of the open chunk and to
        any chunk's border; a tensor that every block replaces goes back to the beginning alone.
        """
        self.settle()
        found, before = n_tokens, n_tokens + 1
        while found != before:  # one state's answer may be too far for another one
            before = found
            for layer in self.layers:
                for state in layer.state.values():
                    found = state.nearest(found, layer.length)
        return found

    def mark(self, n_tokens: int | None = None) -> Mark:
        """What `go_back` needs: for the tokens so far, or for the first `n_tokens`, which `nearest` allows.

        Nothing is copied: what is committed is never written again. With keys and values in 8 bits, tokens that are
        not rounded yet are copied, if the mark is of all tokens; else what is rounded stays so.
        Valid until the cache goes back to before it.
        """
        self.settle()
        unrounded = [layer.unrounded() if n_tokens is None else None for layer in self.layers]
        n_tokens = self.length if n_tokens is None else n_tokens
        states = [{name: x.mark(n_tokens) for name, x in layer.state.items()} for layer in self.layers]
        return Mark(n_tokens, states, unrounded)

    def go_back(self, mark: Mark) -> None:
        """Be as when `mark` was taken, bit by bit; all at once. Bytes: a buffer of recent tokens, at need."""
        self.settle()
        held = zip(self.layers, mark.states, mark.unrounded, strict=True)
        self.layers = [layer.at(mark.length, marks, unrounded) for layer, marks, unrounded in held]

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens alone, as if no more had been read; but what was rounded stays so.

        Raises `UsageError` where what the method keeps cannot go back to there: `nearest` says where it can.
        """
        if not 0 <= n_tokens <= self.length:
            raise UsageError(f"cannot go back to {n_tokens:,} tokens; expected 0 to {self.length:,}")
        if (nearest := self.nearest(n_tokens)) < n_tokens:
            raise UsageError(
                f"cannot go back to {n_tokens:,} tokens: what the method keeps of them is gone; "
                f"go back to {nearest:,}, and prefill the rest again"
            )
        self.go_back(self.mark(n_tokens))

    def copy(self) -> KVCache:
        """A cache of its own with the same committed tokens. Bytes: one copy of what is in the buffers."""
        self.settle()
        copied: list[LayerCache] = []
        residencies: list[Residency] = []
        for _, residency, layers in self.by_device:
            other: Residency = Whole()
            if isinstance(residency, Tiered):
                other = Tiered(residency.tiers.fork())
            elif isinstance(residency, Opened):
                other = Opened(residency.tiers.fork(layers[0].buffer.capacity))
            copied += [layer.copy(other) for layer in layers]
            residencies.append(other)
        return KVCache(self.layout, copied, residencies)

    def tensors(self) -> dict[str, Tensor]:
        """What the method keeps in every layer, as it was committed, by name.

        With keys and values in 8 bits, also the tokens that are not in packed rows: `unrounded/LAYER`, `[2, G, n, D]`.
        """
        self.settle()
        kept = {
            f"layers/{layer.index}/{name}/{part}": x
            for layer in self.layers
            for name, state in layer.state.items()
            for part, x in state.tensors(layer.length).items()
        }
        if self.layout.packed:
            border = self.layout.old(self.length)
            for layer in self.layers:
                kept[f"{UNROUNDED}/{layer.index}"] = torch.stack(layer.span(border, layer.length))
        return kept

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes held now: keys and values, and what the method keeps. Of several devices, each by its name."""
        held = {part.device_tier: 0 for part in self.layout.by_device} | {HOST: 0, DISK: 0}
        for layer in self.layers:
            own = layer.buffer.n_bytes + sum(state.n_bytes for state in layer.state.values())
            held[layer.layout.device_tier] += own
        files = set()  # the devices' tiers may share one
        for name, tier in self._named_tiers():
            if not (isinstance(tier, Disk) and tier.file in files):
                held[name] += tier.n_bytes
            if isinstance(tier, Disk):
                files.add(tier.file)
        return held

    @property
    def bytes_reserved(self) -> int:
        """Bytes of disk taken, those reserved for later rows included."""
        return sum(file.bytes_taken for file in {tier.file for tier in self.tiers if isinstance(tier, Disk)})

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What went through each tier; empty while there is none."""
        found: dict[str, Traffic] = {}
        for name, tier in self._named_tiers():
            found[name] = _together(found[name], tier.traffic) if name in found else tier.traffic
        return found

    def _named_tiers(self) -> Iterator[tuple[str, Tier]]:
        """The tiers as users read them."""
        for part, stack in zip(self.layout.by_device, self.stacks, strict=False):  # no stacks: all in the buffers
            for tier in stack:
                yield (part.device_tier if tier.name == DEVICE else tier.name), tier


def _together(one: Traffic, other: Traffic) -> Traffic:
    return Traffic(*map(operator.add, astuple(one), astuple(other)))
