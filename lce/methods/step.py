"""What a method is given: the pass it takes part in, and the checkpoint it was loaded with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lce.attention import Attention, Turn
from lce.models.config import ModelConfig, RopeConfig
from lce.models.rope import Rope
from lce.weights.source import Source

Note = Callable[[int, Tensor], None]  # a layer, and the chunks that it chose `[H, T, K]`
NoteScores = Callable[[int, Tensor], None]  # a layer, and its scores of all choices `[C, T, M]`, -inf for none


@dataclass(frozen=True)
class Step:
    """One pass of a block through the model: what is the same in every layer.

    Example: the second block of a prefill by 512 has `start=512, stop=1024`; the decode step after 1,500 tokens has
    `start=1500, stop=1501`. `memo` lasts for the pass: `once` computes in the first layer what the other layers
    use again. Each device that has some of the layers has a memo of its own, so that what is kept there is on that
    device; `all_devices` is one memo for all. A method calls `note`, where there is one, with each layer's choice, and
    before it `note_scores` with what it chose by; of the queries `noted` alone if there are some, counted from the
    block's first, ascending.
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
    all_devices: dict[str, Tensor | None] = field(default_factory=dict)
    note_scores: NoteScores | None = None
    noted: Tensor | None = None

    @property
    def at(self) -> Tensor | None:
        """The index of a token of which only the device knows it: see `DeviceStep`."""
        return None

    @property
    def n_noted(self) -> int:
        """The queries whose scores `note_scores` is given."""
        return self.stop - self.start if self.noted is None else len(self.noted)

    def part(self, start: int, stop: int) -> Step:
        """Return the step of some of the block's queries, `start..stop-1` counted from its first."""
        return replace(self, start=self.start + start, stop=self.start + stop, memo={}, all_devices={})

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return `make()`, called once a pass, device and `name`; later calls return the first result."""
        memo = self.memo
        if name not in memo:
            memo[name] = make()
        return memo[name]

    def once_on_all(self, name: str, make: Callable[[], Tensor | None], device: torch.device) -> Tensor | None:
        """Do as `once`, where layers on other devices need what the first layer made: they get a copy."""

        def found() -> Tensor | None:
            if name not in self.all_devices:
                self.all_devices[name] = make()
            made = self.all_devices[name]
            return None if made is None else made.to(device)

        result: Tensor | None = self.once(name, found)
        return result

    def positions(self, device: torch.device) -> Tensor:
        """Return the indices of the block's tokens, `[T]`."""
        return torch.arange(self.start, self.stop, device=device)

    def key_turn(self, key_positions: Callable[[Tensor], Tensor | None], like: Tensor) -> Turn | None:
        """Return what rotates the block's vectors to where a method caches its keys; None where keys stay unrotated."""

        def make() -> Turn | None:
            indices = self.positions(like.device)
            positions = key_positions(indices)
            if positions is indices:
                return self.true_turn(like)
            return None if positions is None else self.rope.turn(positions, like.dtype)

        turn: Turn | None = self.once("key turn", make)
        return turn

    def true_turn(self, like: Tensor) -> Turn:
        """Return what rotates the block's vectors to their absolute positions, `[T, D/2]`."""
        turn: Turn = self.once("true turn", lambda: self.rope.turn(self.positions(like.device), like.dtype))
        return turn

    def far_turn(self, distance: int | Tensor, like: Tensor) -> Turn:
        """Return what rotates queries that see unrotated keys, all of them at one distance.

        `[1, D/2]`, or `[T, D/2]` for a distance a query. The turn carries YaRN's factor twice: for the query, and for
        the key, which was cached without it.
        """

        def make() -> Turn:
            at = distance if isinstance(distance, Tensor) else torch.full((1,), distance, device=like.device)
            cos, sin = self.rope.turn(at, torch.float64)
            return Turn((cos * self.rope.scale).to(like.dtype), (sin * self.rope.scale).to(like.dtype))

        turn: Turn = make() if isinstance(distance, Tensor) else self.once(f"far turn {distance}", make)
        return turn


class OnDevice(LookupError):
    """A number of a `DeviceStep` was asked for that only the device knows: such a step runs as any other."""


class DeviceStep(Step):
    """The decode step of a token whose index is read on the device, `at [1]` int64: it can be recorded and run again.

    No number and no shape in it depends on the index; the host knows only that the text has at most `bound` tokens. So
    `start` and `stop` raise `OnDevice`. `positions` and the turns are those of the index.
    """

    bound: int

    def __init__(
        self, at: Tensor, bound: int, rope: Rope, attention: Attention, window: int, n_kv_heads: int,
        sliding_window: int | None = None,
    ) -> None:  # fmt: skip
        values = {
            "_at": at, "bound": bound, "rope": rope, "attention": attention, "window": window, "n_kv_heads": n_kv_heads,
            "sliding_window": sliding_window, "note": None, "memo": {}, "all_devices": {}, "note_scores": None,
            "noted": None,
        }  # fmt: skip
        for name, value in values.items():  # as a frozen dataclass sets its own
            object.__setattr__(self, name, value)

    @property
    def at(self) -> Tensor:
        at: Tensor = vars(self)["_at"]
        return at

    @property
    def start(self) -> int:
        raise OnDevice("start")

    @property
    def stop(self) -> int:
        raise OnDevice("stop")

    def part(self, start: int, stop: int) -> Step:
        raise OnDevice("part")

    def positions(self, device: torch.device) -> Tensor:
        return self.at


@dataclass(frozen=True)
class ModelFacts:
    """A model as a method sees it before anything is attended.

    `config` has the sizes and, as `published`, the fields of config.json. `source` has the files beside the weights.
    `window` and `rope` are those that the engine uses, the user's options included.
    """

    source: Source
    config: ModelConfig
    window: int
    rope: RopeConfig
    plan_only: bool = False  # nothing will be attended: a method that learns from a file is taken as if it had it
