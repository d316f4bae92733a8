"""Dual Chunk Attention: every key, at positions that repeat from chunk to chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from lce.cache.layout import AccessPattern
from lce.errors import ModelError, UsageError, shown
from lce.methods.base import Example, Method
from lce.methods.parts import LayerFacts, Part
from lce.methods.registry import register
from lce.methods.step import ModelFacts


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
        """Read Qwen's `dual_chunk_attention_config`: its chunk holds `local_size` positions for the previous chunk.

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
    def access(self) -> AccessPattern:
        return AccessPattern(self.size, local=2 * self.size)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return indices % self.size

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterator[Part]:
        assert self.far is not None, "resolved before use"
        own, offset = i // self.size * self.size, i % self.size
        yield Part(keys=(own, i + 1), query_at=offset)
        if self.parts == "all":
            previous = own - self.size
            yield Part(keys=(previous, own), query_at=(self.size + offset).clamp(max=self.far))
            yield Part(keys=(0, previous), query_at=self.far)
        elif self.parts == "intra+inter":
            yield Part(keys=(0, own), query_at=self.far)

    def query_scale(self, i: Tensor, window: int) -> Tensor | None:
        if not self.temperature:
            return None
        factor: Tensor = 1 + 0.05 * ((i.to(torch.float64) + 1) / window).log()
        return factor.clamp(min=1.0).square()
