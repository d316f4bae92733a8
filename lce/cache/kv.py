"""The KV cache: one `KVCache` a context, one `LayerCache` a layer.

A pass writes its block behind what is committed and then commits once. A pass that is interrupted, by Ctrl-C say,
commits nothing: the next one writes over its leavings, and the cache is as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lce.cache.chunks import ChunkTable
from lce.cache.stores import Store
from lce.errors import CapacityError


@dataclass(frozen=True)
class CacheShape:
    """What a cache holds for each token of each layer."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    chunk_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass
class LayerCache:
    """The keys and values of one layer, `[G, capacity, D]`, with its chunk table.

    `state` holds what a method keeps besides chunk summaries (pending queries, say) as committed tensors by name;
    `stage` replaces an entry from the next commit on. `stores` holds what a method keeps of each token, by name.
    """

    index: int
    k_buffer: Tensor
    v_buffer: Tensor
    chunks: ChunkTable
    length: int = 0  # committed tokens
    stop: int = 0  # tokens written, those of the pass under way included
    state: dict[str, Tensor] = field(default_factory=dict)
    stores: dict[str, Store] = field(default_factory=dict)
    _staged: dict[str, Tensor] = field(default_factory=dict)

    @property
    def k(self) -> Tensor:
        """Keys `[G, stop, D]`, a view, placed as the method declared."""
        return self.k_buffer[:, : self.stop]

    @property
    def v(self) -> Tensor:
        """Values `[G, stop, D]`, a view."""
        return self.v_buffer[:, : self.stop]

    def chunked(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of chunks `first..stop-1` as `[G, stop - first, L, D]` views.

        The last chunk may be partial: what lies behind `self.stop` is unspecified (finite) and must be masked.
        """
        size = self.chunks.chunk_size
        span = slice(first * size, stop * size)
        return self.k_buffer[:, span].unflatten(1, (-1, size)), self.v_buffer[:, span].unflatten(1, (-1, size))

    def write(self, k: Tensor, v: Tensor) -> None:
        """Put a block's keys and values `[G, T, D]` behind the committed ones. Time and bytes: O(T)."""
        self.stop = self.length + k.shape[1]
        self.reserve(self.stop)
        self.k_buffer[:, self.length : self.stop] = k
        self.v_buffer[:, self.length : self.stop] = v
        self._clear_tail()
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

    def reserve(self, n_tokens: int) -> None:
        """Make room for `n_tokens` in all: whole chunks, and at least half more than before when it must grow."""
        size = self.chunks.chunk_size
        capacity = self.k_buffer.shape[1]
        if n_tokens <= capacity:
            return
        wanted = -(-max(n_tokens, capacity * 3 // 2) // size) * size
        self.k_buffer = _grown(self.k_buffer, wanted, self.length)
        self.v_buffer = _grown(self.v_buffer, wanted, self.length)

    def _clear_tail(self) -> None:
        """Zero the rest of a chunk that this pass began, so that masked keys are finite."""
        size = self.chunks.chunk_size
        end = -(-self.stop // size) * size
        if end - size >= self.length:
            self.k_buffer[:, self.stop : end] = 0
            self.v_buffer[:, self.stop : end] = 0

    def copy(self) -> LayerCache:
        """A cache of its own with the committed tokens."""
        size = self.chunks.chunk_size
        wanted = -(-self.length // size) * size
        return LayerCache(
            self.index,
            _grown(self.k_buffer, wanted, self.length),
            _grown(self.v_buffer, wanted, self.length),
            self.chunks.copy(),
            self.length,
            self.length,
            {name: value.clone() for name, value in self.state.items()},
            {name: store.copy(self.length) for name, store in self.stores.items()},
        )


def _grown(buffer: Tensor, capacity: int, length: int) -> Tensor:
    """A buffer of `capacity` tokens that starts with the old one's, up to the end of the chunk of token `length`."""
    wanted = buffer.shape[0] * capacity * buffer.shape[2] * buffer.element_size()
    try:
        new = buffer.new_empty(buffer.shape[0], capacity, buffer.shape[2])
    except RuntimeError as error:
        raise CapacityError(
            f"no room for {capacity} tokens in the cache: {wanted} bytes a layer for each of keys and values; "
            "ask for fewer tokens"
        ) from error
    kept = min(capacity, buffer.shape[1]) if length else 0
    new[:, :kept] = buffer[:, :kept]
    return new


class KVCache:
    """The keys and values of one context, in memory; buffers `[G, capacity, D]` a layer."""

    def __init__(self, shape: CacheShape, capacity: int = 0) -> None:
        self.shape = shape
        empty = (shape.n_kv_heads, 0, shape.head_dim)
        self.layers = [
            LayerCache(
                index,
                torch.empty(empty, dtype=shape.dtype, device=shape.device),
                torch.empty(empty, dtype=shape.dtype, device=shape.device),
                ChunkTable(shape.chunk_size, shape.device),
            )
            for index in range(shape.n_layers)
        ]
        self.reserve(capacity)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.layers[0].length

    def reserve(self, n_tokens: int) -> None:
        """Make room for `n_tokens` in all, so that appending up to there allocates nothing."""
        for layer in self.layers:
            layer.reserve(n_tokens)

    def commit(self) -> None:
        """Keep what the pass that just ended wrote, in every layer."""
        for layer in self.layers:
            layer.commit()

    def discard(self) -> None:
        """Forget an interrupted pass."""
        for layer in self.layers:
            layer.discard()

    def copy(self) -> KVCache:
        """A cache of its own with the same committed tokens. Bytes: one copy of what is committed."""
        cache = KVCache(self.shape)
        cache.layers = [layer.copy() for layer in self.layers]
        return cache

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes held now: keys, values, metadata, summaries, method state and stores."""
        held = sum(
            tensor.numel() * tensor.element_size()
            for layer in self.layers
            for tensor in (layer.k_buffer, layer.v_buffer, *layer.state.values())
        )
        held += sum(layer.chunks.n_bytes for layer in self.layers)
        held += sum(store.n_bytes for layer in self.layers for store in layer.stores.values())
        return {"device": held, "host": 0, "disk": 0}
