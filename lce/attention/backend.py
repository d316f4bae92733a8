"""The interface of backends: sets of attention kernels that return log-sum-exps. One file a backend, found by name.

A backend attends G independent problems of R query heads that share keys: `q [G, R, T, D]`, `k v [G, N, D]` to `out [G,
R, T, D]`, `lse [G, R, T]` (float32, natural logarithm). Causal means that the last query sees the last key. With
`window=w` a query also sees at most its w nearest keys, its own included.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from lce.attention.merging import Attended, merge_slots
from lce.attention.tiles import AT_ONCE, Runs, SlotQueries
from lce.attention.turn import Turn, rotate


class Backend(ABC):
    """One set of kernels."""

    name: ClassVar[str]
    speed: ClassVar[int] = 0  # `auto` takes the fastest backend that suits the machine

    @classmethod
    def missing(cls) -> str | None:
        """Return what must be installed to use this backend; None: nothing."""
        return None

    @classmethod
    def suits_machine(cls) -> bool:
        """Return whether `auto` may take this backend here."""
        return True

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Attended:
        """Attend as the module's docstring says. N ≥ 1, and N ≥ T if causal."""

    def dense(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None, turn: Turn | None = None
    ) -> Attended:
        """Attend `k v [G, N, D]` by `q [H, T, D]`, turned by `turn [T, D/2]`, if any: `out [H, T, D]`, `lse [H, T]`."""
        placed = q if turn is None else rotate(q, turn)
        out, lse = self.attend(placed.unflatten(0, (len(k), -1)), k, v, causal=causal, window=window)
        return out.flatten(0, 1), lse.flatten(0, 1)

    def decodes(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Return whether a kernel can `decode` such keys: plain operators copy all keys for every query head."""
        return type(self).decode is not Backend.decode

    def decode(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> Attended:
        """Attend runs of the tokens `k v [G, N, D]` by one unrotated query a head, `q [H, 1, D]`.

        Plain operators of fixed shapes. Time and bytes: O(H · S · most · D), the keys copied for every query head.
        """
        (n_heads, _, dim), n_kv_heads, n_runs = q.shape, len(k), runs.first.shape[-1]
        offset = torch.arange(runs.most, device=q.device)
        rows = (runs.first[..., None] + offset).clamp(min=0, max=k.shape[1] - 1)  # [C, S, most]
        seen = offset < runs.count[..., None]
        rows, seen = (x.repeat_interleave(n_heads // len(x), 0) for x in (rows, seen))
        heads = torch.arange(n_heads, device=q.device) // (n_heads // n_kv_heads)
        keys, values = (x[heads[:, None, None], rows].float() for x in (k, v))  # [H, S, most, D]
        turned = rotate(q, Turn(*(x.index_select(0, runs.turn) for x in runs.turns))).float()  # [H, S, D]
        scores = (keys @ turned[..., None]).squeeze(-1) / math.sqrt(dim)
        scores = scores.masked_fill(~seen, -math.inf).view(n_heads, n_runs * runs.most)
        lse = scores.logsumexp(-1, keepdim=True)
        weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)).exp()
        values = values.masked_fill(~seen[..., None], 0.0).view(n_heads, -1, dim)
        return (weights[:, None] @ values).to(q.dtype), lse

    def attend_tiles(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """Attend E tiles `k v [E, L, D]` by T queries each, `q [E, 1, T, D]`.

        The bits of a tile's result must not depend on the other tiles or the number of threads: memory budgets decide
        which tiles come together. PyTorch may take another routine for one problem, so no tile is alone on the CPU.
        """
        if len(q) > 1 or q.is_cuda:
            return self.attend(q, k, v, causal=False)
        out, lse = self.attend_tiles(*(x.expand(2, *x.shape[1:]) for x in (q, k, v)))
        return out[:1], lse[:1]

    def skips_unseen(self, out: Tensor) -> bool:
        """Return whether `merge_slots` never reads a partial result `out` whose lse is -inf."""
        return False

    def merge_slots(self, out: Tensor, lse: Tensor) -> Attended:
        """Merge the partial results of K slots, `out [H, T, K, D]`, `lse [H, T, K]`, into one softmax over all keys."""
        return merge_slots(out, lse)

    def dispatch(self, queries: SlotQueries, tile: Tensor, k: Tensor, v: Tensor, into: Attended) -> None:
        """Attend tile number `tile[a]` of `k v [E, L, D]` by row a of the queries; -1 for none.

        Writes results to the same rows of `into`, `out [A, D]`, `lse [A]`; rows without a tile stay unchanged.
        """
        # Stable, so that a tile's rows stand in the same order wherever its keys are.
        sorted_tiles, order = tile.masked_fill(tile < 0, len(k)).sort(stable=True)
        counts = torch.zeros(len(k) + 1, dtype=torch.int64, device=k.device)
        counts = counts.scatter_add_(0, sorted_tiles, torch.ones_like(sorted_tiles))[:-1]
        self.grouped(queries, counts, order, k, v, into)

    def grouped(
        self, queries: SlotQueries, counts: Tensor, order: Tensor, k: Tensor, v: Tensor, into: Attended
    ) -> None:
        """Attend tiles by unlike numbers of rows: `order [A]` are the rows by tile, `counts [E]` how many each has.

        Rows without a tile come last in `order`. Tiles are served in classes of similar load, padded by a quarter at
        most, so that some dozen batched calls serve them all and each tile is read once. Time: O(A · L · D). Bytes:
        queries and keys at work, some `AT_ONCE` bytes.
        """
        (out, lse), starts, load = into, counts.cumsum(0) - counts, _padded(counts)
        for size in load.unique().tolist():
            if not size:
                continue
            columns = torch.arange(size, device=k.device)
            at_once = max(1, AT_ONCE // ((2 * k.shape[1] + 2 * size) * k.shape[2] * k.element_size()))
            for some in (load == size).nonzero().squeeze(1).split(at_once):
                # Padding repeats a tile's last row: it writes the same result to the same row.
                rows = order[starts[some, None] + torch.minimum(columns, counts[some, None] - 1)].flatten()
                q = queries.take(rows).view(len(some), 1, size, -1)
                part = self.attend_tiles(q, k.index_select(0, some), v.index_select(0, some))
                out.index_copy_(0, rows, part[0].flatten(0, 2))
                lse.index_copy_(0, rows, part[1].flatten())


@cache
def backends() -> dict[str, type[Backend]]:
    """Return all backends by name, as the files of this folder define them."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"lce.attention.{module.name}")
    found, open_classes = {}, [Backend]
    while open_classes:
        for cls in open_classes.pop().__subclasses__():
            open_classes.append(cls)
            if cls.__module__.startswith("lce.attention."):
                found[cls.name] = cls
    return dict(sorted(found.items()))


def _padded(counts: Tensor) -> Tensor:
    """Round each count up to 1, 1.25, 1.5 or 1.75 times a power of two; counts up to 4 stay as they are."""
    step = 2 ** (torch.log2(counts.clamp(min=4).double()).floor().long() - 2)
    return -(-counts // step) * step
