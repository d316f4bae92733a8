"""Keys of a cache, turned from the positions at which a method caches them to those at which a pass sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lce.attention import Turn, rotate
from lce.cache.layer import LayerCache
from lce.cache.layout import CacheLayout, segment_of
from lce.methods.parts import Declaring
from lce.methods.step import Step

PIECE = 1024  # the number of keys scored at a time, so that scores stay in the processor's caches
Positions = Callable[[Tensor], Tensor | None]  # takes indices `[T]`; returns positions `[T]`, or None: not rotated


@dataclass(frozen=True)
class TurnedKeys:
    """A layer's cache as `attend_spans` reads it, with keys turned from the positions `held` to `seen`.

    `seen` None: to their indices in the text. The turned copies are dropped after use.
    """

    held: Positions
    seen: Positions | None
    cache: LayerCache
    step: Step
    state = ()  # recent keys are turned like all others

    @property
    def layout(self) -> CacheLayout:
        return self.cache.layout

    def segments(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        return self.cache.segments(start, stop)

    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return tokens `start..stop-1`: keys where the pass sees them, and values, `[G, stop - start, D]`."""
        k, v = self.cache.span(start, stop)
        turn = self.step.once(f"turn {self.seen is None} {start} {stop}", lambda: self._turn(start, stop, k))
        return (k if turn is None else rotate(k, turn)), v

    stored = span

    def _turn(self, start: int, stop: int, like: Tensor) -> Turn | None:
        """Return the rotation of tokens `start..stop-1` from `held` to `seen`; None: no rotation.

        Rotated keys carry YaRN's factor, and unrotated keys do not.
        """
        i = torch.arange(start, stop, device=like.device)
        held, seen = self.held(i), i if self.seen is None else self.seen(i)
        if held is seen or (held is not None and seen is not None and torch.equal(held, seen)):
            return None
        zero, rope = torch.zeros_like(i), self.step.rope
        turn = rope.turn((zero if seen is None else seen) - (zero if held is None else held), torch.float64)
        factor = rope.scale ** ((seen is not None) - (held is not None) - 1)
        return Turn(*((x * factor).to(like.dtype) for x in turn))


def pieces(cache: LayerCache, start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield spans that cover tokens `start..stop-1`, each of whole chunks of `size` tokens."""
    length = max(1, min(segment_of(cache.layout), PIECE) // size) * size
    for first in range(start, stop, length):
        yield first, min(first + length, stop)


def unrotated_keys(method: Declaring, cache: LayerCache, step: Step, start: int, stop: int) -> Tensor:
    """Return the keys of tokens `start..stop-1` in float32, rotated back from their cached positions."""
    k, rope = cache.span(start, stop)[0].float(), step.rope
    placed = method.key_positions(torch.arange(start, stop, device=k.device))
    if placed is None:
        return k
    cos, sin = rope.turn(-placed, torch.float64)  # this rotation and the cached keys both include YaRN's factor
    return rotate(k, Turn((cos / rope.scale**2).float(), (sin / rope.scale**2).float()))
