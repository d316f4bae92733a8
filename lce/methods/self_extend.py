"""Self-Extend: each query attends every key, near keys at their own distance, far keys at their group's distance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from lce.methods.base import Example, LocalMethod, knob
from lce.methods.parts import LayerFacts, Part
from lce.methods.registry import register


@register("self_extend")
@dataclass(frozen=True)
class SelfExtend(LocalMethod):
    """Self-Extend (Jin et al., 2024, "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning").

    A query attends every earlier key: keys nearer than `local` at their true distance, farther keys at the distance
    `i // group - j // group + local - local // group` (Eq. 3-4, with the paper's floors), which grows `group` times
    more slowly. A window of W positions then holds `(W - local) · group + local` tokens. A longer text needs a larger
    `group`.

    Example: `local=4, group=2`; query 9 sees keys 9..6 at 0..3, then 5, 4 at 4 and 3, 2 at 5.

    Keys are cached at their group's position. The last `local` keys are also stored at their own positions.
    Time: O(N · D) per token and head.
    """

    local: int | None = knob(None, "last tokens, at exact distances; none is a quarter of the window", least=1)
    group: int = knob(8, "tokens that share a position farther away", least=1)
    example: ClassVar = Example({"local": 4, "group": 3})

    def resolve(self, window: int) -> Self:
        return self.filled(local=max(1, window // 4))

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        """Return the length for which the farthest distance, `i // group + local - local // group`, is `window - 1`."""
        grouped = window - self.n_local + self.n_local // self.group
        return max(window, grouped * self.group)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return indices // self.group

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterator[Part]:
        local, group = self.n_local, self.group
        yield Part(keys=(i + 1 - local, i + 1), query_at=i, exact=True)
        yield Part(keys=(0, i + 1 - local), query_at=i // group + local - local // group)
