"""The caches of several contexts as one, for a recorded step of all of them on a GPU.

Contexts keep their own memory. A table on the device has the addresses of their rows, and is written before a step
where one has changed. So a recording serves any contexts, and goes on when a buffer is replaced by a larger one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lce import gpu
from lce.attention import Turn, append
from lce.cache.kv import KVCache
from lce.cache.layout import CacheLayout
from lce.cache.method_state import OpenChunk, RecentRows
from lce.kernels.runtime.launching import ALIGNED, LaneRows


class StateRows(LaneRows):
    """Keys, values or a method's state of several contexts, with what recorded steps ask of a state."""

    def allocated(self, n: int) -> StateRows:
        """Return the first `n` rows."""
        return replace(self, shape=(self.shape[0], n, *self.shape[2:]))

    def write_on_device(self, rows: Tensor, at: Tensor) -> None:
        """Write a row of each context, `rows [heads, B, …]`, at index `at [B]`; below 0: none. One launch."""
        append(rows.flatten(2), rows.flatten(2), self, self, at)

    def take(self, first: Tensor | None, n: int) -> Tensor:
        """Return copies `[heads, B, n, …]` of rows `first[b]..first[b] + n - 1`, `first [B]`; None: from row 0 on."""
        return gpu.elementwise.take_lanes(self, first, n)

    def in_chunk(self) -> Tensor:
        """Return copies of all rows, `[heads, B, rows, …]`."""
        return self.take(None, self.shape[1])


@dataclass(frozen=True, eq=False)
class LaneLayer:
    """One layer of B contexts, with what recorded steps ask of a `LayerCache`. Token b of a pass is of context b."""

    index: int
    layout: CacheLayout
    turned: bool
    whole: tuple[StateRows, StateRows]
    state: Mapping[str, StateRows]

    def kept(self, kind: type, name: str) -> StateRows:
        """Return the rows of the method's state `name`."""
        return self.state[name]

    def recent(self, name: str) -> tuple[StateRows, StateRows, int]:
        """Return what `LayerCache.recent` returns: here row i is token i."""
        return self.state[name], self.whole[1], 0

    def chunks_at(self, first: Tensor, size: int) -> list[Tensor]:
        """Return copies `[G, B, size, D]` of the keys and the values of `size` tokens of each context, from `first`."""
        return [rows.take(first, size) for rows in self.whole]

    def write(self, k: Tensor, v: Tensor, turn: Turn | None, at: Tensor) -> None:
        """Write the key and the value of a token of each context, `[G, B, D]`, at index `at [B]`. One launch."""
        append(k, v, *self.whole, at, turn)


class LaneTable:
    """The addresses of the rows of up to `most` contexts. Bytes: 8 for each context and each head of each tensor."""

    def __init__(self, like: KVCache, most: int) -> None:
        """Make a table for contexts whose caches differ from `like` in nothing but their texts."""
        self._kinds = [
            (x.index, x.layout, x.turned, [name for name, state in x.state.items() if state.memory is not None])
            for x in like.layers
        ]
        self._forms = [_form(x, is_open) for x, _, is_open in rows_of(like)]
        ends = 1 + np.cumsum([0, *(form[0] * most for form in self._forms)])
        self._host = np.zeros(ends[-1], np.int64)  # first the number of contexts, then all addresses of each tensor
        self._parts = [x.reshape(most, -1) for x in np.split(self._host[1:], ends[1:-1] - 1)]
        self._seen: list[list[int]] = [[] for _ in range(most)]  # where each context's rows were
        self._table = torch.zeros(len(self._host), dtype=torch.int64, device=like.layout.device)
        self._tables = [x.view(most, -1) for x in self._table[1:].split(np.diff(ends).tolist())]

    def layers(self, n: int, bound: int) -> list[LaneLayer]:
        """Return the layers of the first `n` contexts, whose texts have at most `bound` tokens."""
        forms, found = zip(self._tables, self._forms, strict=True), list[LaneLayer]()
        rows = (
            StateRows(table[:n], self._table[:1], (heads, n_rows or bound, *row), dtype)
            for table, (heads, n_rows, row, dtype) in forms
        )
        for index, layout, turned, names in self._kinds:
            whole = next(rows), next(rows)
            found.append(LaneLayer(index, layout, turned, whole, {name: next(rows) for name in names}))
        return found

    def set(self, caches: Sequence[KVCache], n: int) -> None:
        """Write the addresses of `caches`; further ones of `n` contexts are those of the first, and are not written to.

        The host does not wait. Time: about half a microsecond for each tensor whose address has not changed.
        """
        changed, self._host[0] = self._host[0] != len(caches), len(caches)
        for b in range(n):
            rows = rows_of(caches[b if b < len(caches) else 0])
            seen = [number for x, first, _ in rows for number in (x.data_ptr(), x.stride(0), first)]
            if seen != self._seen[b]:
                assert [_form(x, is_open) for x, _, is_open in rows] == self._forms, "another kind of cache"
                for part, (x, first, _) in zip(self._parts, rows, strict=True):
                    offsets = np.arange(len(x)) * x.stride(0) - first * x.stride(1)
                    part[b] = x.data_ptr() + offsets * x.itemsize
                self._seen[b], changed = seen, True
        if changed:
            self._table.copy_(torch.from_numpy(self._host), non_blocking=True)


def rows_of(cache: KVCache) -> list[tuple[Tensor, int, bool]]:
    """Return each tensor `[heads, rows, …]` of a cache, the index of its first row, and whether it is an open chunk."""
    found = list[tuple[Tensor, int, bool]]()
    for layer in cache.layers:
        found += (layer.buffer.k, 0, False), (layer.buffer.v, 0, False)
        for state in layer.state.values():
            first, memory = state.first if isinstance(state, RecentRows) else 0, state.memory
            if memory is not None:
                found.append((memory, first, isinstance(state, OpenChunk)))
    return found


def _form(x: Tensor, is_open: bool) -> tuple[int, int, tuple[int, ...], torch.dtype]:
    """Return the number of heads, of rows if `x [heads, rows, …]` is an open chunk, a row's shape, and the dtype."""
    row = tuple(x.shape[2:])
    fits = x.ndim > 2 and x.stride(1) == math.prod(row) and x[0, 0].is_contiguous()
    assert fits, (x.shape, x.stride())
    assert x.stride(1) * x.itemsize % ALIGNED == 0, x.shape
    return len(x), x.shape[1] if is_open else 0, row, x.dtype
