"""The inputs of `Attention.routed` (tiles, and queries rotated per slot) and `Attention.decode` (runs of tokens)."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lce.attention.turn import Turn, rotate

AT_ONCE = 4 << 20  # the bytes of queries and keys gathered for one batched call: about a CPU cache


@dataclass(frozen=True)
class Tiles:
    """E tiles, `k v [E, L, D]`. A tile is the keys and values of one chunk of L tokens, of one KV head.

    `index [G, chunks]` is the number of each chunk's tile, or -1 for a chunk that is in another round of tiles. The
    tensors are views of a layer's buffer or of a pool's slots.

    Example: a buffer `[G, 4·L, D]` is 4·G tiles; chunk c of KV head g is tile `4g + c`.
    """

    k: Tensor
    v: Tensor
    index: Tensor

    @classmethod
    def of_chunks(cls, k: Tensor, v: Tensor) -> "Tiles":
        """Return the tiles of all chunks `k v [G, M, L, D]`, which are contiguous tensors."""
        n_heads, n_chunks = k.shape[:2]
        index = torch.arange(n_heads * n_chunks, device=k.device).view(n_heads, n_chunks)
        return cls(k.flatten(0, 1), v.flatten(0, 1), index)

    def chosen(self, chunk_ids: Tensor) -> Tensor:
        """Return the tile numbers `[H·T·K]` of chosen chunks `[H, T, K]`; -1 for chunks that are not in this round."""
        n_heads, rep = len(chunk_ids), len(chunk_ids) // len(self.index)
        kv_head = torch.arange(n_heads, device=chunk_ids.device) // rep
        return self.index[kv_head[:, None, None], chunk_ids.clamp(min=0)].masked_fill_(chunk_ids < 0, -1).view(-1)


@dataclass(frozen=True)
class Runs:
    """The n runs of neighbouring tokens that each of B contexts' queries attends in a decode step, on the device.

    Run r of head c and query b is the tokens `first[c, b, r] .. first[c, b, r] + count[c, b, r] - 1`, for the query
    rotated by `turns[b, turn[r]]`. `first count [C, B, n]` and `turn [n]` are int64, `turns` are rotations `[B, …,
    D/2]`. C is 1 (all heads attend the same runs), G or H. A run with count 0 is empty. No count exceeds `most`, which
    the host knows. Shapes do not depend on the text's length, so a step can be recorded once, as a CUDA graph, and
    replayed.

    Example: chunk 3 of 256 tokens, 17 tokens of chunk 5: `first [[[768, 1280]]]`, `count [[[256, 17]]]`, `most 256`.
    """

    first: Tensor
    count: Tensor
    turn: Tensor
    turns: Turn
    most: int


class SlotQueries:
    """Queries `q [H, T, D]` rotated for each of K slots: row `(h·T + t)·K + s` is `q[h, t]` rotated by `turns[t, s]`.

    `turns` are rotations `[T, K, D/2]`, or `[T, 1, D/2]` if one serves all slots. All rows are rotated at once if one
    rotation serves all slots, or if they fit in `AT_ONCE` bytes. Other rows are rotated when they are taken, as K
    copies of `q` take much memory. A tile has at most `most_rows` rows if `n_sharing` query heads share a KV head.
    """

    def __init__(self, q: Tensor, turns: Turn, n_slots: int, n_sharing: int | None = None) -> None:
        self.q, self.turns, self.n_slots = q, turns, n_slots
        self.most_rows = q.shape[1] * (n_sharing or q.shape[0])
        self.n_turned = turns.cos.shape[1]
        self._once = self.n_turned == 1 or q.numel() * n_slots * q.element_size() <= AT_ONCE  # rotate all rows at once

    @cached_property
    def _vectors(self) -> Tensor:
        dim = self.q.shape[-1]
        return rotate(self.q[:, :, None], self.turns).view(-1, dim) if self._once else self.q.reshape(-1, dim)

    def take(self, rows: Tensor) -> Tensor:
        """Return the rotated queries of row numbers `rows [n]`: `[n, D]`. Time and memory: O(n · D)."""
        if not self._once:
            flat = Turn(*(x.flatten(0, 1) for x in self.turns))
            turn_rows = rows % len(flat.cos)  # t·K + s
            turn = Turn(*(x.index_select(0, turn_rows) for x in flat))
            return rotate(self._vectors.index_select(0, rows // self.n_slots), turn)
        if self.n_turned == 1:
            rows = rows // self.n_slots
        return self._vectors.index_select(0, rows)
