"""The KV cache: one `KVCache` a context, one `LayerCache` a layer.

A pass writes its block behind what is committed and then commits once. A pass that is interrupted, by Ctrl-C say,
commits nothing: the next one writes over its leavings, and the cache is as it was.
"""

from __future__ import annotations

import torch

from lce.cache.chunks import ChunkTable
from lce.cache.layer import LayerCache
from lce.cache.pool import Traffic
from lce.cache.rows import RowFile
from lce.cache.tiering import CacheShape, Tiering
from lce.cache.tiers import Archive


class KVCache:
    """The keys and values of one context; buffers `[G, capacity, D]` a layer, and an archive if they outgrow `tiering`.

    While everything fits there is no archive and nothing is done for one.
    """

    def __init__(
        self, shape: CacheShape, capacity: int = 0, tiering: Tiering | None = None, file: RowFile | None = None
    ) -> None:
        self.shape = shape
        self.file = file  # where the archive puts what memory may not hold; by default a spill file
        self.tiering = tiering or Tiering()
        self.archive: Archive | None = None
        empty = (shape.n_kv_heads, 0, shape.head_dim)
        self.layers = [
            LayerCache(
                index,
                torch.empty(empty, dtype=shape.dtype, device=shape.device),
                torch.empty(empty, dtype=shape.dtype, device=shape.device),
                ChunkTable(shape.chunk_size, shape.device),
                shape.cut,
            )
            for index in range(shape.n_layers)
        ]
        self.reserve(capacity)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.layers[0].length

    def reserve(self, n_tokens: int) -> None:
        """Make room for `n_tokens` in all, so that appending up to there allocates nothing.

        Beyond the budget, old chunks go to the archive from now on. Raises `CapacityError` where they cannot.
        """
        fits = self.tiering.resident_tokens(self.shape)
        if self.archive is None and fits is not None and self.shape.in_chunks(n_tokens) > fits:
            self.archive = self.tiering.archive(self.shape, n_tokens, self.file)
        for layer in self.layers:
            if self.archive is None:
                layer.reserve(n_tokens, fits)
            elif layer.archive is None:
                self._outgrow(layer, self.archive)
        if self.archive is not None and self.layers[0].keep is None:
            self._grow_buffers(self.archive, n_tokens)

    def _grow_buffers(self, archive: Archive, n_tokens: int) -> None:
        """Let the buffers of an opened context keep all that comes: within a budget at the cost of the pools.

        Its file has all that they hold.
        """
        recent = self.shape.in_chunks(n_tokens) - self.layers[0].first
        if self.tiering.budget(self.shape) is not None and recent > self.layers[0].k_buffer.shape[1]:
            smaller = self.tiering.pools(self.shape, recent)
            for pool, old in zip(smaller, archive.pools, strict=True):
                pool.traffic = old.traffic
            archive.pools = smaller
        for layer in self.layers:
            layer.reserve(n_tokens, 0)

    def _outgrow(self, layer: LayerCache, archive: Archive) -> None:
        """Let a layer's buffers hold recent tokens alone, and the archive the others."""
        layer.archive, layer.keep = archive, self.tiering.local
        layer.retire(self.tiering.local)
        layer.resize(max(self.tiering.recent_tokens(self.shape), layer.length - layer.first))

    def prefetch(self, layer: int) -> None:
        """Begin to fetch what this layer is likely to ask for, if there is such a layer."""
        if self.archive is not None and layer < len(self.layers):
            self.archive.prefetch(layer)

    def commit(self) -> None:
        """Keep what the pass that just ended wrote, in every layer."""
        for layer in self.layers:
            layer.commit()

    def discard(self) -> None:
        """Forget an interrupted pass."""
        for layer in self.layers:
            layer.discard()

    def copy(self) -> KVCache:
        """A cache of its own with the same committed tokens. Bytes: one copy of what is in the buffers."""
        cache = KVCache(self.shape, tiering=self.tiering)
        if self.archive is not None:
            recent = self.layers[0].k_buffer.shape[1] if self.layers[0].keep is None else 0
            cache.archive = self.archive.fork(self.tiering.pools(self.shape, recent))
        cache.layers = [layer.copy(cache.archive) for layer in self.layers]
        return cache

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes held now: keys, values, metadata, summaries, method state and stores."""
        held = {"device": 0, "host": 0, "disk": 0}
        held["device"] += sum(
            tensor.numel() * tensor.element_size()
            for layer in self.layers
            for tensor in (layer.k_buffer, layer.v_buffer, *layer.state.values())
        )
        held["device"] += sum(layer.chunks.n_bytes for layer in self.layers)
        held["device"] += sum(store.n_bytes for layer in self.layers for store in layer.stores.values())
        if self.archive is not None:
            for tier, pool in zip(held, self.archive.pools, strict=False):
                held[tier] += pool.n_bytes
            held["disk"] = 0 if self.archive.file is None else self.archive.file.n_bytes
        return held

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What went through each tier of the archive; empty while there is none."""
        if self.archive is None:
            return {}
        found = dict(zip(("device", "host"), (pool.traffic for pool in self.archive.pools), strict=False))
        return found if self.archive.file is None else {**found, "disk": self.archive.disk}
