"""Methods that wrap a method to observe which keys are chosen: for traces, the pages of `lce inspect`, and evaluation.

`Observed` runs any method unchanged. For each block and layer an `Observer` receives an `Observation`: the chunks or
tokens that queries chose, with the cache of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Protocol, Self

import torch
from torch import Tensor

from lce.cache.layer import LayerCache
from lce.methods import registry
from lce.methods.base import ATTENTION, Method, Promise, Promises
from lce.methods.costs import PaperFigure, QueryBlock, paper_figures
from lce.methods.registry import UserFile
from lce.methods.step import ModelFacts, Step

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
