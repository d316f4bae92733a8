"""Our own compiled kernels, on CPUs."""

from __future__ import annotations

from torch import Tensor

from lce.attention.merging import Attended
from lce.attention.tiles import SlotQueries
from lce.attention.torch import Torch
from lce.attention.turn import Turn
from lce.kernels.cpu import attention as kernels
from lce.kernels.cpu.numbers import STORED


class Compiled(Torch):
    """`lce.kernels.cpu.attention` on CPUs; elsewhere, and for other dtypes, PyTorch's kernels."""

    name = "compiled"
    speed = 2

    def dense(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None, turn: Turn | None = None
    ) -> Attended:
        """Attend with a kernel that turns the queries as it reads them."""
        if not _fits(q, k, v, *(turn or ())):
            return super().dense(q, k, v, causal=causal, window=window, turn=turn)
        return kernels.attend(q, k, v, causal, window, *(turn or ()))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Attended:
        if not _fits(q, k, v):
            return super().attend(q, k, v, causal=causal, window=window)
        out, lse = kernels.attend(q.flatten(0, 1), k, v, causal, window)
        return out.view(q.shape), lse.view(q.shape[:-1])

    def attend_tiles(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """Attend tiles as separate problems: no result depends on other tiles."""
        return self.attend(q, k, v, causal=False) if _fits(q, k, v) else super().attend_tiles(q, k, v)

    def dispatch(self, queries: SlotQueries, tile: Tensor, k: Tensor, v: Tensor, into: Attended) -> None:
        """Attend tiles with a kernel that sorts the rows, and turns the queries as it reads them."""
        if not _fits(queries.q, k, v):
            super().dispatch(queries, tile, k, v, into)
            return
        if not tile.numel():
            return
        kernels.attend_tiles(queries.q, *queries.turns, tile, k, v, *into)

    def skips_unseen(self, out: Tensor) -> bool:
        return out.is_cpu and out.dtype in STORED

    def merge_slots(self, out: Tensor, lse: Tensor) -> Attended:
        if not self.skips_unseen(out):
            return super().merge_slots(out, lse)
        return kernels.merge_slots(out, lse)


def _fits(q: Tensor, *others: Tensor) -> bool:
    """Return whether the kernels take these tensors: on a CPU, of a known dtype, with contiguous vectors."""
    dtype = q.dtype
    if dtype not in STORED or not q.is_cpu or q.stride(-1) != 1:
        return False
    return all(x.dtype is dtype and x.is_cpu and x.stride(-1) == 1 for x in others)
