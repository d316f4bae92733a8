"""`Handover`: one method's attention while a prompt is prefilled, another method's while tokens are generated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from lce.attention import Turn, merge, rotate
from lce.cache.layer import LayerCache
from lce.cache.layout import CacheLayout
from lce.errors import UsageError
from lce.methods.attending import attend_spans, declared, placed_parts, scaled
from lce.methods.base import Method
from lce.methods.observed import Wrapped
from lce.methods.parts import CHOSEN, Part
from lce.methods.step import ModelFacts, Step

BETWEEN = " --prefill-method "  # between the names of both methods, as a command line has them
PREFILL = "prefill_method."  # begins the names of the knobs of the method of prefill
MOST_LAYERS = 1024  # layers in which `resolve` looks for parts of chosen keys


@dataclass(frozen=True)
class Handover(Wrapped):
    """The attention of `prefill` for the tokens of prompts, and of `inner` for generated tokens, over one cache.

    LongHeads (Lu et al., 2024) reports its best results at 16k tokens with full attention while encoding. A decode
    step, `Step.decoding`, is a pass in which a generation appends a token that it sampled. All other passes are
    prefill, also those of one token. The last token of a prompt is prefilled. The last token of an answer is in no
    decode step; it is prefilled with the next prompt.

    The cache and the states are those of `inner`, which keeps them in every pass. In prefill, keys are turned from
    the positions at which `inner` caches them to the positions of `prefill`; the copies are dropped after use. So
    `prefill` must be a method of spans that keeps nothing of its own except recent keys.
    """

    prefill: Method

    @property
    def label(self) -> str:
        """Both methods, as error messages and context files name them."""
        return f"{self.inner.label}{BETWEEN}{self.prefill.label}"

    @property
    def settings(self) -> dict[str, Any]:
        """The knobs of both methods by name, those of `prefill` with the beginning `PREFILL`."""
        return {
            f"{beginning}{field.name}": getattr(method, field.name)
            for beginning, method in (("", self.inner), (PREFILL, self.prefill))
            for field in fields(method)
        }

    def for_model(self, model: ModelFacts) -> Self:
        return replace(self, inner=self.inner.for_model(model), prefill=self.prefill.for_model(model))

    def resolve(self, window: int) -> Self:
        made = replace(self, inner=self.inner.resolve(window), prefill=self.prefill.resolve(window))
        if made.prefill != made.inner and not _is_spans(made.prefill):
            raise UsageError(
                f"prefill_method is {made.prefill.label}, which chooses keys or keeps a state of its own; "
                "expected full, dca, rerope, self_extend, streaming, lm_infinite without top_k, or "
                "the method of decode itself"
            )
        if made.prefill != made.inner and made.inner.keeps_while_attending:
            raise UsageError(
                f"{made.inner.label} keeps what its own attention to a prompt finds, so no prefill_method can read for "
                "it; leave prefill_method out, or take another method"
            )
        return made

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        """Return the smaller of both methods' limits."""
        limits = [method.limit(window, sliding_window) for method in (self.inner, self.prefill)]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def counted(self) -> bool:
        """Return False: the cost is that of decode, and prefill is not counted."""
        return False

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        if step.decoding or self.prefill == self.inner:
            return self.inner.attend(q, cache, step)
        self.inner.keep_queries(q, cache, step)
        own = step.once("prefill step", lambda: replace(step, memo={}))
        q, found = scaled(self.prefill, q, own), []
        for placed in placed_parts(self.prefill, q, cache, own):
            turned = TurnedKeys(self, placed.part, cache, own)
            found.append(attend_spans(q, placed, turned, own))  # type: ignore[arg-type]
        return merge(found)


@dataclass(frozen=True)
class TurnedKeys:
    """A layer's cache as `attend_spans` reads it, with keys turned to where the method of prefill sees them."""

    method: Handover
    part: Part
    cache: LayerCache
    step: Step
    state = ()  # recent keys are turned like all others

    @property
    def layout(self) -> CacheLayout:
        return self.cache.layout

    def segments(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        return self.cache.segments(start, stop)

    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return tokens `start..stop-1`: keys at the positions of the part, and values, `[G, stop - start, D]`."""
        k, v = self.cache.span(start, stop)
        turn = self.step.once(f"turn {self.part.exact} {start} {stop}", lambda: self._turn(start, stop, k))
        return (k if turn is None else rotate(k, turn)), v

    stored = span

    def _turn(self, start: int, stop: int, like: Tensor) -> Turn | None:
        """Return the rotation from the cached positions of tokens `start..stop-1` to the part's; None: no rotation.

        Rotated keys carry YaRN's factor, and unrotated keys do not.
        """
        i = torch.arange(start, stop, device=like.device)
        held = self.method.inner.key_positions(i)
        seen = i if self.part.exact else self.method.prefill.key_positions(i)
        if held is seen or (held is not None and seen is not None and torch.equal(held, seen)):
            return None
        zero, rope = torch.zeros_like(i), self.step.rope
        turn = rope.turn((zero if seen is None else seen) - (zero if held is None else held), torch.float64)
        factor = rope.scale ** ((seen is not None) - (held is not None) - 1)
        return Turn(*((x * factor).to(like.dtype) for x in turn))


def _is_spans(method: Method) -> bool:
    """Return whether a resolved method is its parts, all of spans, and keeps at most recent keys."""
    names = "keep", "keep_queries", "attend", "attend_spans"
    if not method.declares or any(getattr(type(method), name) is not getattr(Method, name) for name in names):
        return False
    layers = {method.layer_kind(layer): layer for layer in range(MOST_LAYERS)}.values()
    parts = (part for layer in layers for part in declared(method, torch.zeros(1, dtype=torch.int64), layer, 1, None))
    return all(part.keys != CHOSEN for part in parts)
