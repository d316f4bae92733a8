"""The facts that a method gets: about the current pass (`Step`), and about the model (`ModelFacts`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeGuard, TypeVar

import torch
from torch import Tensor

from lce.attention import Attention, Turn
from lce.models.config import ModelConfig, RopeConfig
from lce.models.rope import Rope
from lce.weights.source import Source

Note = Callable[[int, Tensor], None]  # takes a layer's index, and the chunks or tokens `[H, T, K]` that queries chose
T = TypeVar("T")
NoteScores = Callable[["Step", int, Tensor], None]  # takes the queries' step, a layer's index, scores `[C, T, M]`


@dataclass(frozen=True, kw_only=True)
class PassFacts:
    """The facts about a pass of a block through the model that are the same in every layer, and that all passes have.

    `memo` keeps for the pass what `once` computes in the first layer and other layers use again. Each device has its
    own memo; `all_devices` is one memo for all devices. In each layer a method calls `note`, if given, with the chunks
    or tokens that queries chose, and before that `note_scores`, if given, with the scores of all candidates, -inf for
    those that a query cannot choose: once for the whole block, or once for each `part` of the block.
    """

    rope: Rope
    attention: Attention
    window: int
    n_kv_heads: int
    sliding_window: int | None = None
    note: Note | None = None
    note_scores: NoteScores | None = None
    decoding: bool = False  # whether a generation appends a token that it sampled
    memo: dict[str, Any] = field(default_factory=dict)
    all_devices: dict[str, Any] = field(default_factory=dict)

    def positions(self, device: torch.device) -> Tensor:
        """Return the indices of the block's tokens, `[T]`."""
        raise NotImplementedError

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return `make()`, called once for each pass, device and `name`; later calls return the first result."""
        memo: dict[str, T] = self.memo
        if name not in memo:
            memo[name] = make()
        return memo[name]

    def key_turn(self, key_positions: Callable[[Tensor], Tensor | None], like: Tensor) -> Turn | None:
        """Return the rotation of the block's keys to the positions where they are cached; None: keys stay unrotated."""

        def make() -> Turn | None:
            indices = self.positions(like.device)
            positions = key_positions(indices)
            if positions is indices:
                return self.true_turn(like)
            return None if positions is None else self.rope.turn(positions, like.dtype)

        return self.once("key turn", make)

    def true_turn(self, like: Tensor) -> Turn:
        """Return the rotation of the block's queries or keys to their absolute positions, `[T, D/2]`."""

        def make() -> Turn:
            return self.rope.turn(self.rope.positions(self.positions(like.device)), like.dtype)

        return self.once("true turn", make)

    def far_turn(self, distance: int | Tensor, like: Tensor) -> Turn:
        """Return the rotation of queries that see unrotated keys at `distance`: `[1, D/2]`, or `[T, D/2]` for a tensor.

        The rotation includes YaRN's factor twice: for the query, and for the key, which was cached without it.
        """

        def make() -> Turn:
            at = distance if isinstance(distance, Tensor) else torch.full((1,), distance, device=like.device)
            cos, sin = self.rope.turn(at, torch.float64)
            return Turn((cos * self.rope.scale).to(like.dtype), (sin * self.rope.scale).to(like.dtype))

        return make() if isinstance(distance, Tensor) else self.once(f"far turn {distance}", make)


@dataclass(frozen=True)
class Step(PassFacts):
    """The facts about a pass of a block of tokens `start..stop-1`, which the host knows.

    Example: the second block of a prefill by 512 has `start=512, stop=1024`; the decode step after 1,500 tokens has
    `start=1500, stop=1501`. Indices count rows of the cache; a token's position follows by `Rope.positions`.
    """

    start: int
    stop: int
    at: ClassVar[Tensor | None] = None  # as `DeviceStep.at`, for methods that take both

    def part(self, start: int, stop: int) -> Step:
        """Return the step of the block's queries `start..stop-1`, counted from its first."""
        return replace(self, start=self.start + start, stop=self.start + stop, memo={}, all_devices={})

    def positions(self, device: torch.device) -> Tensor:
        return torch.arange(self.start, self.stop, device=device)


@dataclass(frozen=True)
class DeviceStep(PassFacts):
    """The facts about a decode step recorded once, as a CUDA graph, and replayed: the device has the token's index.

    `at [1]`, int64, is the index. No number and no shape on the host depends on the index; the host knows only that the
    text has at most `bound` tokens, and whether the token `completes` a chunk, which is another recording. A hook that
    asks for `start` or `stop` fails, and the steps run unrecorded.
    """

    at: Tensor
    bound: int
    completes: bool = False

    def positions(self, device: torch.device) -> Tensor:
        return self.at


def is_recorded(step: PassFacts) -> TypeGuard[DeviceStep]:
    """Return whether a hook, which is written for a `Step`, is given a `DeviceStep`."""
    return isinstance(step, DeviceStep)


class OnDevice(LookupError):
    """Raised by a hook that cannot run in a recorded step. The step then runs unrecorded."""


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model that a method sees when the model is loaded.

    `config` has the sizes and, as `published`, the fields of config.json. `source` has the files beside the weights.
    `window` and `rope` are what the engine uses, with the user's options; `named` has those options that a user gave.
    """

    source: Source
    config: ModelConfig
    window: int
    rope: RopeConfig
    plan_only: bool = False  # whether the model is only planned and never run: files of learned maps may be missing
    named: frozenset[str] = frozenset()
