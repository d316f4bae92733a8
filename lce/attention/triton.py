"""Our own kernels for GPUs, in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from lce.attention.compiled import Compiled
from lce.attention.merging import Attended
from lce.attention.runs import Runs
from lce.attention.tiles import SlotQueries
from lce.attention.turn import Turn
from lce.kernels.cuda import launching


class Triton(Compiled):
    """`lce.kernels.cuda` on CUDA; elsewhere, and for other dtypes and head sizes, the `compiled` backend."""

    name = "triton"
    speed = 4

    @classmethod
    def missing(cls) -> str | None:
        return launching.missing()

    @classmethod
    def suits_machine(cls) -> bool:
        return torch.cuda.is_available()

    def dense(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None, turn: Turn | None = None
    ) -> Attended:
        """Attend with a kernel that turns the queries as it reads them."""
        if not _fits(q, k, v):
            return super().dense(q, k, v, causal=causal, window=window, turn=turn)
        from lce.kernels.cuda import attention as kernels

        return kernels.attend(q, k, v, causal, window, *(turn or ()))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Attended:
        if not _fits(q, k, v):
            return super().attend(q, k, v, causal=causal, window=window)
        from lce.kernels.cuda import attention as kernels

        out, lse = kernels.attend(q.flatten(0, 1), k, v, causal, window)
        return out.view(q.shape), lse.view(q.shape[:-1])

    def decodes(self, dtype: torch.dtype, head_dim: int) -> bool:
        if not launching.installed():
            return False
        from lce.kernels.cuda.rows import takes

        return takes(torch.empty(1, head_dim, dtype=dtype, device="meta"))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> Attended:
        """Attend runs with a kernel that turns the query and reads the runs' bounds on the device."""
        if not _fits(q, k, v):
            return super().decode(q, k, v, runs)
        from lce.kernels.cuda import decoding as kernels

        out, lse = kernels.attend_runs(q[:, 0], k, v, runs.first, runs.count, runs.turn, *runs.turns, runs.most)
        return out[:, None], lse[:, None]

    def attend_tiles(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """Attend tiles as separate problems: no result depends on other tiles."""
        return self.attend(q, k, v, causal=False) if _fits(q, k, v) else super().attend_tiles(q, k, v)

    def dispatch(self, queries: SlotQueries, tile: Tensor, k: Tensor, v: Tensor, into: Attended) -> None:
        """Attend tiles; rows are sorted on the device, and turned as the kernel reads them."""
        if not _fits(queries.q, k, v):
            super().dispatch(queries, tile, k, v, into)
            return
        from lce.kernels.cuda import attention as kernels

        kernels.attend_tiles(queries.q, *queries.turns, tile, k, v, *into)

    def skips_unseen(self, out: Tensor) -> bool:
        return _fits(out) or super().skips_unseen(out)

    def merge_slots(self, out: Tensor, lse: Tensor) -> Attended:
        if not _fits(out):
            return super().merge_slots(out, lse)
        from lce.kernels.cuda import merging

        return merging.merge_slots(out, lse)


def _fits(q: Tensor, *others: Tensor) -> bool:
    """Return whether the kernels take these tensors: on CUDA, or on the CPU in the interpreter."""
    if not launching.usable(q) or q.requires_grad:
        return False
    from lce.kernels.cuda.rows import takes

    return takes(q, *others)
