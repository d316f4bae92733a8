"""Self-Extend: near keys at their own distance, far ones at that of their group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from lce.attention import Turn, merge, rotate
from lce.cache.layer import LayerCache
from lce.methods.base import Example, LocalMethod
from lce.methods.costs import Cost, QueryBlock
from lce.methods.decoding import decode_far, decode_recent, recent_span
from lce.methods.parts import attend_behind, attend_local, spans_of
from lce.methods.registry import register
from lce.methods.step import DeviceStep, Step


@register("self_extend")
@dataclass(frozen=True)
class SelfExtend(LocalMethod):
    """Self-Extend (Jin et al., 2024, "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning").

    A query attends every earlier key. One nearer than `local` is seen at its true distance; farther ones at
    `i // group - j // group + local - local // group` (Eq. 3-4, with the paper's floors), so that distances grow
    `group` times more slowly. The window is stretched to `(W - local) · group + local` tokens; beyond that, distances
    leave it: choose a larger group.

    Example: `local=4, group=2`; query 9 sees keys 9..6 at 0..3, then 5, 4 at 4 and 3, 2 at 5.

    Keys are cached at their group's position; the last `local` also at their own. Time: O(N · D) a token and head.
    """

    local: int | None = None
    group: int = 8

    knob_help: ClassVar = {
        "local": "last tokens, at exact distances; none is a quarter of the window",
        "group": "tokens that share a position farther away",
    }
    example: ClassVar = Example({"local": 4, "group": 3})

    def resolve(self, window: int) -> Self:
        made = replace(self, local=max(1, window // 4) if self.local is None else self.local)
        made.expect(local=1, group=1)
        return made

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        """The text whose farthest distance, `i // group + local - local // group`, is the window's last position."""
        grouped = window - self.n_local + self.n_local // self.group
        return max(window, grouped * self.group)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return indices // self.group

    def spans(self, cache: LayerCache, step: Step) -> Tensor | None:
        index = step.positions(cache.buffer.k.device)
        return spans_of((0, index + 1), like=index)

    def distance(self, index: Tensor, token: Tensor, step: Step) -> Tensor | None:
        grouped = index // self.group - token // self.group + self.n_local - self.n_local // self.group
        return torch.where(index - token < self.n_local, index - token, grouped)

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        here = attend_local(q, cache, step, window=self.n_local)
        if step.stop <= self.n_local:
            return here[0]
        return merge([attend_behind(rotate(q, self.far_turn(q, step)), cache, step, gap=self.n_local), here])

    def decode(self, q: Tensor, cache: LayerCache, step: DeviceStep) -> Tensor:
        here = decode_recent(q, cache, step, lambda: recent_span(step, self.n_local, q))
        return merge([decode_far(q, cache, step, self.n_local, lambda: self.far_turn(q, step)), here])

    def cost(self, block: QueryBlock) -> Cost:
        return block.recent(self.n_local) + block.behind(self.n_local)

    def far_turn(self, q: Tensor, step: Step) -> Turn:
        """What turns queries to where they see far keys from."""
        shift = self.n_local - self.n_local // self.group
        turn: Turn = step.once("turn", lambda: step.rope.turn(step.positions(q.device) // self.group + shift, q.dtype))
        return turn
