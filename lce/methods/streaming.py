"""StreamingLLM: the first tokens and the last ones, and nothing between."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from lce.attention import Turn, merge, rotate
from lce.cache.layer import LayerCache
from lce.cache.layout import Reach
from lce.methods.base import Example, Method
from lce.methods.costs import Cost, QueryBlock
from lce.methods.decoding import Span, decode_spans, recent_span
from lce.methods.parts import attend_behind, attend_span, sinks_and_local
from lce.methods.registry import register
from lce.methods.step import DeviceStep, Step


@register("streaming")
@dataclass(frozen=True)
class Streaming(Method):
    """StreamingLLM (Xiao et al., 2024, "Efficient Streaming Language Models with Attention Sinks").

    A query attends the first `sinks` tokens and the last `local`, itself included (section 3.2). Positions are indices
    inside what is kept, for every query of a long prefill as in decode: a local key is seen at its true distance, sink
    j from position `sinks + local - 1` once there is something between.

    Example: `sinks=2, local=3`; query 9 attends tokens 0, 1, 7, 8, 9 as if they were a text of five.

    Keys are cached at their absolute position, which is a sink's position too, so only the query is turned.
    Time: O((sinks + local) · D) a token and head, whatever the length.
    """

    sinks: int = 4
    local: int | None = None

    knob_help: ClassVar = {
        "sinks": "first tokens, always attended",
        "local": "last tokens; none is the window without the sinks",
    }
    example: ClassVar = Example({"sinks": 2, "local": 6})

    def resolve(self, window: int) -> Self:
        made = replace(self, local=max(1, window - self.sinks) if self.local is None else self.local)
        made.expect(sinks=0, local=1)
        return made

    @property
    def block(self) -> int:
        """A quarter of what a query attends, 512 to 1,024: larger products run faster."""
        return max(512, min(1024, (self.reach.sinks + self.reach.local) // 4))

    @property
    def reach(self) -> Reach:
        assert self.local is not None, "resolved before use"
        return Reach(sinks=self.sinks, local=self.local)

    def spans(self, cache: LayerCache, step: Step) -> Tensor | None:
        return sinks_and_local(self.sinks, self.reach.local, step.positions(cache.buffer.k.device))

    def distance(self, index: Tensor, token: Tensor, step: Step) -> Tensor | None:
        last = self.reach.sinks + self.reach.local - 1
        return torch.where(index - token < self.reach.local, index - token, index.clamp(max=last) - token)

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        assert self.local is not None, "resolved before use"
        placed = rotate(q, step.true_turn(q))
        here = attend_span(placed, cache, step, causal=True, window=self.local)
        if step.stop <= self.local or not self.sinks:
            return here[0]
        turn = self.sink_turn(q, step)
        return merge([attend_behind(rotate(q, turn), cache, step, gap=self.local, stop=self.sinks), here])

    def sink_turn(self, q: Tensor, step: Step) -> Turn:
        """What turns queries to where they see sinks from."""
        last = self.reach.sinks + self.reach.local - 1
        turn: Turn = step.once("turn", lambda: step.rope.turn(step.positions(q.device).clamp(max=last), q.dtype))
        return turn

    def decode(self, q: Tensor, cache: LayerCache, step: DeviceStep) -> Tensor:
        def spans() -> list[Span]:
            here = recent_span(step, self.local, q)
            if not self.sinks:
                return [here]
            sinks = Span(
                torch.zeros_like(step.at), here.first.clamp(max=self.sinks), self.sinks, self.sink_turn(q, step)
            )
            return [sinks, here]

        return decode_spans(q, cache, step, "runs", spans)[0]

    def cost(self, block: QueryBlock) -> Cost:
        assert self.local is not None, "resolved before use"
        return block.recent(self.local) + block.behind(self.local, stop=self.sinks)
