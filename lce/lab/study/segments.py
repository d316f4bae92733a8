"""What every query of a run chose and always attends, in few bytes.

Choices are kept as 16 bits each: once where all queries of a block chose alike, and once for heads that choose
together. What is always attended is written as runs of queries whose spans move by 0 or 1 tokens from query to query.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lce.errors import CapacityError
from lce.sizes import size_text

Numbers = npt.NDArray[Any]
Spans = list[list[int]]  # [start, stop] of each span of tokens that a query attends
SEGMENT_BYTES = 400_000  # of the choices in a segment: a browser decodes that in a few milliseconds
MOST_BYTES = 2 << 30  # of the choices of a run


@dataclass
class Block:
    """What queries `start..stop-1` did, by layer.

    `choices[layer]` is `[rows, choosers, K]`; there is one row where all queries chose alike. `spans[layer]` has the
    spans of each query, None where the method does not say.
    """

    start: int
    stop: int
    choices: dict[int, Numbers] = field(default_factory=dict)
    spans: dict[int, list[Spans] | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """What queries `start..stop-1` chose, `[rows, layers, choosers, K]`; there is one row where they chose alike."""

    start: int
    stop: int
    choices: Numbers

    @property
    def data(self) -> str:
        return base64.b64encode(self.choices.tobytes()).decode("ascii")


class RunChoices:
    """What all queries of a run chose. Call `begin` for a block, `add` for each layer, and `segments` at the end."""

    def __init__(self, n_kv_heads: int, most_bytes: int = MOST_BYTES) -> None:
        self.n_kv_heads, self.most_bytes = n_kv_heads, most_bytes
        self.blocks: list[Block] = []
        self.n_bytes = 0

    def begin(self, start: int, stop: int) -> None:
        """Begin a block. Blocks that it overlaps are dropped: their queries run again."""
        while self.blocks and self.blocks[-1].stop > start:
            self.blocks.pop()
        self.blocks.append(Block(start, stop))

    def add(self, layer: int, chosen: Tensor | None, spans: list[Spans] | None) -> None:
        """Add what a layer chose in the block, `[H, T, K]` with -1 for none, and what it attends besides."""
        block = self.blocks[-1]
        block.spans[layer] = next((known for known in block.spans.values() if known == spans), spans)
        if chosen is not None and chosen.shape[-1]:
            block.choices[layer] = self._packed(chosen)
            self.count(block.choices[layer].nbytes)

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

    def _all(self) -> Iterator[Numbers]:
        return (choices for block in self.blocks for choices in block.choices.values())

    @property
    def layers(self) -> list[int]:
        """The layers that choose."""
        return sorted({layer for block in self.blocks for layer in block.choices})

    @property
    def choosers(self) -> int:
        """How many choose on their own: 1, the KV heads, or the heads."""
        return max((x.shape[1] for x in self._all()), default=1)

    @property
    def most(self) -> int:
        """The most choices of a query."""
        return max((x.shape[2] for x in self._all()), default=0)

    @property
    def bits(self) -> int:
        return max((8 * x.itemsize for x in self._all()), default=16)

    def segments(self) -> Iterator[Segment]:
        """Yield what all queries chose, in order and in pieces of bounded size. Blocks of one query are joined."""
        kind, shape = np.dtype(f"<u{self.bits // 8}"), (self.choosers, self.most)
        layers = self.layers
        most = max(1, SEGMENT_BYTES // max(1, len(layers) * shape[0] * shape[1] * kind.itemsize))
        singles: list[tuple[int, Numbers]] = []
        for block in [*self.blocks, None]:
            if block is None or block.stop - block.start > 1 or len(singles) == most:
                if singles:
                    first, last = singles[0][0], singles[-1][0]
                    yield Segment(first, last + 1, np.concatenate([row for _, row in singles]))
                singles = []
            if block is None:
                return
            choices = _spread(block, layers, shape, kind)
            if block.stop - block.start == 1:
                singles.append((block.start, choices))
            elif len(choices) == 1:
                yield Segment(block.start, block.stop, choices)
            else:
                for at in range(0, len(choices), most):
                    part = choices[at : at + most]
                    yield Segment(block.start + at, block.start + at + len(part), part)

    def always(self) -> list[dict[str, Any]]:
        """Return what all queries attend whatever is chosen, as runs: one entry for the layers that are alike.

        A layer of which the method does not say is in no entry.
        """
        alike: dict[tuple[int, ...], list[int]] = {}
        for layer in self.blocks[0].spans if self.blocks else ():
            if all(block.spans[layer] is not None for block in self.blocks):
                alike.setdefault(tuple(id(block.spans[layer]) for block in self.blocks), []).append(layer)
        return [
            {"layers": layers, "runs": span_runs((block.start, block.spans[layers[0]] or []) for block in self.blocks)}
            for layers in alike.values()
        ]


def _spread(block: Block, layers: list[int], shape: tuple[int, int], kind: np.dtype[Any]) -> Numbers:
    """Return a block's choices `[rows, layers, choosers, K]`, little-endian, the largest number for none."""
    rows = max((len(x) for x in block.choices.values()), default=1)
    none = np.iinfo(kind).max
    found = np.full((rows, len(layers), *shape), none, dtype=kind)
    for number, layer in enumerate(layers):
        if layer in block.choices:
            x = block.choices[layer]
            same = np.where(x == np.iinfo(x.dtype).max, none, x).astype(kind)
            found[:, number, :, : x.shape[2]] = same.repeat(shape[0] // x.shape[1], axis=1)
    return found


def span_runs(blocks: Iterable[tuple[int, list[Spans]]]) -> list[list[Any]]:
    """Return the spans of one query after the other as runs `[q0, q1, [[a, da, b, db], …]]`.

    Query q of a run attends `a + da (q - q0)` to `b + db (q - q0) - 1` for each span. `blocks` has the index of each
    block's first query and the spans of its queries.

    Example: queries 4 to 7 that attend their own chunk of 4 tokens are `[4, 8, [[4, 0, 5, 1]]]`.
    """
    runs: list[list[Any]] = []
    for start, block in blocks:
        for query, spans in enumerate(block, start):
            if not runs or not _continues(runs[-1], query, spans):
                runs.append([query, query + 1, [[a, 0, b, 0] for a, b in spans]])
    return runs


def _continues(run: list[Any], query: int, spans: Spans) -> bool:
    """Whether a query goes on with a run; then it is added. The second query decides how the spans move."""
    n, moving = query - run[0], run[2]
    if len(spans) != len(moving):
        return False
    if n == 1:
        moving = [[a, x - a, b, y - b] for (a, _, b, _), (x, y) in zip(moving, spans, strict=True)]
        if any(da not in (0, 1) or db not in (0, 1) for _, da, _, db in moving):
            return False
    elif any([a + da * n, b + db * n] != span for (a, da, b, db), span in zip(moving, spans, strict=True)):
        return False
    run[1:] = query + 1, moving
    return True
