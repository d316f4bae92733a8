"""Keys that are cached at their own positions, and attended at the positions of their groups: `index // group`.

Rotations add up. So a cached key is rotated by the difference of both positions, which works for any group. The state
`GroupedKeys` keeps a layer's rotated keys as long as the group stays the same, so that each key is rotated once.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from lce.attention import Turn, rotate
from lce.cache.layer import LayerCache
from lce.cache.layout import CacheLayout
from lce.cache.limits import Limits
from lce.cache.method_state import NOTHING, FileTensor, GrowingRows, Held
from lce.methods.step import Step

GROUPED: Final = "grouped keys"  # the name of the state `GroupedKeys`


class GroupedKeys(GrowingRows):
    """A state with the keys `[G, n, D]` of the first n tokens, rotated to `index // group` in the model's dtype.

    The rows are made from the cache when they are read, so they are in no file, and a truncated text makes the rows
    that it lacks. A text of at most `window` tokens needs none. If keys and values exceed a memory budget, or are in 8
    bits on the device, nothing is kept: all keys are rotated each time they are read.
    """

    axis = 1

    def __init__(self, layout: CacheLayout, window: int) -> None:
        super().__init__(layout.key_bytes)
        self.layout, self.window = layout, window
        self.most = Limits(layout).resident_tokens if layout.format.stored_dtype is layout.dtype else 0
        self._group = 1
        self._final = 0  # rows before this one are of tokens that neither an interruption nor rounding will change

    def serves(self, cache: LayerCache) -> bool:
        """Return whether a layer's rotated keys are kept."""
        return self.most > 0 and (cache.stack is None or Limits(cache.layout).budget is None)

    def rows(self, cache: LayerCache, group: int, step: Step, start: int, stop: int) -> Tensor:
        """Return the keys of tokens `start..stop-1` for this group, a view `[G, n, D]`. Time: O(rows that are new)."""
        if group != self._group:
            self._n_rows, self._group = 0, group  # assigned left to right: an interruption may come between
        self._final = cache.rounded if self.layout.format.rounds else cache.length
        for first, last in cache.segments(self._n_rows, stop):
            self.write(moved(cache.span(first, last)[0], first, group, step), first)
        return self.buffer[:, start:stop]  # not `span`, which counts what is compared to choose keys

    def drop(self) -> None:
        """Free the rows."""
        self._n_rows, self._rows = 0, None

    def commit(self, n_tokens: int = 0) -> None:
        if self.layout.format.rounds:  # the next pass rounds some of the tokens whose rows are not final
            self._n_rows = min(self._n_rows, self._final)

    def discard(self) -> None:
        self._n_rows = min(self._n_rows, self._final)

    def committed(self, n_tokens: int) -> Held:
        return NOTHING  # nothing is saved

    def agrees(self, tensor: FileTensor, number: int, n_tokens: int) -> bool:
        return False

    def mark(self, n_tokens: int) -> Held:
        return None, self.layout.old(n_tokens) if self.layout.format.rounds else n_tokens

    def _go_back(self, mark: Held) -> None:
        self._final = min(self._final, mark[1])

    def most_bytes(self, n_tokens: int, block: int) -> int:
        return super().most_bytes(min(n_tokens, self.most), block) if n_tokens > self.window else 0


def grouped(cache: LayerCache, group: int, step: Step, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return tokens `start..stop-1`: keys `[G, n, D]` at the positions `index // group`, and values `[G, n, D]`.

    The keys are a layer's `GroupedKeys`, if it has this state, or else rotated now.
    """
    kept = cache.state.get(GROUPED)
    if isinstance(kept, GroupedKeys):
        if kept.serves(cache):
            return kept.rows(cache, group, step, start, stop), cache.span(start, stop)[1]
        kept.drop()
    k, v = cache.span(start, stop)
    return moved(k, start, group, step), v


def moved(k: Tensor, start: int, group: int, step: Step) -> Tensor:
    """Rotate the cached keys `k [G, n, D]` of the tokens from `start` on from `index` to `index // group`.

    In float32, rounded once: in 16 bits, keys are then rounded twice in all. The cached keys include YaRN's factor.
    """
    n, rope = k.shape[1], step.rope

    def make() -> Turn:
        index = torch.arange(start, start + n, device=k.device)
        cos, sin = rope.turn(index // group - index, torch.float64)
        return Turn((cos / rope.scale).float(), (sin / rope.scale).float())

    few = n <= step.stop - step.start  # the same for all layers, and small
    turn = step.once(f"moved to groups of {group} from {start} to {start + n}", make) if few else make()
    return rotate(k.float(), turn).to(k.dtype)
