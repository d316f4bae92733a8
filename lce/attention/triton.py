"""The backend of lce's own GPU kernels, which are written in Triton."""

from collections.abc import Iterable
from itertools import chain
from types import ModuleType

import torch
from torch import Tensor

from lce import gpu
from lce.attention.attention import Attended
from lce.attention.compiled import Compiled
from lce.attention.tiles import Runs, Tiles
from lce.attention.turn import SlotTurns
from lce.kernels.runtime.launching import Rows
from lce.profiling import count_routed, section


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

    def decode(self, q: Tensor, k: Rows, v: Rows, runs: Runs) -> Attended:
        return gpu.decoding.attend_runs(q, k, v, runs.first, runs.count, runs.turn, *runs.turns, runs.most)

    def routed(
        self, q: Tensor, turns: SlotTurns, chunk_ids: Tensor, tiles: Iterable[Tiles], generated: bool = False
    ) -> Attended:
        rounds = iter(tiles)
        if (first := next(rounds, None)) is None or not _fits(q, first.k, first.v):
            some = () if first is None else (first,)
            return super().routed(q, turns, chunk_ids, chain(some, rounds), generated)
        with section("attention", count_routed, q, chunk_ids):
            found = ((some.k, some.v, some.index) for some in chain((first,), rounds))
            return gpu.chosen.chosen_attention(q, turns.table, turns.rows, chunk_ids, found)


def _fits(q: Tensor, *others: Tensor) -> bool:
    """Return whether the kernels take these tensors: on CUDA, or on the CPU in Triton's interpreter."""
    if not gpu.launching.usable(q) or q.requires_grad:
        return False
    return gpu.rows.takes(q, *others)
