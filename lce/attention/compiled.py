"""Our own compiled kernels, on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from lce.attention.parts import Part
from lce.attention.tiles import SlotQueries
from lce.attention.torch import Torch

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Compiled(Torch):
    """`lce.kernels.attention` on CPUs; elsewhere, and for other dtypes, PyTorch's kernels."""

    name = "compiled"
    speed = 2

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Part:
        if not _fits(q, k, v):
            return super().attend(q, k, v, causal=causal, window=window)
        from lce.kernels import attention

        return attention.attend(q, k, v, causal, window)

    def attend_tiles(self, q: Tensor, k: Tensor, v: Tensor) -> Part:
        """A tile is a problem of its own, and a problem's result does not depend on the others."""
        return self.attend(q, k, v, causal=False) if _fits(q, k, v) else super().attend_tiles(q, k, v)

    def dispatch(self, queries: SlotQueries, tile: Tensor, k: Tensor, v: Tensor, into: Part) -> None:
        """The kernel sorts the rows, and turns the queries as it takes them."""
        if not _fits(queries.q, k, v):
            super().dispatch(queries, tile, k, v, into)
            return
        if not tile.numel():
            return
        from lce.kernels import attention

        attention.attend_tiles(queries.q, *queries.turns, tile, k, v, *into)

    def skips_unseen(self, out: Tensor) -> bool:
        return not out.is_cuda and out.dtype in _DTYPES

    def merge_slots(self, out: Tensor, lse: Tensor) -> Part:
        if not self.skips_unseen(out):
            return super().merge_slots(out, lse)
        from lce.kernels import attention

        return attention.merge_slots(out, lse)


def _fits(*tensors: Tensor) -> bool:
    """Whether the kernels take these: on a CPU, of a dtype that they know, vectors contiguous."""
    dtype = tensors[0].dtype
    return dtype in _DTYPES and all(not x.is_cuda and x.dtype == dtype and x.stride(-1) == 1 for x in tensors)
