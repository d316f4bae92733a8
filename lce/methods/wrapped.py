"""A method inside another one, which may observe or change the inner method's output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Self

from lce.methods.base import Method
from lce.methods.step import ModelFacts


@dataclass(frozen=True)
class Wrapped(Method):
    """A method that does what `inner` does. Derive a class and override `attend` to add to that.

    Decode steps run one by one, as prefill does, so that `attend` is called for every token.

    Example: `lce.load(model, Watched(lce.methods.make("longheads")))`, where `Watched` derives from this.
    """

    inner: Method

    def for_model(self, model: ModelFacts) -> Self:
        return replace(self, inner=self.inner.for_model(model))

    def resolve(self, window: int) -> Self:
        return replace(self, inner=self.inner.resolve(window))


for _name in (
    "attend", "attend_chosen", "attend_spans", "choice_cost", "cost", "could_keep", "keep", "keep_queries",
    "key_positions", "layer_kind", "limit", "paper_figures", "parts_of", "query_scale", "state",
):  # fmt: skip
    setattr(Wrapped, _name, lambda self, *args, name=_name: getattr(self.inner, name)(*args))
for _name in ("block", "choices", "counted", "declares", "label", "n_recent", "notes_choices", "access", "unrotated"):
    setattr(Wrapped, _name, property(attrgetter(f"inner.{_name}")))
