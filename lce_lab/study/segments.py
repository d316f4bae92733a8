"""Stores which chunks or tokens every query of a run chose, and which spans of tokens it attended in any case.

The number of a chosen chunk takes 16 bits, or 32 if it is large. Numbers are stored once for all queries or heads that
chose the same; a span for successive queries, if each of its ends stays or moves by one token per query.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lce.errors import CapacityError
from lce.sizes import size_text

Numbers = npt.NDArray[Any]
Spans = list[list[int]]  # The [start, stop] of each span of tokens that one query attends whatever it chooses.
SEGMENT_BYTES = 400_000  # The most bytes in a segment of the data, which a browser decodes in a few milliseconds.
MOST_BYTES = 2 << 30  # By default, the most bytes that a run may take to record which chunks were chosen.


@dataclass
class Block:
    """The chunks that queries `start..stop-1` chose, and the spans attended whatever is chosen, by layer.

    `choices[layer]` has chunk numbers `[queries, choosers, K]`, or `[1, choosers, K]` if all queries chose the same; a
    chooser is a head, or heads that choose together. `spans[layer]` has each query's spans, or is None if unknown.
    """

    start: int
    stop: int
    choices: dict[int, Numbers] = field(default_factory=dict)
    spans: dict[int, list[Spans] | None] = field(default_factory=dict)


class RunChoices:
    """A record of what all queries of a run chose. Call `begin` for a block, `add` for its layers, then `segments`."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.blocks: list[Block] = []
        self.n_bytes = 0

    def begin(self, start: int, stop: int) -> None:
        """Begin the block of queries start..stop-1. Drop earlier blocks that overlap the new block."""
        while self.blocks and self.blocks[-1].stop > start:
            self.blocks.pop()
        self.blocks.append(Block(start, stop))

    def add(self, layer: int, chosen: Tensor | None, spans: list[Spans] | None, n_kv_heads: int = 1) -> None:
        """Add to the block what a layer's queries chose, `chosen [H, T, K]` (-1: none), and each query's spans."""
        block = self.blocks[-1]
        block.spans[layer] = next((known for known in block.spans.values() if known == spans), spans)
        if chosen is not None and chosen.shape[-1]:
            block.choices[layer] = _packed(chosen, n_kv_heads)
            self.count(block.choices[layer].nbytes)

    def count(self, n_bytes: int) -> None:
        """Add to the count of bytes recorded in this run. Raises `CapacityError` above `most_bytes` in all."""
        self.n_bytes += n_bytes
        if self.n_bytes > self.most_bytes:
            found = f"the choices of {self.blocks[-1].stop:,} tokens take more than {size_text(self.most_bytes)}"
            raise CapacityError(f"{found}; give a shorter text, or knobs by which fewer or larger chunks are chosen")

    @property
    def layers(self) -> list[int]:
        """The layers in which some query chose a chunk, ascending."""
        return sorted({layer for block in self.blocks for layer in block.choices})

    def sizes(self) -> tuple[int, int, int]:
        """Return how many choosers there are (H, G or 1), the most chunks that one chose, and a number's bits."""
        sizes = [(*x.shape[1:], 8 * x.itemsize) for block in self.blocks for x in block.choices.values()]
        choosers, most, bits = map(max, zip((1, 0, 16), *sizes, strict=True))
        return choosers, most, bits

    def segments(self) -> Iterator[tuple[int, int, Numbers]]:
        """Yield `(start, stop, choices)` in order: what queries start..stop-1 chose, `[rows, layers, choosers, K]`.

        A row is one query, or all queries start..stop-1 if they chose the same. Blocks of one query are joined, and
        blocks that take more than `SEGMENT_BYTES` are split.
        """
        layers, (choosers, k, bits) = self.layers, self.sizes()
        kind, shape = np.dtype(f"<u{bits // 8}"), (choosers, k)
        most = max(1, SEGMENT_BYTES // max(1, len(layers) * shape[0] * shape[1] * kind.itemsize))
        for alone, group in groupby(self.blocks, lambda block: block.stop - block.start == 1):
            blocks, n = list(group), most if alone else 1
            for some in (blocks[first : first + n] for first in range(0, len(blocks), n)):
                choices = np.concatenate([_spread(block, layers, shape, kind) for block in some])
                start, stop = some[0].start, some[-1].stop
                if len(choices) == 1:
                    yield start, stop, choices
                else:
                    for row in range(0, len(choices), most):
                        yield start + row, min(start + row + most, stop), choices[row : row + most]

    def always(self) -> list[dict[str, Any]]:
        """Return, for each set of layers with the same known spans, the layers and the result of `span_runs`."""
        # Layers by the `id` of their spans in every block: in a block, layers with equal spans share one list.
        alike: dict[tuple[int, ...], list[int]] = {}
        for layer in self.blocks[0].spans if self.blocks else ():
            if all(block.spans[layer] is not None for block in self.blocks):
                alike.setdefault(tuple(id(block.spans[layer]) for block in self.blocks), []).append(layer)
        return [
            {"layers": layers, "runs": span_runs((block.start, block.spans[layers[0]] or []) for block in self.blocks)}
            for layers in alike.values()
        ]


def _packed(chosen: Tensor, n_kv_heads: int) -> Numbers:
    """Pack `chosen [H, T, K]` into `[T, C, K]`: T becomes 1 if all queries chose alike, C is 1 if all heads did."""
    if bool((chosen == chosen[:, :1]).all()):
        chosen = chosen[:, :1]
    groups = chosen.unflatten(0, (n_kv_heads, -1))
    if bool((chosen == chosen[:1]).all()):
        chosen = chosen[:1]
    elif bool((groups == groups[:, :1]).all()):
        chosen = groups[:, 0]
    numbers = chosen.transpose(0, 1).cpu().numpy()
    return numbers.astype(np.uint16 if numbers.max() < 0xFFFF else np.uint32)  # -1 becomes the type's largest number


def _spread(block: Block, layers: list[int], shape: tuple[int, int], kind: np.dtype[Any]) -> Numbers:
    """Expand a block's `choices` to `[rows, layers, *shape]`, little-endian; the largest number means no chunk."""
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
    """Compress the spans of consecutive queries into runs `[q0, q1, [[a, da, b, db], …]]`, one inner list per span.

    Query q, from q0 to q1 - 1, attends the tokens from `a + da (q - q0)` to `b + db (q - q0) - 1`. Example: if queries
    4 to 7 attend their own chunk of 4 tokens up to themselves, the run is `[4, 8, [[4, 0, 5, 1]]]`.
    """
    runs: list[list[Any]] = []
    for start, block in blocks:
        for query, spans in enumerate(block, start):
            if not runs or not _continues(runs[-1], query, spans):
                runs.append([query, query + 1, [[a, 0, b, 0] for a, b in spans]])
    return runs


def _continues(run: list[Any], query: int, spans: Spans) -> bool:
    """Add a query to a run if its spans fit; return whether the query was added. The second query sets da, db."""
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
