"""Dual Chunk Attention: each query attends every key, at positions that repeat from chunk to chunk."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from torch import Tensor

from lce.cache.layout import AccessPattern
from lce.errors import UsageError
from lce.methods.base import Example, Method, filled, knob, resolved
from lce.methods.parts import LayerFacts, Part
from lce.methods.registry import register
from lce.methods.step import ModelFacts


@register("dca")
@dataclass(frozen=True)
class DualChunk(Method):
    """Dual Chunk Attention (An et al., 2024, "Training-Free Long-Context Scaling of Large Language Models").

    With `s = chunk_size`, key j is at position `j mod s` (Eq. 2). Query i is at `i mod s` for its own chunk (Eq. 3-4,
    "intra"), at `min(s + i mod s, far)` for the previous chunk (Eq. 6-7, "successive"), so that neighbours keep their
    true distance across the border, and at `far` for all older chunks (Eq. 5, "inter"). `far` is `W - 1`, the largest
    distance in the window. One softmax covers all keys (Eq. 8). For a model that reads past its window, as CodeLlama's
    16k, chunks may be larger than the window if `far` is given: the paper's have 24k tokens, 3/4 of 32k.

    Example: `s=6, W=10`; query 11 is at 5 for keys 6..11 (at 0..5), and at 9 for keys 0..5.

    `parts` gives the paper's ablations (Figure 4): `intra` alone, or `intra+inter`, where queries see all earlier
    chunks from `far`. `temperature` multiplies the logits of query i by `max(1, 1 + 0.05 ln((i + 1) / W))` squared, as
    the released code does; the paper's results do not have this factor.

    Keys are cached at `j mod s` and are not rotated again. Time: O(N · D) per token and head, as for full attention.
    """

    chunk_size: int | None = knob(None, "tokens of a chunk; none is 3/4 of the window", least=1)
    parts: Literal["all", "intra", "intra+inter"] = knob("all", "which of the paper's parts are attended")
    temperature: bool = knob(False, "the factor of the released code, which the paper's results do not have")
    far: int | None = knob(None, "the query's position for chunks before the previous one; none is W - 1")
    example: ClassVar = Example({"chunk_size": 8})
    block = 2048

    def for_model(self, model: ModelFacts) -> Self:
        """Return this method with `chunk_size` and `far` from Qwen's `dual_chunk_attention_config`, if there is one."""
        found = model.config.dual_chunk(model.source.path) if self.chunk_size is None else None
        return self if found is None else filled(self, chunk_size=found[0], far=found[1])

    def resolve(self, window: int) -> Self:
        made = filled(self, chunk_size=max(1, 3 * window // 4), far=window - 1)
        size = resolved(made.chunk_size)
        if size > window and self.far is None:
            raise UsageError(
                f"{self.label}: chunk_size is {size}; expected at most the window, {window}, or "
                f"far={4 * size // 3 - 1} too, if the model reads farther"
            )
        if resolved(made.far) < size - 1:  # a query at a smaller position would be before some keys
            raise UsageError(f"{self.label}: far is {made.far}; expected {size - 1} or more")
        return made

    @property
    def access(self) -> AccessPattern:
        size = resolved(self.chunk_size)
        return AccessPattern(size, local=2 * size)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return indices % resolved(self.chunk_size)

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterator[Part]:
        s, far = resolved(self.chunk_size), resolved(self.far)
        own, offset = i // s * s, i % s
        yield Part(keys=(own, i + 1), query_at=offset)
        if self.parts == "all":
            previous = own - s
            yield Part(keys=(previous, own), query_at=(s + offset).clamp(max=far))
            yield Part(keys=(0, previous), query_at=far)
        elif self.parts == "intra+inter":
            yield Part(keys=(0, own), query_at=far)

    def query_scale(self, i: Tensor, window: int) -> Tensor | None:
        if not self.temperature:
            return None
        return (1 + 0.05 * ((i.double() + 1) / window).log()).clamp(min=1.0).square()
