"""What every query of a run chose and always attends, in few bytes.

Choices are whole numbers, most of them small: they are kept as 16 bits each as they come, once where all queries of a
block chose alike, and once for heads that choose together. What is always attended is kept as runs of queries whose
spans move by 0 or 1 tokens from each query to the next.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lce.errors import CapacityError
from lce.sizes import size_text

Numbers = npt.NDArray[Any]
SEGMENT_BYTES = 400_000  # of the choices in a segment: a browser decodes that in a few milliseconds
MOST_BYTES = 2 << 30  # of the choices of a run


@dataclass
class Block:
    """The choices of one block of queries `start..stop-1`, by layer: `[rows, choosers, K]`, where rows may be 1."""

    start: int
    stop: int
    layers: dict[int, Numbers] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """What queries `start..stop-1` chose: `choices [rows, layers, choosers, K]`; of one row where they chose alike."""

    start: int
    stop: int
    choices: Numbers

    @property
    def data(self) -> str:
        return base64.b64encode(self.choices.tobytes()).decode("ascii")


class Choices:
    """What all queries of a run chose. `begin` a block, `add` each layer's choice, `segments` at the end."""

    def __init__(self, n_heads: int, n_kv_heads: int, most_bytes: int = MOST_BYTES) -> None:
        self.n_heads, self.n_kv_heads, self.most_bytes = n_heads, n_kv_heads, most_bytes
        self.blocks: list[Block] = []
        self.n_bytes = 0

    def begin(self, start: int, stop: int) -> None:
        """A block begins. A call that starts before the end of another one takes that one's place."""
        while self.blocks and self.blocks[-1].stop > start:
            self.blocks.pop()
        self.blocks.append(Block(start, stop))

    def add(self, layer: int, chosen: Tensor) -> None:
        """A layer's choice in the block, `[H, T, K]`, -1 for none."""
        packed = self._packed(chosen)
        self.blocks[-1].layers[layer] = packed
        self.count(packed.nbytes)

    def count(self, n_bytes: int) -> None:
        """Count bytes that are kept of the run. Raises `CapacityError` where they are too many."""
        self.n_bytes += n_bytes
        if self.n_bytes > self.most_bytes:
            raise CapacityError(
                f"the choices of {self.blocks[-1].stop:,} tokens take more than {size_text(self.most_bytes)}; give a "
                "shorter text, or knobs by which fewer or larger chunks are chosen"
            )

    def _packed(self, chosen: Tensor) -> Numbers:
        if chosen.shape[1] > 1 and bool((chosen == chosen[:, :1]).all()):
            chosen = chosen[:, :1]
        groups = chosen.unflatten(0, (self.n_kv_heads, -1))
        if bool((chosen == chosen[:1]).all()):
            chosen = chosen[:1]
        elif bool((groups == groups[:, :1]).all()):
            chosen = groups[:, 0]
        numbers = chosen.transpose(0, 1).cpu().numpy()
        most = int(numbers.max()) if numbers.size else 0
        return numbers.astype(np.uint16 if most < 0xFFFF else np.uint32)  # -1 becomes the largest number

    @property
    def layers(self) -> list[int]:
        """The layers that choose."""
        return sorted({layer for block in self.blocks for layer in block.layers})

    @property
    def choosers(self) -> int:
        """How many choose on their own: 1, the KV heads, or the heads."""
        return max((x.shape[1] for block in self.blocks for x in block.layers.values()), default=1)

    @property
    def most(self) -> int:
        """The most choices of a query."""
        return max((x.shape[2] for block in self.blocks for x in block.layers.values()), default=0)

    @property
    def bits(self) -> int:
        wide = any(x.dtype == np.uint32 for block in self.blocks for x in block.layers.values())
        return 32 if wide else 16

    def row(self, query: int, layer: int) -> Numbers | None:
        """What a query of the last block chose in a layer, `[choosers, K]`; None where it chose nothing."""
        block = self.blocks[-1]
        found = block.layers.get(layer)
        return None if found is None else found[0 if len(found) == 1 else query - block.start]

    def segments(self) -> Iterator[Segment]:
        """All queries in order, in pieces of bounded size. Blocks of one query are joined."""
        layers, shape = self.layers, (self.choosers, self.most)
        row_bytes = max(1, len(layers) * shape[0] * shape[1] * self.bits // 8)
        most = max(1, SEGMENT_BYTES // row_bytes)
        singles: list[Block] = []
        for block in self.blocks:
            if block.stop - block.start == 1:
                singles.append(block)
                continue
            yield from self._joined(singles, layers, shape, most)
            singles = []
            choices = self._choices(block, layers, shape)
            if len(choices) == 1:
                yield Segment(block.start, block.stop, choices)
                continue
            for first in range(block.start, block.stop, most):
                stop = min(first + most, block.stop)
                yield Segment(first, stop, choices[first - block.start : stop - block.start])
        yield from self._joined(singles, layers, shape, most)

    def _joined(
        self, singles: Sequence[Block], layers: Sequence[int], shape: tuple[int, int], most: int
    ) -> Iterator[Segment]:
        for first in range(0, len(singles), most):
            some = singles[first : first + most]
            rows = np.concatenate([self._choices(block, layers, shape) for block in some])
            yield Segment(some[0].start, some[-1].stop, rows)

    def _choices(self, block: Block, layers: Sequence[int], shape: tuple[int, int]) -> Numbers:
        """A block's choices `[rows, layers, choosers, K]`, little-endian, the largest number for none."""
        rows = max((len(x) for x in block.layers.values()), default=1)
        kind = np.dtype("<u2" if self.bits == 16 else "<u4")
        found = np.full((rows, len(layers), *shape), np.iinfo(kind).max, dtype=kind)
        for at, layer in enumerate(layers):
            if layer in block.layers:
                x = block.layers[layer]
                none = np.iinfo(x.dtype).max
                spread = np.where(x == none, np.iinfo(kind).max, x).astype(kind)
                found[:, at, :, : x.shape[2]] = spread.repeat(shape[0] // x.shape[1], axis=1)
        return found


Spans = list[list[int]]  # start, stop


class SpanRuns:
    """The spans of one query after the other, as runs `[q0, q1, [[a, da, b, db], …]]`: query q has `a + da (q - q0)`
    to `b + db (q - q0) - 1` for each span.

    Example: queries 4 to 7 that attend their own chunk of 4 tokens are `[4, 8, [[4, 0, 5, 1]]]`.
    """

    def __init__(self) -> None:
        self.runs: list[list[Any]] = []
        self.block = (-1, -1)  # the queries that were added last
        self.latest: list[Spans] = []  # and their spans

    def extend(self, block: tuple[int, int], spans: list[Spans]) -> None:
        """Add the spans of queries `start..stop-1`."""
        for query, found in enumerate(spans, block[0]):
            self.add(query, found)
        self.block, self.latest = block, spans

    def copy(self) -> SpanRuns:
        """Runs that grow on their own from here on."""
        other = SpanRuns()
        other.runs = deepcopy(self.runs)
        return other

    def add(self, query: int, spans: Spans) -> None:
        """The spans of a query. One that was there before is replaced, with all after it."""
        while self.runs and self.runs[-1][1] > query:
            last = self.runs[-1]
            last[1] = query
            if last[0] >= query:
                self.runs.pop()
        if self.runs and self._continues(self.runs[-1], query, spans):
            self.runs[-1][1] = query + 1
        else:
            self.runs.append([query, query + 1, [[a, 0, b, 0] for a, b in spans]])

    def _continues(self, run: list[Any], query: int, spans: Spans) -> bool:
        first, stop, moving = run
        n = query - first
        if stop != query or len(spans) != len(moving):
            return False
        if n > 1:
            pairs = zip(moving, spans, strict=True)
            return all(a + da * n == x and b + db * n == y for (a, da, b, db), (x, y) in pairs)
        steps = [[a, x - a, b, y - b] for (a, _, b, _), (x, y) in zip(moving, spans, strict=True)]
        if any(da not in (0, 1) or db not in (0, 1) for _, da, _, db in steps):
            return False
        run[2] = steps
        return True
