"""The inputs of `routed` and `decode`: tiles of keys and values, queries turned for each slot, and runs of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lce.attention.turn import Turn, rotate

AT_ONCE = 4 << 20  # the bytes of queries and keys gathered for one batched call: about the size of the caches


@dataclass(frozen=True)
class Tiles:
    """Tiles `k v [E, L, D]`: each is one chunk's keys and values of one KV head, L tokens.

    `index [G, chunks]` is the number of each chunk's tile, or -1 for a chunk that is in another round. Tiles are views
    of a layer's buffer or of a pool's slots.

    Example: a buffer `[G, 4·L, D]` is 4·G tiles; chunk c of KV head g is tile `4g + c`.
    """

    k: Tensor
    v: Tensor
    index: Tensor

    @classmethod
    def of_chunks(cls, k: Tensor, v: Tensor) -> Tiles:
        """Return all chunks `k v [G, M, L, D]`, contiguous, as one round of tiles."""
        n_heads, n_chunks = k.shape[:2]
        index = torch.arange(n_heads * n_chunks, device=k.device).view(n_heads, n_chunks)
        return cls(k.flatten(0, 1), v.flatten(0, 1), index)

    def chosen(self, chunk_ids: Tensor) -> Tensor:
        """Return the tile of each choice `[H, T, K]`, flat `[H·T·K]`; -1 for chunks without a tile here."""
        n_heads, rep = len(chunk_ids), len(chunk_ids) // len(self.index)
        kv_head = torch.arange(n_heads, device=chunk_ids.device) // rep
        tile = self.index[kv_head[:, None, None], chunk_ids.clamp(min=0)]
        return tile.masked_fill_(chunk_ids < 0, -1).view(-1)


@dataclass(frozen=True)
class Runs:
    """S runs of neighbouring tokens for the query of a decode step, as numbers on the device, and each run's turn.

    Run s of head c is the tokens `first[c, s] .. first[c, s] + count[c, s] - 1`, seen by the query rotated by
    `turns[turn[s]]`, where `turn [S]` is int64 and `turns` is `[n, D/2]`. `first count [C, S]` are int64; C is 1 (all
    heads see the same runs), G or H. A run with count 0 is empty. No count exceeds `most`, which the host knows. Shapes
    do not depend on the text's length, so a step can be recorded once and replayed.

    Example: chunk 3 of 256 tokens, and 17 tokens of chunk 5: `first [[768, 1280]]`, `count [[256, 17]]`, `most 256`.
    """

    first: Tensor
    count: Tensor
    turn: Tensor
    turns: Turn
    most: int


class SlotQueries:
    """Queries `q [H, T, D]` rotated for each of K slots: row `(h·T + t)·K + s` is `q[h, t]` rotated by `turns[t, s]`.

    `turns` are `[T, K, D/2]`, or `[T, 1, D/2]` if one turn serves all slots. A row is rotated when it is taken, so that
    K rotated copies are never held. If all rows fit in `AT_ONCE` bytes, or one turn serves all slots, all rows are
    rotated together.

    `n_sharing` query heads share a KV head and its tiles (None: any number of heads may). No query chooses a chunk
    twice, so a tile has at most `most_rows` rows.
    """

    def __init__(self, q: Tensor, turns: Turn, n_slots: int, n_sharing: int | None = None) -> None:
        self.q, self.turns, self.n_slots = q, turns, n_slots
        self.most_rows = q.shape[1] * (n_sharing or q.shape[0])
        self.n_turned = turns.cos.shape[1]
        self._once = self.n_turned == 1 or q.numel() * n_slots * q.element_size() <= AT_ONCE  # rotate all rows

    @cached_property
    def _vectors(self) -> Tensor:
        dim = self.q.shape[-1]
        return rotate(self.q[:, :, None], self.turns).view(-1, dim) if self._once else self.q.reshape(-1, dim)

    def take(self, rows: Tensor) -> Tensor:
        """Return the rows of these numbers `[n]`, rotated: `[n, D]`. Time and bytes: O(n · D)."""
        if not self._once:
            flat = Turn(*(x.flatten(0, 1) for x in self.turns))
            turn_rows = rows % len(flat.cos)  # t·K + s
            turn = Turn(*(x.index_select(0, turn_rows) for x in flat))
            return rotate(self._vectors.index_select(0, rows // self.n_slots), turn)
        if self.n_turned == 1:
            rows = rows // self.n_slots
        return self._vectors.index_select(0, rows)
