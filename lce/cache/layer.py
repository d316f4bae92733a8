"""One layer's keys and values, wherever they are, and what a method keeps beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from lce.cache.chunks import ChunkTable
from lce.cache.stores import Store
from lce.cache.tiering import Round
from lce.cache.tiers import Archive
from lce.errors import CapacityError


@dataclass
class LayerCache:
    """The keys and values of one layer, with its chunk table.

    Tokens from `first` on are in buffers `[G, capacity, D]`; complete chunks before them, where the buffers may not
    grow, are in `archive`. Methods ask for a span, for tokens, for chunks, and never learn which it was.

    `state` holds what a method keeps besides chunk summaries (pending queries, say) as committed tensors by name;
    `stage` replaces an entry from the next commit on. `stores` holds what a method keeps of each token, by name.
    """

    index: int
    k_buffer: Tensor
    v_buffer: Tensor
    chunks: ChunkTable
    segment: int
    first: int = 0  # the first token in the buffers, at a chunk's border
    length: int = 0  # committed tokens
    stop: int = 0  # tokens written, those of the pass under way included
    state: dict[str, Tensor] = field(default_factory=dict)
    stores: dict[str, Store] = field(default_factory=dict)
    archive: Archive | None = None
    keep: int | None = None  # committed tokens that stay in the buffers when there is an archive; None: all that come
    _staged: dict[str, Tensor] = field(default_factory=dict)

    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens `start..stop-1`, `[G, stop - start, D]` each, placed as the method declared.

        Views where the buffers have them; else copied, so ask for what fits in memory: see `cuts`.
        """
        if start >= self.first:
            here = slice(start - self.first, stop - self.first)
            return self.k_buffer[:, here], self.v_buffer[:, here]
        assert self.archive is not None
        size = self.chunks.chunk_size
        begin, border = start // size, min(stop, self.first)
        old = self.archive.chunks(self.index, begin, -(-border // size))
        k, v = (x.flatten(1, 2)[:, start - begin * size : border - begin * size] for x in old)
        if stop <= self.first:
            return k, v
        recent = slice(0, stop - self.first)
        return torch.cat((k, self.k_buffer[:, recent]), dim=1), torch.cat((v, self.v_buffer[:, recent]), dim=1)

    def cuts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Tokens `start..stop-1` in spans that are small enough to be copied.

        They are cut at fixed places of the text, so that a sum over them is the same wherever the tokens are.
        """
        while start < stop:
            border = min((start // self.segment + 1) * self.segment, stop)
            yield start, border
            start = border

    def tokens(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens `index` `[n]`, ascending: `[G, n, D]` each, copied."""
        if not self.first:
            return self.k_buffer.index_select(1, index), self.v_buffer.index_select(1, index)
        assert self.archive is not None
        numbers = index.cpu().numpy()
        n_old = int(np.searchsorted(numbers, self.first))
        old = self.archive.tokens(self.index, numbers[:n_old])
        recent = index[n_old:] - self.first
        k, v = (
            torch.cat((a, b.index_select(1, recent)), dim=1)
            for a, b in zip(old, (self.k_buffer, self.v_buffer), strict=True)
        )
        return k, v

    def rounds(self, chunk_ids: Tensor) -> Iterator[Round]:
        """The complete chunks that the query heads chose, `[H, T, K]`, for `Attention.routed`.

        All at once and in place where they are in the buffers; else as many at a time as memory may hold.
        """
        size = self.chunks.chunk_size
        n_old, n_chunks = self.first // size, self.stop // size
        recent = slice(0, n_chunks * size - self.first)
        k, v = (x[:, recent].unflatten(1, (-1, size)) for x in (self.k_buffer, self.v_buffer))
        if not n_old:
            yield None, k, v
            return
        assert self.archive is not None
        n_kv_heads = len(k)
        heads = torch.arange(len(chunk_ids), device=k.device) // (len(chunk_ids) // n_kv_heads)
        asked = (heads[:, None, None] * n_chunks + chunk_ids)[chunk_ids >= 0]
        wanted = torch.zeros(n_kv_heads * n_chunks, dtype=torch.bool, device=k.device).index_fill_(0, asked, True)
        wanted = wanted.view(n_kv_heads, n_chunks).cpu()
        per_page = self.archive.shape.heads
        pages = wanted[:, :n_old].unflatten(0, (-1, per_page)).any(dim=1)  # [groups, old chunks]
        if wanted[:, n_old:].any() or not pages.any():
            table = torch.full((n_kv_heads, n_chunks), -1, device=k.device)
            table[:, n_old:] = torch.arange(n_kv_heads * k.shape[1], device=k.device).view(n_kv_heads, -1)
            yield table, k, v
        for slots, old_k, old_v in self.archive.rounds(self.index, pages.numpy()):
            slot = torch.from_numpy(slots).to(k.device)
            within = torch.arange(per_page, device=k.device) * old_k.shape[1]
            found = torch.where(slot[:, None] < 0, -1, within[:, None] + slot[:, None]).flatten(0, 1)  # [G, old chunks]
            yield torch.nn.functional.pad(found, (0, n_chunks - n_old), value=-1), old_k, old_v

    def write(self, k: Tensor, v: Tensor) -> None:
        """Put a block's keys and values `[G, T, D]` behind the committed ones. Time and bytes: O(T)."""
        self.stop = self.length + k.shape[1]
        self.reserve(self.stop)
        here = slice(self.length - self.first, self.stop - self.first)
        self.k_buffer[:, here] = k
        self.v_buffer[:, here] = v
        self.chunks.cover(self.stop)

    def stage(self, name: str, value: Tensor) -> None:
        """Make `state[name]` be `value` once this pass commits."""
        self._staged[name] = value

    def commit(self) -> None:
        """Keep what this pass wrote."""
        self.length = self.stop
        self.chunks.commit()
        self.state.update(self._staged)
        self._staged.clear()

    def discard(self) -> None:
        """Forget what was written since the last commit."""
        self.stop = self.length
        self._staged.clear()
        self.chunks.discard(self.length)

    def reserve(self, n_tokens: int, most: int | None = None) -> None:
        """Make room for `n_tokens` in all: whole chunks, and half more than before, but no more than for `most`.

        With an archive, old chunks make room first.
        """
        size, capacity = self.chunks.chunk_size, self.k_buffer.shape[1]
        if self.keep is not None and n_tokens - self.first > capacity:
            self.retire(self.keep)
        needed = n_tokens - self.first
        if needed <= capacity:
            return
        generous = capacity * 3 // 2 if self.keep is None else needed
        wanted = max(needed, generous if most is None else min(generous, most))
        self.resize(-(-wanted // size) * size)

    def retire(self, keep: int) -> None:
        """Move complete chunks that are more than `keep` committed tokens back to the archive."""
        assert self.archive is not None
        size = self.chunks.chunk_size
        border = max(self.length - keep, 0) // size * size
        n, left = border - self.first, self.length - border
        if n <= 0:
            return
        k, v = (x[:, :n].unflatten(1, (-1, size)) for x in (self.k_buffer, self.v_buffer))
        self.archive.add(self.index, self.first // size, k, v)
        k, v = torch.empty_like(self.k_buffer), torch.empty_like(self.v_buffer)
        k[:, :left], v[:, :left] = self.k_buffer[:, n : n + left], self.v_buffer[:, n : n + left]
        self.k_buffer, self.v_buffer, self.first = k, v, border  # at once: an interruption finds the old or the new

    def resize(self, capacity: int) -> None:
        """Give the buffers room for this many tokens from `first` on; at least those that are committed."""
        kept = self.length - self.first
        self.k_buffer, self.v_buffer = (_grown(x, capacity, kept) for x in (self.k_buffer, self.v_buffer))

    def copy(self, archive: Archive | None = None) -> LayerCache:
        """A cache of its own with the committed tokens, over a fork of this one's archive."""
        size = self.chunks.chunk_size
        other = replace(
            self,
            chunks=self.chunks.copy(),
            stop=self.length,
            state={name: value.clone() for name, value in self.state.items()},
            stores={name: store.copy(self.length) for name, store in self.stores.items()},
            archive=archive,
            _staged={},
        )
        other.resize(-(-(self.length - self.first) // size) * size if archive is None else self.k_buffer.shape[1])
        return other


def _grown(buffer: Tensor, capacity: int, length: int) -> Tensor:
    """A buffer of `capacity` tokens that starts with the old one's first `length`."""
    wanted = buffer.shape[0] * capacity * buffer.shape[2] * buffer.element_size()
    try:
        new = buffer.new_empty(buffer.shape[0], capacity, buffer.shape[2])
    except RuntimeError as error:
        raise CapacityError(
            f"no room for {capacity} tokens in the cache: {wanted} bytes a layer for each of keys and values; "
            "ask for fewer tokens, or give --kv-host-budget and --spill-dir"
        ) from error
    new[:, :length] = buffer[:, :length]
    return new
