"""The backend of lce's own GPU kernels, which are written in Triton."""

from types import ModuleType

import torch
from torch import Tensor

from lce import gpu
from lce.attention.attention import Attended
from lce.attention.compiled import Compiled
from lce.attention.tiles import Runs, SlotQueries


class Triton(Compiled):
    """The backend that runs Triton kernels on CUDA. Where they do not fit, it does what the `compiled` backend does."""

    name = "triton"
    speed, for_gpus = 4, True

    @classmethod
    def missing(cls) -> str | None:
        return gpu.launching.missing()

    def kernels(self, q: Tensor, *others: Tensor) -> ModuleType | None:
        if not _fits(q, *others):
            return super().kernels(q, *others)
        return gpu.attention

    def decodes(self, dtype: torch.dtype, head_dim: int) -> bool:
        if not gpu.launching.installed():
            return False
        return gpu.rows.takes(torch.empty(1, head_dim, dtype=dtype, device="meta"))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> Attended:
        out, lse = gpu.decoding.attend_runs(q[:, 0], k, v, runs.first, runs.count, runs.turn, *runs.turns, runs.most)
        return out[:, None], lse[:, None]

    def dispatch(self, queries: SlotQueries, tile: Tensor, k: Tensor, v: Tensor, into: Attended) -> None:
        if not _fits(queries.q, k, v):
            super().dispatch(queries, tile, k, v, into)
        elif tile.numel():
            gpu.attention.tile_attention(queries.q, *queries.turns, tile, k, v, *into)

    def merge_slots(self, out: Tensor, lse: Tensor) -> Attended:
        if not _fits(out):
            return super().merge_slots(out, lse)
        return gpu.merging.merge_pieces(out.movedim(2, 0), lse.movedim(2, 0), out.dtype)


def _fits(q: Tensor, *others: Tensor) -> bool:
    """Return whether the kernels take these tensors: on CUDA, or on the CPU in Triton's interpreter."""
    if not gpu.launching.usable(q) or q.requires_grad:
        return False
    return gpu.rows.takes(q, *others)
