"""Placements of chosen chunks: the kinds of `Placement`, besides `SideBySide`."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from lce.errors import UsageError
from lce.methods.base import resolved
from lce.methods.knobs import fill_in, knob
from lce.methods.parts import CHOSEN, Part
from lce.methods.selection import Placement, Selection


@dataclass(frozen=True)
class TruePositions(Placement, name="true"):
    """The placement of chosen chunks at their true positions, for speed with models whose window is long."""

    true_within: ClassVar[bool] = True

    def limit(self, selection: Selection, window: int) -> int | None:
        return window

    def key_positions(self, indices: Tensor, size: int) -> Tensor | None:
        return indices

    def part(self, i: Tensor, selection: Selection, n_slots: int) -> Part:
        return Part(CHOSEN, i)


@dataclass(frozen=True)
class ConstantDistance(Placement, name="constant"):
    """The placement of chosen chunks at the distance `far`. The own chunk and local chunks are at true distances."""

    far: int | None = knob(None, "distance of pages; none is least beyond local, in dual W - 1", least=1)
    local_is_near: ClassVar[bool] = True

    def fitted(self, label: str, selection: Selection, window: int) -> Self:
        return fill_in(self, label, "placement.", far=selection.reach)

    def limit(self, selection: Selection, window: int) -> int | None:
        return window if resolved(self.far) >= window else None

    def part(self, i: Tensor, selection: Selection, n_slots: int) -> Part:
        return Part(CHOSEN, resolved(self.far))


class OneDistance(ConstantDistance):
    """The placement of all chunks but the own one at the distance `far`, local chunks included."""

    local_is_near: ClassVar[bool] = False


@dataclass(frozen=True)
class GroupedPositions(Placement, name="grouped"):
    """The placement of Self-Extend: chosen keys at `j // group`, the query at `i // group + reach - reach // group`.

    At most `Selection.reach` tokens, those of the own chunk and of chunks seen with it, are at true distances.
    """

    group: int = knob(8, "tokens that share a position", least=1)
    exact: ClassVar[bool] = True
    local_is_near: ClassVar[bool] = True

    def limit(self, selection: Selection, window: int) -> int | None:
        return max(window, (window - selection.reach + selection.reach // self.group) * self.group)

    def key_positions(self, indices: Tensor, size: int) -> Tensor | None:
        return indices // self.group

    def part(self, i: Tensor, selection: Selection, n_slots: int) -> Part:
        return Part(CHOSEN, i // self.group + selection.reach - selection.reach // self.group)


@dataclass(frozen=True)
class DualPositions(Placement, name="dual"):
    """The placement of Dual Chunk Attention, by large chunks of `chunk_size` tokens: key j is at `j mod chunk_size`.

    The query i is at `i mod chunk_size` for its own large chunk, at `min(chunk_size + i mod chunk_size, far)` for the
    previous one, and at `far` for older ones. `chunk_size` is a multiple of the chunk size L.
    """

    chunk_size: int | None = knob(None, "tokens of a large chunk; none is 3/4 of the window", least=1)
    far: int | None = knob(None, "distance of pages; none is least beyond local, in dual W - 1", least=1)

    def fitted(self, label: str, selection: Selection, window: int) -> Self:
        """Return this placement, filled in. Raises `UsageError` if large chunks cut pages, or distances are below 0."""
        usual = max(1, 3 * window // 4 // selection.size) * selection.size
        made = fill_in(self, label, "placement.", chunk_size=usual, far=window - 1)
        if made.size % selection.size or made.size > window:
            expected = f"a multiple of page, {selection.size}, and at most the window, {window}"
            raise UsageError(f"{label}: placement.chunk_size is {made.size}; expected {expected}")
        if resolved(made.far) < made.size - 1:  # a query at a smaller position would be before some keys
            expected = f"{made.size - 1} or more, or a smaller placement.chunk_size"
            raise UsageError(f"{label}: placement.far is {made.far}; expected {expected}")
        return made

    @property
    def size(self) -> int:
        """The number of tokens in a large chunk."""
        return resolved(self.chunk_size)

    def limit(self, selection: Selection, window: int) -> int | None:
        return window if resolved(self.far) >= window else None

    def key_positions(self, indices: Tensor, size: int) -> Tensor | None:
        return indices % self.size

    def bands(self, i: Tensor, size: int) -> Tensor | None:
        """Return the first chunks of the previous large chunk and of the own one."""
        own = i // self.size * (self.size // size)
        return torch.stack((own - self.size // size, own), dim=1)

    def part(self, i: Tensor, selection: Selection, n_slots: int) -> Part:
        offset, far = i % self.size, resolved(self.far)
        at = torch.full_like(i, far), (self.size + offset).clamp(max=far), offset  # older large chunks, previous, own
        return Part(CHOSEN, torch.stack(at, dim=1), bands=self.bands(i, selection.size))
