"""Dual Chunk Attention: every key, at positions that repeat from chunk to chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from lce.attention import Turn, merge, rotate
from lce.cache.kv import LayerCache
from lce.cache.layout import Reach
from lce.errors import ModelError, UsageError
from lce.methods.base import Method
from lce.methods.parts import attend_span
from lce.methods.registry import register
from lce.methods.step import Step, Surroundings


@register("dca")
@dataclass(frozen=True)
class DualChunk(Method):
    """Dual Chunk Attention (An et al., 2024, "Training-Free Long-Context Scaling of Large Language Models").

    With `s = chunk_size`, a key sits at `j mod s` (Eq. 2). The query sits at `i mod s` for its own chunk (Eq. 3-4), at
    `min(s + i mod s, W - 1)` for the previous one (Eq. 6-7), so that neighbours keep their true distance across the
    border, and at `W - 1` for all older ones (Eq. 5). No distance exceeds `W - 1`. The three are dense parts of one
    softmax (Eq. 8).

    Example: `s=6, W=10`; query 11 is at 5 for keys 6..11 (at 0..5), and at 9 for keys 0..5.

    `temperature` multiplies the logits of query i by the square of `max(1, 1 + 0.05 ln((i + 1) / W))`, as the released
    code does and the paper's results do not.

    Keys are cached at `j mod s` and are not rotated again. Time: O(N · D) a token and head, that of full attention.
    """

    chunk_size: int | None = None
    temperature: bool = False

    def for_model(self, model: Surroundings) -> Self:
        """Qwen's `dual_chunk_attention_config`: its chunk holds `local_size` positions kept for the previous chunk."""
        config = model.config.get("dual_chunk_attention_config")
        if config is None or self.chunk_size is not None:
            return self
        size, kept = (config.get(key) for key in ("chunk_size", "local_size"))
        if not isinstance(size, int) or not isinstance(kept, int) or not 0 <= kept < size:
            raise ModelError(
                f"{model.folder}: dual_chunk_attention_config is {config!r}; expected a chunk_size and a smaller "
                "local_size; give -o chunk_size=N"
            )
        return replace(self, chunk_size=size - kept)

    def resolve(self, window: int) -> Self:
        made = replace(self, chunk_size=max(1, 3 * window // 4) if self.chunk_size is None else self.chunk_size)
        made.expect(chunk_size=1)
        if made.size > window:
            raise UsageError(f"{self.name}: chunk_size is {made.chunk_size}; expected at most the window, {window}")
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
    def reach(self) -> Reach:
        return Reach(self.size, local=2 * self.size)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return indices % self.size

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        size = self.size
        if self.temperature:
            q = q * step.once("temperature", lambda: temperature(step.positions(q.device), step.window).to(q.dtype))
        own, previous, older = (rotate(q, turn) for turn in step.once("turns", lambda: self.turns(q, step)))
        outs = []
        for start, stop in runs(step, size):
            here = slice(start - step.start, stop - step.start)
            border = start // size * size
            parts = [attend_span(own[:, here], cache, step, causal=True, first=border, stop=stop)]
            if border:
                parts.append(
                    attend_span(previous[:, here], cache, step, causal=False, first=border - size, stop=border)
                )
            if border > size:
                parts.append(attend_span(older[:, here], cache, step, causal=False, stop=border - size))
            outs.append(merge(parts))
        return torch.cat(outs, dim=1)

    def turns(self, q: Tensor, step: Step) -> tuple[Turn, Turn, Turn]:
        """What turns the queries for their own chunk, for the previous one and for older ones."""
        offsets = step.positions(q.device) % self.size
        last = step.window - 1
        previous, older = (offsets + self.size).clamp(max=last), torch.full_like(offsets, last)
        return step.rope.turn(offsets, q.dtype), step.rope.turn(previous, q.dtype), step.rope.turn(older, q.dtype)


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
