"""The backend of lce's own compiled kernels for CPUs."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from types import ModuleType

from torch import Tensor

from lce.attention import int8_rows
from lce.attention.attention import READ, Attended, Order
from lce.attention.tiles import Tiles
from lce.attention.torch import Torch
from lce.attention.turn import SlotTurns, Turn
from lce.kernels.dense import attention
from lce.kernels.product.panels import has_tiles
from lce.kernels.runtime.kernel import DTYPES
from lce.profiling import count_dense, count_routed, section

LEAST_READ, WIDE = 32, 1024  # queries, and a window, for which PyTorch's kernel is faster with AMX


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

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        window: int | None = None,
        turn: Turn | None = None,
        order: Order = READ,
    ) -> Attended:
        if not q.shape[1] or not k.shape[1] or self.kernels(q, k, v, *(turn or ())) is not attention:
            return super().dense(q, k, v, causal, window, turn, order)
        if _by_tiles(q, k, window, order):
            return Torch().dense(q, k, v, causal, window, turn, order)
        with section("attention", count_dense, q, k, v, causal, window, order.unseen):
            return attention.dense_attention(q, k, v, causal, window, *(turn or (None, None)), *astuple(order))

    def softmax(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None, turn: Turn | None = None
    ) -> Attended:
        if (kernels := self.kernels(q, k, v, *(turn or ()))) is None:
            return super().softmax(q, k, v, causal=causal, window=window, turn=turn)
        found: Attended = kernels.dense_attention(q, k, v, causal, window, *(turn or ()))
        return found

    def lanes(self, q: Tensor, turn: Turn, spans: Sequence[tuple[int, int]]) -> attention.LaneQueries | None:
        return attention.LaneQueries(q, *turn, spans) if self.kernels(q, *turn) is attention else None

    def softmax_of_tiles(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """Compute the attention to each tile separately, so that no result depends on other tiles."""
        alone = self.kernels(q, k, v) is not None
        return self.softmax(q, k, v, causal=False) if alone else super().softmax_of_tiles(q, k, v)

    def routed(
        self, q: Tensor, turns: SlotTurns, chunk_ids: Tensor, tiles: Iterable[Tiles], generated: bool = False
    ) -> Attended:
        if self.kernels(q, *turns.table) is not attention:
            return super().routed(q, turns, chunk_ids, tiles, generated)
        with section("attention", count_routed, q, chunk_ids):
            found = attention.RoutedAttention(q, *turns.table, turns.rows, chunk_ids, generated)
            for some in tiles:
                found.add(some.k, some.v, some.index)
            return found.finish()


def _by_tiles(q: Tensor, k: Tensor, window: int | None, order: Order) -> bool:
    """Return whether PyTorch's kernel is faster, 2 to 6 times: for many read tokens, if it multiplies by AMX."""
    many = q.shape[1] >= LEAST_READ and not order.generated and (window is None or window >= min(WIDE, k.shape[1]))
    return many and q.dtype is k.dtype and has_tiles(q.dtype)
