"""Keys at other positions than those where a method caches them: turned, recent and grouped keys.

Recent keys are those of the last tokens, kept at their absolute positions, too. Grouped keys are cached at their own
positions and attended at those of their groups, `index // group`. Rotations add up. So a cached key is rotated by the
difference of both positions, which works for any group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import torch
from torch import Tensor

from lce.attention import Tiles, Turn, rotate
from lce.cache.layer import LayerCache
from lce.cache.layout import CacheLayout, segment_of
from lce.cache.limits import Limits
from lce.cache.method_state import NOTHING, FileTensor, GrowingRows, Held, MethodState, RecentRows
from lce.methods.parts import RECENT, Declaring, Part
from lce.methods.step import Step

NO_TOKENS = torch.zeros(0, dtype=torch.int64)


def unrotated(method: Declaring) -> bool:
    """Return whether a method caches keys unrotated."""
    return method.key_positions(NO_TOKENS) is None


def recent_keys(method: Declaring, n: int, layout: CacheLayout, grid: int = 1) -> dict[str, MethodState]:
    """Return the state of the keys of the last `n` tokens at absolute positions, for parts with `exact`; 0: none.

    The text goes back to multiples of `grid`.
    """
    return {RECENT: RecentRows(n, layout.key_bytes, unrotated(method), grid)} if n else {}


def keep_recent(k: Tensor, cache: LayerCache, step: Step) -> None:
    """Rotate the block's unrotated keys `k [G, T, D]` to their absolute positions, and store them as recent keys.

    Recent keys that a truncation of the cache removed are computed again from the unrotated keys in the cache.
    """
    recent = cache.kept(RecentRows, RECENT)
    if step.at is not None:
        recent.write_on_device(rotate(k, step.true_turn(k)), step.at)
        return
    if lost := recent.missing(step.start):
        old = cache.span(lost.start, lost.stop)[0]
        positions = torch.arange(lost.start, lost.stop, device=k.device)
        recent.write(rotate(old, step.rope.turn(positions, k.dtype)), lost.start)
    recent.write(rotate(k, step.true_turn(k)), step.start)


PIECE = 1024  # the number of keys scored at a time, so that scores stay in the processor's caches
Positions = Callable[[Tensor], Tensor | None]  # takes indices `[T]`; returns positions `[T]`, or None: not rotated


def seen_keys(method: Declaring, part: Part, cache: LayerCache, step: Step) -> LayerCache:
    """Return the layer's cache with keys at the positions where queries see those of a part."""
    if not cache.turned:
        return cache
    return TurnedKeys(method, None if part.exact else method.key_positions, cache, step)  # type: ignore[return-value]


@dataclass(frozen=True)
class TurnedKeys:
    """A layer's cache as `attend_spans` reads it, with keys turned from where they are cached to `seen`.

    `seen` None: to their indices in the text. The turned copies are dropped after use.
    """

    method: Declaring  # which cached the keys
    seen: Positions | None
    cache: LayerCache
    step: Step
    state: ClassVar[Mapping[str, MethodState]] = {}  # recent and grouped keys are turned like all others
    turned: ClassVar[bool] = False

    @property
    def layout(self) -> CacheLayout:
        return self.cache.layout

    @property
    def resident_from(self) -> int:
        return self.cache.resident_from

    def segments(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        return self.cache.segments(start, stop)

    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return tokens `start..stop-1`: keys where the pass sees them, and values, `[G, stop - start, D]`."""
        k, v = self.cache.span(start, stop)
        turn = self.step.once(f"turn {self.seen is None} {start} {stop}", lambda: self._turn(start, stop, k))
        return (k if turn is None else rotate(k, turn)), v

    stored = span

    def tiles(self, chunk_ids: Tensor) -> Iterator[Tiles]:
        """Yield what `LayerCache.tiles` yields, as turned copies: of the chosen tiles, or of all if these are fewer."""
        size, n = self.layout.chunk_size, self.step.stop // self.layout.chunk_size
        for some in self.cache.tiles(chunk_ids):
            index = some.index[:, :n]  # -1, for a chunk of another round, is the last of one tile more
            number = some.chosen(chunk_ids) if chunk_ids.numel() < index.numel() else index.flatten()
            waits = number.is_cpu or self.cache.stack is not None  # for tiles of tiers a GPU was waited for already
            number = number.unique() if waits else number
            chunk, place = index.new_full((2, len(some.k) + 1), -1)
            chunk[index], place[number] = (torch.arange(x, device=index.device) for x in (n, len(number)))
            place[-1] = -1
            k, v = (self.cache.readable(x[number]) for x in (some.k, some.v))
            turn = self.step.once("turn of all chunks", partial(self._turn, 0, n * size, k))
            rows = torch.arange(size, device=k.device) + chunk[number].clamp(min=0)[:, None] * size
            yield Tiles(k if turn is None else rotate(k, turn.at(rows)), v, place[index])

    def _turn(self, start: int, stop: int, like: Tensor) -> Turn | None:
        """Return the rotation of tokens `start..stop-1` to `seen`; None: no rotation.

        Rotated keys carry YaRN's factor, and unrotated keys do not.
        """
        for device in dict.fromkeys((torch.device("cpu"), like.device)):  # compared on the host: nobody waits for a GPU
            i = torch.arange(start, stop, device=device)
            held = None if self.cache.turned else self.method.key_positions(i)
            seen = i if self.seen is None else self.seen(i)
            if held is seen or (i.is_cpu and held is not None and seen is not None and torch.equal(held, seen)):
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
    placed = None if cache.turned else method.key_positions(torch.arange(start, stop, device=k.device))
    if placed is None:
        return k
    cos, sin = rope.turn(-placed, torch.float64)  # this rotation and the cached keys both include YaRN's factor
    return rotate(k, Turn((cos / rope.scale**2).float(), (sin / rope.scale**2).float()))


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
    """Rotate cached keys `k [G, n, D]` from `index` to `index // group`; `start` is the index of the first key.

    Computes in float32. 16-bit keys were rounded when they were cached, and are rounded once more. YaRN's factor stays.
    """
    n, rope = k.shape[1], step.rope

    def make() -> Turn:
        index = torch.arange(start, start + n, device=k.device)
        cos, sin = rope.turn(index // group - index, torch.float64)
        return Turn((cos / rope.scale).float(), (sin / rope.scale).float())

    few = n <= step.stop - step.start  # the same for all layers, and small
    turn = step.once(f"moved to groups of {group} from {start} to {start + n}", make) if few else make()
    return rotate(k.float(), turn).to(k.dtype)
