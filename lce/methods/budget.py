"""`Budget`: how much of a text a query attends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from torch import Tensor

from lce.errors import UsageError
from lce.methods.base import resolved
from lce.methods.knobs import Knobs, fill_in, knob
from lce.methods.top_p import top_p_knob


@dataclass(frozen=True)
class Budget(Knobs):
    """How much a query attends, in tokens: `tokens` in all, among them the first `sinks` and the last `local` ones.

    With `growth` the budget grows with the text: from index `grows_from` on, W, the query i attends `tokens` times
    `sqrt(i / W)` or `i / W` tokens, at most `grows_to`. The Sparse Frontier (Nawrot et al., 2025, arXiv:2504.17768)
    finds that fixed budgets lose with length. With `top_p` a query takes only as many of its chunks as reach that share
    of the attention to the chunks before its own, as the selector estimates it.
    """

    tokens: int | None = knob(None, "tokens that a query attends; none is half of the window", least=1)
    sinks: int | None = knob(None, "first tokens, always attended, in whole pages; none is a page", least=0)
    local: int | None = knob(None, "last tokens before the own page, in whole pages; none is a page", least=0)
    growth: Literal["sqrt", "linear"] | None = knob(None, "how the budget grows with the text; none is not at all")
    grows_from: int | None = knob(None, "with growth: index from which the budget grows; none is the window", least=1)
    grows_to: int | None = knob(None, "with growth: largest budget in tokens; none is the window", least=1)
    top_p: float | None = top_p_knob()

    def fitted(self, label: str, window: int) -> Self:
        """Return this budget with the knobs of its growth filled in. Raises `UsageError` for knobs that cannot work."""
        if self.growth is None:
            for name in ("grows_from", "grows_to"):
                if getattr(self, name) is not None:
                    means = f"budget.{name} is a knob of budget.growth=sqrt and linear alone"
                    raise UsageError(f"{label}: {means}, and budget.growth is None; drop budget.{name}")
            return fill_in(self, label, "budget.")
        tokens = resolved(self.tokens)
        made = fill_in(self, label, "budget.", grows_from=window, grows_to=max(window, tokens))
        if resolved(made.grows_to) < tokens:
            raise UsageError(f"{label}: budget.grows_to is {made.grows_to}; expected budget, {tokens}, or more")
        return made

    @property
    def most(self) -> int:
        """The largest number of tokens that a query attends."""
        return resolved(self.tokens if self.growth is None else self.grows_to)

    def at(self, i: Tensor) -> Tensor:
        """Return how many tokens queries `i [T]` attend with `growth`."""
        ratio = i.double() / resolved(self.grows_from)
        ratio = (ratio.sqrt() if self.growth == "sqrt" else ratio).clamp(min=1)
        return (resolved(self.tokens) * ratio).long()
