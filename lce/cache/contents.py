"""What a cache holds besides its rows of keys and values, as named tensors, and a cache of them again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lce.cache.kv import KVCache
from lce.cache.layer import LayerCache
from lce.cache.pool import grid
from lce.cache.rows import RowFile, SpillFile
from lce.cache.snapshot import ContextRows
from lce.cache.stacked import Stacked
from lce.cache.stores import Store
from lce.cache.tiering import CacheShape, Tiering
from lce.cache.tiers import Archive
from lce.errors import DataError


def tensors_of(cache: KVCache) -> dict[str, Tensor]:
    """Chunk tables, state and stores of every layer, as they were committed."""
    found = {}
    for layer in cache.layers:
        at = f"layers/{layer.index}"
        found.update({f"{at}/chunks/{name}": x for name, x in layer.chunks.tensors().items()})
        found.update({f"{at}/state/{name}": x for name, x in layer.state.items()})
        for name, store in layer.stores.items():
            parts = store.tensors(layer.length) or {"empty": torch.zeros(0)}
            found.update({f"{at}/stores/{name}/{type(store).__name__}/{part}": x for part, x in parts.items()})
    return found


def write_rows(cache: KVCache, rows: ContextRows, since: int = 0) -> None:
    """Write the keys and values of committed tokens, from `since` on, to a context file.

    Where the file is the archive's own, what left the buffers is there already or is written down once.
    """
    archive, pages = cache.archive, cache.tiering.pages(cache.shape)
    own = archive is not None and archive.file is rows
    if archive is not None and own:
        archive.write_down()
    for layer in cache.layers:
        for start, stop in layer.cuts(max(since, layer.first) if own else since, layer.length):
            k, v = (x.unflatten(0, (pages.n_groups, pages.heads)) for x in layer.span(start, stop))
            found = torch.stack((k, v), dim=1).permute(0, 3, 1, 2, 4)  # [groups, 2, P, n, D] -> [groups, n, 2, P, D]
            lanes = np.arange(layer.index * pages.n_groups, (layer.index + 1) * pages.n_groups)
            for first, part in zip(rows.first_rows(lanes, start).tolist(), found, strict=True):
                rows.write(first, part)


def restored(
    shape: CacheShape, tiering: Tiering, rows: ContextRows, n_tokens: int, small: Mapping[str, Tensor], *, own: bool
) -> KVCache:
    """The cache that `small` and `rows` were taken of, at `n_tokens`. Its keys and values stay in the file.

    What comes after goes to memory, and beyond the budget to `rows` where they are its `own`, else to a spill file;
    where there is none it stays in the buffers.
    """
    file: RowFile = rows
    if not own and tiering.spill_dir is not None:
        file = Stacked(rows, SpillFile(tiering.spill_dir, rows.row_shape, rows.dtype))
    pages = tiering.pages(shape)
    archive = Archive(pages, tiering.pools(shape), file, tiering.n_pinned(shape))
    border = max(n_tokens - tiering.local, 0) // shape.chunk_size * shape.chunk_size
    old = grid(np.arange(pages.n_layers * pages.n_groups), np.arange(border // shape.chunk_size))
    archive.row[old] = rows.first_rows(old[0], old[1] * shape.chunk_size)
    cache = KVCache(shape, tiering=tiering, file=file)
    cache.archive = archive
    parts, leaves = _by_layer(small), own or tiering.has_rest(shape)
    for layer in cache.layers:
        layer.archive = archive
        layer.keep = tiering.local if leaves and tiering.budget(shape) is not None else None
        layer.first = layer.length = layer.stop = border
        layer.resize(max(tiering.recent_tokens(shape), shape.in_chunks(n_tokens) - border))
        _load_recent(layer, rows, n_tokens)
        _load_small(layer, parts.get(str(layer.index), {}))
    return cache


def _load_recent(layer: LayerCache, rows: ContextRows, n_tokens: int) -> None:
    archive = layer.archive
    assert archive is not None
    lanes = archive.lanes(layer.index)
    found = rows.read_pages(rows.first_rows(lanes, layer.first), n_tokens - layer.first)  # [groups, n, 2, P, D]
    here = slice(0, n_tokens - layer.first)
    for kind, buffer in enumerate((layer.k_buffer, layer.v_buffer)):
        buffer[:, here] = found[:, :, kind].transpose(1, 2).flatten(0, 1).to(buffer.device)
    layer.length = layer.stop = n_tokens


def _load_small(layer: LayerCache, parts: Mapping[str, Tensor]) -> None:
    device = layer.k_buffer.device
    kinds = {kind.__name__: kind for kind in Store.__subclasses__()}
    chunks: dict[str, Tensor] = {}
    stores: dict[tuple[str, str], dict[str, Tensor]] = {}
    for path, x in parts.items():
        what, _, rest = path.partition("/")
        if what == "chunks":
            chunks[rest] = x.to(device)
        elif what == "state":
            layer.state[rest] = x.to(device)
        else:
            name, kind, part = rest.rsplit("/", 2)
            stores.setdefault((name, kind), {})[part] = x.to(device)
    layer.chunks.restore(layer.length, chunks)
    for (name, kind), tensors in stores.items():
        if kind not in kinds:
            raise DataError(f"the context keeps {name!r} in a {kind}, which is not known here; load its method first")
        layer.stores[name] = kinds[kind].restore(tensors)


def _by_layer(small: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, x in small.items():
        kind, _, rest = name.partition("/")
        if kind == "layers":
            index, _, path = rest.partition("/")
            found.setdefault(index, {})[path] = x
    return found
