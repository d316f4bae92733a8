"""`Handover`: one method's attention while a prompt is prefilled, another method's while tokens are generated."""

from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from lce.attention import merge
from lce.cache.layer import LayerCache
from lce.errors import UsageError
from lce.methods.attending import attend_spans, placed_parts, scaled
from lce.methods.base import ATTENTION, Method, Promise
from lce.methods.knobs import settings
from lce.methods.observed import Wrapped
from lce.methods.step import ModelFacts, Step
from lce.methods.turned_keys import TurnedKeys

BETWEEN = " --prefill-method "  # between the names of both methods, as a command line has them
PREFILL = "prefill_method."  # begins the names of the knobs of the method of prefill


@dataclass(frozen=True)
class Handover(Wrapped, promises={"by_head": ATTENTION}):
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
        return settings(self.inner) | {f"{PREFILL}{name}": value for name, value in settings(self.prefill).items()}

    def for_model(self, model: ModelFacts) -> Self:
        return replace(self, inner=self.inner.for_model(model), prefill=self.prefill.for_model(model))

    def resolve(self, window: int) -> Self:
        made = replace(self, inner=self.inner.resolve(window), prefill=self.prefill.resolve(window))
        if made.prefill != made.inner and not made.prefill.promised("plain"):
            raise UsageError(
                f"prefill_method is {made.prefill.label}, which chooses keys or keeps a state of its own; "
                "expected full, dca, rerope, self_extend, streaming, lm_infinite without top_k, or "
                "the method of decode itself"
            )
        if made.prefill != made.inner and not made.inner.promised("kept"):
            raise UsageError(
                f"{made.inner.label} keeps what its own attention to a prompt finds, so no prefill_method can read for "
                "it; leave prefill_method out, or take another method"
            )
        return made

    @property
    def couples_heads(self) -> str | None:
        return self.inner.couples_heads or self.prefill.couples_heads

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        limits = [method.limit(window, sliding_window) for method in (self.inner, self.prefill)]
        return min((limit for limit in limits if limit is not None), default=None)

    def promised(self, what: Promise) -> bool:
        """Return whether `inner` promises `what`; not `counted`, because prefill is not counted."""
        return what != "counted" and super().promised(what)

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        if step.decoding or self.prefill == self.inner:
            return self.inner.attend(q, cache, step)
        self.inner.keep_queries(q, cache, step)
        own = step.once("prefill step", lambda: replace(step, memo={}))
        q, found = scaled(self.prefill, q, own), []
        for placed in placed_parts(self.prefill, q, cache, own):
            at = None if placed.part.exact else self.prefill.key_positions
            turned = TurnedKeys(self.inner.key_positions, at, cache, own)
            found.append(attend_spans(q, placed, turned, own))  # type: ignore[arg-type]
        return merge(found)
