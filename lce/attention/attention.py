"""The three functions that methods compose: `dense`, `routed`, and `merge` (in `lce.attention.merging`).

`dense`: all queries of a head see the same keys. `routed`: every query of every head has its own list of chunks.
`merge`: the parts become one softmax over all of their keys, by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lce.attention.backend import Backend, backends
from lce.attention.merging import Attended
from lce.attention.tiles import Runs, SlotQueries, Tiles
from lce.attention.turn import Turn
from lce.errors import UsageError, nearest, shown
from lce.profiling import count_dense, count_routed, timed


@dataclass(frozen=True)
class Attention:
    """`dense` and `routed` over one backend."""

    backend: Backend

    @classmethod
    def choose(cls, name: object = "auto") -> Attention:
        """Return a backend by name; `auto` or None is the fastest that this machine has. Raises `UsageError`."""
        if not isinstance(name, str | None):
            raise UsageError(f"attention is {shown(name)}; expected the name of a backend, or 'auto'")
        known = backends()
        if name in (None, "auto"):
            usable = [backend for backend in known.values() if backend.missing() is None and backend.suits_machine()]
            return cls(max(usable, key=lambda backend: backend.speed)())
        if name not in known:
            raise UsageError(f"unknown attention backend {shown(name)}; {nearest(name, ['auto', *known])}")
        if (missing := known[name].missing()) is not None:
            raise UsageError(f"attention backend {name!r} needs {missing}")
        return cls(known[name]())

    def decodes(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Return whether the backend has a `decode` kernel for such keys: plain operators copy all keys."""
        return self.backend.decodes(dtype, head_dim)

    @timed("attention", count_dense)
    def dense(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None, turn: Turn | None = None
    ) -> Attended:
        """Attend the same keys by all T queries of a head.

        `q [H, T, D]`, `k v [G, N, D]` to `out [H, T, D]`, `lse [H, T]`. Causal: the last query sees the last key, and
        with `window` no query sees a key `window` or more tokens before it. With a turn `[T, D/2]` queries are rotated
        first. Time: O(H · T · N · D). Keys are never repeated for the query heads that share them.
        """
        if q.shape[1] == 0 or k.shape[1] == 0:
            return torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
        return self.backend.dense(q, k, v, causal=causal, window=window, turn=turn)

    @timed("attention", count_routed)
    def routed(
        self, q: Tensor, turns: Turn, chunk_ids: Tensor, tiles: Iterable[Tiles], memory: Tensor | None = None
    ) -> Attended:
        """Attend a separate list of whole chunks for each query of each head.

        `q [H, T, D]`, unrotated; `chunk_ids [H, T, K]`, -1 for none, no chunk twice in a list. Query t is turned by
        `turns[t, s]`, `[T, K, D/2]`, for slot s of its list; `[T, 1, D/2]` if one turn serves all slots. `tiles` hold
        the chunks, in one or more rounds. Returns `out [H, T, D]`, `lse [H, T]`.

        Like a mixture-of-experts dispatch, with tiles as experts: all queries that chose a tile are gathered for one
        call, so a tile's keys are read once. Time: O(H · T · K · L · D) and a sort of H·T·K numbers. Bytes: H·T·K·D
        numbers of partial results; the rotated queries are never held at once. `memory`, if given, is flat and holds
        the partial results: new memory is slow.
        """
        n_heads, n_queries, n_slots = chunk_ids.shape
        queries: SlotQueries | None = None
        out = q.new_empty(chunk_ids.numel(), q.shape[-1]) if memory is None else memory.view(-1, q.shape[-1])
        if not self.backend.skips_unseen(out):
            out.zero_()
        lse = q.new_full((chunk_ids.numel(),), -torch.inf, dtype=torch.float32)
        for some in tiles:  # every choice is served in exactly one round
            queries = queries or SlotQueries(q, turns, n_slots, n_heads // len(some.index))
            self.backend.dispatch(queries, some.chosen(chunk_ids), some.k, some.v, (out, lse))
        return self.backend.merge_slots(out.view(n_heads, n_queries, n_slots, q.shape[-1]), lse.view(chunk_ids.shape))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> Attended:
        """Attend runs of tokens by the query of a decode step; only the device knows the runs' bounds.

        `q [H, 1, D]`, unrotated, `k v [G, N, D]`, all rows that the runs may name, to `out [H, 1, D]`, `lse [H, 1]`.
        Time: O(H · S · most · D).
        """
        return self.backend.decode(q, k, v, runs)
