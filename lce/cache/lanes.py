"""The caches of several contexts as one, for a recorded step of all of them on a GPU.

Contexts keep their own memory. A table on the device has the addresses of their rows, and is written before a step
where one has changed. So a recording serves any contexts, and goes on when a buffer is replaced by a larger one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from lce import gpu
from lce.attention import Turn
from lce.cache.kv import KVCache
from lce.cache.layout import CacheLayout
from lce.cache.method_state import MethodState, OpenChunk, RecentRows
from lce.kernels.runtime.launching import ALIGNED, LaneRows


class StateRows(LaneRows):
    """Keys, values or a method's state of several contexts, with what recorded steps ask of a state."""

    def allocated(self, n: int) -> StateRows:
        """Return the first `n` rows."""
        return replace(self, shape=(self.shape[0], n, *self.shape[2:]))

    def write_on_device(self, rows: Tensor, at: Tensor) -> None:
        """Write a row of each context, `rows [heads, B, …]`, at index `at [B]`; below 0: none. One launch."""
        gpu.elementwise.append(rows.flatten(2), rows.flatten(2), self, self, at, None, None)

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
        gpu.elementwise.append(k, v, *self.whole, at, *(turn or (None, None)))


class LaneTable:
    """The addresses of the rows of up to `most` contexts. Bytes: 8 for each context and each head of each tensor."""

    def __init__(self, like: KVCache, most: int) -> None:
        """Make a table for contexts whose caches differ from `like` in nothing but their texts."""
        self._kinds = [
            (x.index, x.layout, x.turned, [name for name, state in x.state.items() if state.memory is not None])
            for x in like.layers
        ]
        self._forms = [*itertools.starmap(_form, rows_of(like))]
        ends = 1 + np.cumsum([0, *(form[0] * most for form in self._forms)])
        self._host = np.zeros(ends[-1], np.int64)  # first the number of contexts, then all addresses of each tensor
        self._parts = [x.reshape(most, -1) for x in np.split(self._host[1:], ends[1:-1] - 1)]
        self._seen: list[list[ReferenceType[Tensor]]] = [[] for _ in range(most)]  # each context's tensors
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

        The host does not wait. Time: about 0.2 µs for each tensor that is where it was.
        """
        changed, self._host[0] = self._host[0] != len(caches), len(caches)
        for b in range(n):
            rows = rows_of(caches[b if b < len(caches) else 0])
            seen = [ref(x) for x, _ in rows]  # a tensor's `ref` is always the same object
            if list(map(id, seen)) != list(map(id, self._seen[b])):
                assert [*itertools.starmap(_form, rows)] == self._forms, "another kind of cache"
                for part, (x, state) in zip(self._parts, rows, strict=True):
                    first = state.first if isinstance(state, RecentRows) else 0
                    part[b] = x.data_ptr() + (np.arange(len(x)) * x.stride(0) - first * x.stride(1)) * x.itemsize
                self._seen[b], changed = seen, True
        if changed:
            self._table.copy_(torch.from_numpy(self._host), non_blocking=True)


def rows_of(cache: KVCache) -> list[tuple[Tensor, MethodState | None]]:
    """Return the tensors `[heads, rows, …]` of a cache: keys and values, and those of states."""
    found = list[tuple[Tensor, MethodState | None]]()
    for layer in cache.layers:
        k, v = layer.buffer.rows
        found += (k.tensor, None), (v.tensor, None)
        if layer.state:
            found += [(memory, state) for state in layer.state.values() if (memory := state.memory) is not None]
    return found


def _form(x: Tensor, state: MethodState | None) -> tuple[int, int, tuple[int, ...], torch.dtype]:
    """Return the number of heads, of rows if `x [heads, rows, …]` is an open chunk, a row's shape, and the dtype."""
    row = tuple(x.shape[2:])
    fits = x.ndim > 2 and x.stride(1) == math.prod(row) and x[0, 0].is_contiguous()
    fits = fits and math.prod(row) * x.itemsize % ALIGNED == 0
    assert fits, (x.shape, x.stride(), x.dtype)
    return len(x), x.shape[1] if isinstance(state, OpenChunk) else 0, row, x.dtype
