"""The backend of lce's own compiled kernels for CPUs."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from types import ModuleType
from typing import Any

from torch import Tensor

from lce.attention import int8_rows
from lce.attention.attention import Attended, Memory, Order
from lce.attention.tiles import Tiles
from lce.attention.torch import Torch
from lce.attention.turn import SlotTurns, Turn
from lce.kernels.dense import attention
from lce.kernels.runtime.kernel import DTYPES


class Compiled(Torch):
    """The backend that runs `lce.kernels.dense.attention` on CPUs; elsewhere and in other dtypes, PyTorch's."""

    name = "compiled"
    speed = 2

    def kernels(self, q: Tensor, *others: Tensor) -> ModuleType | None:
        """Return the module whose kernels take these vectors (contiguous, of one dtype or rows of 8 bits), or None."""
        dtype = q.dtype
        if dtype not in DTYPES:
            return None
        for x in (q, *others):
            if (x.dtype is not dtype and x.dtype is not int8_rows.ROW) or not x.is_cpu or x.stride(-1) != 1:
                return None
        return attention

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None, turn: Turn | None = None
    ) -> Attended:
        if (kernels := self.kernels(q, k, v, *(turn or ()))) is None:
            return super().attend(q, k, v, causal=causal, window=window, turn=turn)
        found: Attended = kernels.attend(q, k, v, causal, window, *(turn or ()))
        return found

    def attend_in_order(self, q: Tensor, k: Tensor, v: Tensor, order: Order, **how: Any) -> Attended:
        turn = how["turn"] or (None, None)
        if self.kernels(q, k, v, *(how["turn"] or ())) is not attention:
            return super().attend_in_order(q, k, v, order, **how)
        return attention.attend(q, k, v, how["causal"], how["window"], *turn, *astuple(order))

    def lanes(self, q: Tensor, turn: Turn, spans: Sequence[tuple[int, int]]) -> attention.LaneQueries | None:
        return attention.LaneQueries(q, *turn, spans) if self.kernels(q, *turn) is attention else None

    def attend_tiles(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """Compute the attention to each tile separately, so that no result depends on other tiles."""
        return super().attend_tiles(q, k, v) if self.kernels(q, k, v) is None else self.attend(q, k, v, causal=False)

    def attend_chosen(
        self,
        q: Tensor,
        turns: SlotTurns,
        chunk_ids: Tensor,
        tiles: Iterable[Tiles],
        memory: Memory | None,
        generated: bool,
    ) -> Attended:
        if self.kernels(q, *turns.table) is not attention:
            return super().attend_chosen(q, turns, chunk_ids, tiles, memory, generated)
        found = attention.ChosenTiles(q, *turns.table, turns.rows, chunk_ids, generated)
        for some in tiles:
            found.add(some.k, some.v, some.index)
        return found.finish()
