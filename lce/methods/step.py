"""What a method is given: the pass it takes part in, and the checkpoint it was loaded with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lce.attention.attention import Attention
from lce.models.rope import Rope, Table

Note = Callable[[int, Tensor], None]  # a layer, and the chunks that it chose `[H, T, K]`


@dataclass(frozen=True)
class Step:
    """One pass of a block through the model: what is the same in every layer.

    Example: the second block of a prefill by 512 has `start=512, stop=1024`; the decode step after 1,500 tokens has
    `start=1500, stop=1501`. `memo` lasts for the pass: `once` computes a table in the first layer, the other layers
    use it again. A method calls `note`, where there is one, with each layer's choice.
    """

    start: int
    stop: int
    rope: Rope
    attention: Attention
    window: int
    n_kv_heads: int
    sliding_window: int | None = None
    note: Note | None = None
    memo: dict[str, Any] = field(default_factory=dict)

    def part(self, start: int, stop: int) -> Step:
        """The step of some of the block's queries, `start..stop-1` counted from its first."""
        return replace(self, start=self.start + start, stop=self.start + stop, memo={})

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """`make()`, called once a pass and `name`; later calls return the first result."""
        if name not in self.memo:
            self.memo[name] = make()
        return self.memo[name]

    def positions(self, device: torch.device) -> Tensor:
        """The indices of the block's tokens, `[T]`."""
        return torch.arange(self.start, self.stop, device=device)

    def true_places(self, like: Tensor) -> Table:
        """The cosines and sines that rotate the block's vectors to their absolute positions."""
        table: Table = self.once("true places", lambda: self.rope.table(self.positions(like.device), like.dtype))
        return table

    def distant(self, distance: int, like: Tensor) -> Table:
        """The cosines and sines for queries that see unrotated keys, all at one distance.

        They carry YaRN's factor twice, for the query and for the key, which was cached without it.
        """

        def make() -> Table:
            cos, sin = self.rope.table(torch.full((1,), distance, device=like.device), torch.float64)
            return (cos * self.rope.scale).to(like.dtype), (sin * self.rope.scale).to(like.dtype)

        table: Table = self.once(f"distance {distance}", make)
        return table


@dataclass(frozen=True)
class Surroundings:
    """A checkpoint as a method sees it: the values of its config.json, its folder, and its weights' fingerprint."""

    config: Mapping[str, Any]
    folder: Path
    fingerprint: Callable[[], str]
