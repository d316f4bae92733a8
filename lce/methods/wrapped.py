"""Methods that wrap other methods: `Handover` and `Observed`.

`Handover` has one method's attention while a prompt is prefilled, another's while tokens are generated. `Observed` runs
any method unchanged, for traces, the pages of `lce inspect`, and evaluation: for each block and layer an `Observer`
receives an `Observation`: the chunks or tokens that queries chose, with the cache of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from lce.attention import merge
from lce.cache.layer import LayerCache
from lce.errors import UsageError
from lce.methods import registry
from lce.methods.attending import attend_spans, placed_parts, scaled
from lce.methods.base import ATTENTION, Method, Promise, Promises
from lce.methods.costs import PaperFigure, QueryBlock, paper_figures
from lce.methods.knobs import settings
from lce.methods.registry import UserFile
from lce.methods.step import ModelFacts, Step
from lce.methods.turned_keys import TurnedKeys

BETWEEN = " --prefill-method "  # between the names of both methods, as a command line has them
PREFILL = "prefill_method."  # begins the names of the knobs of the method of prefill
AS_INNER: Promises = {"counted": (), "noted": (), "kept": (), "by_head": ATTENTION}  # what a wrapped method may promise


@dataclass(frozen=True)
class Wrapped(Method, promises=AS_INNER):
    """A method that behaves as the method `inner`. A derived class overrides `attend` to observe or change outputs.

    Decode steps are not recorded as CUDA graphs, so that `attend` is called for every token.

    Example: `lce.load(model, Watched(lce.methods.make("longheads")))`, where `Watched` derives from `Wrapped`.
    """

    inner: Method

    def for_model(self, model: ModelFacts) -> Self:
        return replace(self, inner=self.inner.for_model(model))

    def resolve(self, window: int) -> Self:
        return replace(self, inner=self.inner.resolve(window))

    def promised(self, what: Promise) -> bool:
        return super().promised(what) and self.inner.promised(what)

    @property
    def couples_heads(self) -> str | None:
        return self.inner.couples_heads or super().couples_heads


_HOOKS = (
    "attend attend_part choice_cost could_keep keep keep_queries key_positions "
    "layer_kind limit parts_of query_scale state"
).split()
for _name in _HOOKS:
    setattr(Wrapped, _name, lambda self, *args, name=_name: getattr(self.inner, name)(*args))
for _name in ("access", "block", "choices", "label"):
    setattr(Wrapped, _name, property(attrgetter(f"inner.{_name}")))


@paper_figures.register(Wrapped)
def _(method: Wrapped, block: QueryBlock) -> Sequence[PaperFigure]:
    return paper_figures(method.inner, block)


@registry.user_file.register(Wrapped)
def _(method: Wrapped) -> UserFile | None:
    return registry.user_file(method.inner)


@dataclass(frozen=True)
class Observation:
    """The chunks or tokens that a block of queries chose in a layer.

    `rows [n]` are the observed queries, counted from 0 in the block. `chosen [H, T, K]` are the chunks or
    tokens that all T queries chose, -1 for none. `scores [C, n, M]` are the observed queries' scores of M chunks or
    tokens, -inf where a query cannot choose; C < H if heads choose together. Both are None if the method reports none.
    """

    method: Method
    q: Tensor  # [H, T, D], unrotated
    cache: LayerCache
    step: Step
    rows: Tensor
    chosen: Tensor | None
    scores: Tensor | None

    @property
    def layer(self) -> int:
        return self.cache.index

    @property
    def positions(self) -> Tensor:
        """The indices of the observed queries in the text, `[n]`."""
        return self.rows + self.step.start

    @property
    def together(self) -> bool:
        """Whether all queries of the block chose together, by one row of scores."""
        return self.scores is not None and self.scores.shape[1] > 1 and self.scores.stride(1) == 0

    @property
    def picked(self) -> Tensor | None:
        """The chunks or tokens that the observed queries chose, `[H, n, K]`."""
        return None if self.chosen is None else self.chosen[:, self.rows]


class Observer(Protocol):
    """The interface of an observer: what `Observed` calls in each layer."""

    def rows(self, step: Step) -> Tensor | None:
        """Return which queries of a block to observe, counted from the block's first query; None: all."""

    def observe(self, seen: Observation, out: Tensor) -> Tensor:
        """Observe a layer. Return the layer's output: the method's `out [H, T, D]`, or other values in its place."""


@dataclass(frozen=True)
class Observed(Wrapped, promises={"by_head": ATTENTION}):
    """A method that runs unchanged, in layers with a sliding window too, while an observer sees which keys are chosen.

    Example: `lce.load(model, Observed(lce.methods.make("longheads"), observer))`.
    """

    observer: Observer = field(repr=False, compare=False)

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        some = self.observer.rows(step)
        rows = torch.arange(q.shape[1], device=q.device) if some is None else some.to(q.device)
        chosen: dict[int, Tensor] = {}
        scores: list[Tensor] = []

        def note_scores(part: Step, layer: int, found: Tensor) -> None:
            first, stop = part.start - step.start, part.stop - step.start
            here = rows[(rows >= first) & (rows < stop)] - first
            together = found.stride(1) == 0  # one row of scores for all queries
            scores.append(found[:, :1].expand(-1, len(here), -1) if together else found[:, here])

        noted = replace(step, note=chosen.__setitem__, note_scores=note_scores if len(rows) else None)
        out = self.inner.attend(q, cache, noted)
        found = torch.cat(scores, dim=1) if len(scores) > 1 else scores[0] if scores else None
        seen = Observation(self.inner, q, cache, step, rows, chosen.get(cache.index), found)
        return self.observer.observe(seen, out)


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
        """The knobs of both methods by name, those of `prefill` after the prefix `PREFILL`."""
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
        """Return whether `inner` promises `what`; False for `counted`, because prefill is not counted."""
        return what != "counted" and super().promised(what)

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        if step.decoding or self.prefill == self.inner:
            return self.inner.attend(q, cache, step)
        self.inner.keep_queries(q, cache, step)
        own = step.once("prefill step", lambda: replace(step, memo={}))
        q, found = scaled(self.prefill, q, own), []
        for placed in placed_parts(self.prefill, q, cache, own):
            at = None if placed.part.exact else self.prefill.key_positions
            turned = TurnedKeys(self.inner, at, cache, own)
            found.append(attend_spans(q, placed, turned, own))  # type: ignore[arg-type]
        return merge(found)
