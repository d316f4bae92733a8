"""Dual Chunk Attention: every key, at positions that repeat from chunk to chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from lce.attention import Turn, merge, rotate
from lce.cache.layer import LayerCache
from lce.cache.layout import Reach
from lce.errors import ModelError, UsageError, shown
from lce.methods.base import Example, Method
from lce.methods.costs import Cost, QueryBlock
from lce.methods.decoding import Span, decode_spans
from lce.methods.parts import attend_span, spans_of
from lce.methods.registry import register
from lce.methods.step import DeviceStep, ModelFacts, Step


@register("dca")
@dataclass(frozen=True)
class DualChunk(Method):
    """Dual Chunk Attention (An et al., 2024, "Training-Free Long-Context Scaling of Large Language Models").

    With `s = chunk_size`, a key sits at `j mod s` (Eq. 2). The query sits at `i mod s` for its own chunk (Eq. 3-4,
    "intra"), at `min(s + i mod s, far)` for the previous one (Eq. 6-7, "successive"), so that neighbours keep their
    true distance across the border, and at `far` for all older ones (Eq. 5, "inter"). `far` is `W - 1`, so that no
    distance exceeds it. The three are dense parts of one softmax (Eq. 8).

    Example: `s=6, W=10`; query 11 is at 5 for keys 6..11 (at 0..5), and at 9 for keys 0..5.

    `parts` is the paper's ablation (Figure 4). `intra`: a query attends its own chunk alone. `intra+inter`: it attends
    every earlier chunk as well, the previous one too, from `far`. `all`: the previous chunk is successive.

    `temperature` multiplies the logits of query i by the square of `max(1, 1 + 0.05 ln((i + 1) / W))`, as the released
    code does and the paper's results do not.

    Keys are cached at `j mod s` and are not rotated again. Time: O(N · D) a token and head, that of full attention.
    """

    chunk_size: int | None = None
    parts: Literal["all", "intra", "intra+inter"] = "all"
    temperature: bool = False
    far: int | None = None

    knob_help: ClassVar = {
        "chunk_size": "tokens of a chunk; none is 3/4 of the window",
        "parts": "which of the paper's parts are attended: intra, inter, successive",
        "temperature": "the factor of the released code, which the paper's results do not have",
        "far": "the query's position for chunks before the previous one; none is W - 1",
    }
    example: ClassVar = Example({"chunk_size": 8})

    def for_model(self, model: ModelFacts) -> Self:
        """Qwen's `dual_chunk_attention_config`: its chunk holds `local_size` positions kept for the previous chunk.

        The query of older chunks is at Qwen's `chunk_size`, as where these models are served: one beyond the paper's
        `c - 1`. The successive positions may end before it, at `2s - 1`; then it is there.
        """
        config = model.config.published.get("dual_chunk_attention_config")
        if config is None or self.chunk_size is not None:
            return self
        size, kept = (config.get(key) for key in ("chunk_size", "local_size"))
        if not isinstance(size, int) or not isinstance(kept, int) or not 0 <= kept < size:
            raise ModelError(
                f"{model.source.path}: dual_chunk_attention_config is {shown(config)}; expected a chunk_size and a "
                "smaller local_size; give -o chunk_size=N"
            )
        far = min(size, 2 * (size - kept) - 1) if self.far is None else self.far
        return replace(self, chunk_size=size - kept, far=far)

    def resolve(self, window: int) -> Self:
        size = max(1, 3 * window // 4) if self.chunk_size is None else self.chunk_size
        made = replace(self, chunk_size=size, far=window - 1 if self.far is None else self.far)
        made.expect(chunk_size=1)
        if size > window:
            raise UsageError(f"{self.label}: chunk_size is {size}; expected at most the window, {window}")
        made.expect(far=size - 1)  # a nearer query would stand before keys of its past
        return made

    @property
    def block(self) -> int:
        return 2048

    @property
    def size(self) -> int:
        """`chunk_size`, once it is resolved."""
        assert self.chunk_size is not None, "resolved before use"
        return self.chunk_size

    @property
    def farthest(self) -> int:
        """`far`, once it is resolved."""
        assert self.far is not None, "resolved before use"
        return self.far

    @property
    def reach(self) -> Reach:
        return Reach(self.size, local=2 * self.size)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return indices % self.size

    def spans(self, cache: LayerCache, step: Step) -> Tensor | None:
        index = step.positions(cache.buffer.k.device)
        return spans_of((index // self.size * self.size if self.parts == "intra" else 0, index + 1), like=index)

    def distance(self, index: Tensor, token: Tensor, step: Step) -> Tensor | None:
        own, offset, far = index // self.size, index % self.size, torch.tensor(self.farthest, device=index.device)
        previous = (offset + self.size).clamp(max=self.farthest) if self.parts == "all" else far
        behind = own - token // self.size  # chunks
        return torch.where(behind == 0, offset, torch.where(behind == 1, previous, far)) - token % self.size

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        size = self.size
        q = self.tempered(q, step)
        own, previous, older = (rotate(q, turn) for turn in step.once("turns", lambda: self.turns(q, step)))
        outs = []
        for start, stop in runs(step, size):
            here = slice(start - step.start, stop - step.start)
            border = start // size * size
            parts = [attend_span(own[:, here], cache, step, causal=True, first=border, stop=stop)]
            inter = self.inter_stop(border)
            if border > inter and self.parts == "all":
                parts.append(attend_span(previous[:, here], cache, step, causal=False, first=inter, stop=border))
            if inter:
                parts.append(attend_span(older[:, here], cache, step, causal=False, stop=inter))
            outs.append(merge(parts))
        return torch.cat(outs, dim=1)

    def decode(self, q: Tensor, cache: LayerCache, step: DeviceStep) -> Tensor:
        def spans() -> list[Span]:
            border = step.at // self.size * self.size
            own, previous, older = self.turns(q, step)
            found = [Span(border, step.at + 1, min(self.size, step.bound), own)]
            inter = {"all": (border - self.size).clamp(min=0), "intra": None, "intra+inter": border}[self.parts]
            if inter is not None:
                found.append(Span(torch.zeros_like(border), inter, step.bound, older))
            if inter is not None and self.parts == "all":
                found.append(Span(inter, border, min(self.size, step.bound), previous))
            return found

        return decode_spans(self.tempered(q, step), cache, step, "runs", spans)[0]

    def cost(self, block: QueryBlock) -> Cost:
        return block.own_chunk(self.size) if self.parts == "intra" else block.recent()

    def tempered(self, q: Tensor, step: Step) -> Tensor:
        """The queries times their temperature, if there is one."""
        if not self.temperature:
            return q
        factor: Tensor = step.once(
            "temperature", lambda: temperature(step.positions(q.device), step.window).to(q.dtype)
        )
        return q * factor

    def inter_stop(self, border: int) -> int:
        """Where the keys end that a query sees from `far`; `border` is where its own chunk begins."""
        return {"all": max(0, border - self.size), "intra": 0, "intra+inter": border}[self.parts]

    def turns(self, q: Tensor, step: Step) -> tuple[Turn, Turn, Turn]:
        """What turns the queries for their own chunk, for the previous one and for older ones."""
        offsets = step.positions(q.device) % self.size
        far = self.farthest
        previous, older = (offsets + self.size).clamp(max=far), torch.full_like(offsets, far)
        turns = step.rope.turn(torch.stack((offsets, previous, older)), q.dtype)
        return turns.at(0), turns.at(1), turns.at(2)


def temperature(indices: Tensor, window: int) -> Tensor:
    """What the logits of each query index `[T]` are multiplied by: `[T, 1]`."""
    factor = ((indices.to(torch.float64) + 1) / window).log() * 0.05 + 1
    return factor.clamp(min=1.0).square()[:, None]


def runs(step: Step, size: int) -> Iterator[tuple[int, int]]:
    """The block cut at chunk borders: `start, stop` of each run. Example: 5..13 by 6 is 5..6, 6..12, 12..13."""
    start = step.start
    while start < step.stop:
        stop = min((start // size + 1) * size, step.stop)
        yield start, stop
        start = stop
