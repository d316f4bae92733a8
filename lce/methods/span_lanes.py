"""The attention of a few generated tokens of each of several contexts, whose method attends spans of tokens alone.

The method's Python runs once for all lanes: its parts are declared for their tokens as for the queries of one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lce.attention import Turn, merge
from lce.cache.layer import LayerCache
from lce.cache.layout import segment_of
from lce.cache.method_state import RecentRows
from lce.methods.attending import bounds, declared, turn_of
from lce.methods.base import Method
from lce.methods.parts import CHOSEN, RECENT, Part
from lce.methods.run import Block
from lce.methods.step import DeviceStep, PassFacts, Step
from lce.models.products import seam

Span = tuple[int, int]


@dataclass(frozen=True, eq=False)
class SpanLanes:
    """The steps of some contexts, of B tokens in all, and for each part its queries' rotations and spans."""

    method: Method
    steps: Sequence[Step]
    layers: Sequence[Sequence[LayerCache]]  # of each context
    parts: Sequence[tuple[Part, Turn, Sequence[Span]]]

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> SpanLanes | None:
        """Return the lanes, and tell each step its keys' rotation; None if blocks differ in more than their indices.

        All keys and values are in buffers, and all layers are alike.
        """
        (method, step), cache = blocks[0].acting, blocks[0].cache.layers[0]
        steps, layers = [block.acting[1] for block in blocks], [block.cache.layers for block in blocks]
        i, like = torch.tensor([i for each in steps for i in range(each.start, each.stop)]), cache.buffer.k
        alike = all(block.acting[0] is method for block in blocks)
        alike = alike and all(each.attention is step.attention for each in steps)
        if not alike or not all(each.rope.rotates_as(step.rope) for each in steps[1:]):
            return None
        if cache.turned or like.dtype is not cache.layout.dtype or not method.promised("plain"):
            return None
        longest, found = max(each.stop for each in steps), []
        whole = DeviceStep(
            i, longest, **{each.name: getattr(step, each.name) for each in fields(PassFacts)} | {"memo": {}}
        )
        if method.query_scale(i, step.window) is not None:
            return None
        for part in declared(method, i, cache.index, longest, step.sliding_window):
            if part.keys == CHOSEN or part.group is not None:
                return None
            spans: list[Span] = [*zip(*(x.tolist() for x in bounds(part, i)), strict=True)]
            if all(start == stop for start, stop in spans):
                continue
            size = segment_of(cache.layout)
            if any(start == stop or start // size < (stop - 1) // size for start, stop in spans):
                return None
            turn = turn_of(method, part, i, like, whole)
            found.append((part, Turn(*(x.expand(len(i), -1).contiguous() for x in turn)), spans))
        key_turn, true_turn = whole.key_turn(method.key_positions, like), whole.true_turn(like)
        first = 0
        for each in steps:
            own = slice(first, first := first + each.stop - each.start)
            each.memo["key turn"], each.memo["true turn"] = key_turn and key_turn.at(own), true_turn.at(own)
        return cls(method, steps, layers, found)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Keep the tokens' keys and values, and attend in a layer: `q [H, B, D]`, `k v [G, B, D]` to `[H, B, D]`.

        Returns None if the backend has no kernel for several lanes.
        """
        backend = self.steps[0].attention
        found = [backend.lanes(q, turn, spans) for _, turn, spans in self.parts]
        attended = [each for each in found if each is not None]
        if not found or len(attended) < len(found):
            return None
        stop = 0
        for step, layers in zip(self.steps, self.layers, strict=True):
            own, rows = layers[layer], range(stop, stop := stop + step.stop - step.start)
            self.method.keep(k[:, rows.start : stop], v[:, rows.start : stop], own, step)
            for (part, *_), each in zip(self.parts, attended, strict=True):
                keys, first = own.buffer.k, 0
                if part.exact and RECENT in own.state:
                    recent = own.kept(RecentRows, RECENT)
                    keys, first = recent.buffer, recent.first
                for b in rows:
                    each.attend(b, keys, own.buffer.v, first)
            seam()
        out = merge([(each.out, each.lse) for each in attended])  # [B, H, D]
        return out[0][:, None] if len(out) == 1 else out.transpose(0, 1)
