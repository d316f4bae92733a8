"""`Budget`: how much of a text a query attends; and the fewest chunks whose estimated attention reaches a share p.

Twilight (Lin et al., 2025, "Twilight: Adaptive Attention Sparsity with Hierarchical Top-p Pruning", arXiv:2502.02770)
prunes the tokens that a selector chose to the smallest set whose attention weights add up to p, so that a head with
sharp attention reads less than a head with flat attention. Twilight estimates the weights from keys in 4 bits. Here the
weights are estimated from the method's own scores, so nothing else is read.
"""

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from lce.attention import best_first
from lce.errors import UsageError
from lce.methods.base import resolved
from lce.methods.knobs import Knobs, fill_in, knob

TOP_P = "choose no more than reaches this share of the estimated attention; none is off"  # the knob `top_p`


def enough(log_mass: Tensor, order: Tensor, p: float) -> int:
    """Return how many of the candidates `order [n]`, best first, reach the share p of the mass of all M candidates.

    `log_mass [M]` is the logarithm of each candidate's mass, up to a constant. The result is n if all n stay below p.

    Example: masses 6, 3, 1 in this order and p = 0.8 give 2.
    """
    if p >= 1:
        return len(order)
    shares = log_mass.float().softmax(0)[order]
    return 1 + int((shares.cumsum(0)[:-1] < p).sum())


def prune(chosen: Tensor, scores: Tensor, log_mass: Tensor, forced: Tensor, p: float) -> Tensor:
    """Return the fewest of each query's chosen chunks whose mass reaches the share p: ascending, then -1.

    `chosen [C, T, K]` are chunk ids. `scores [C, T, M]` give the order, `log_mass [C, T, M]` the masses, -inf for
    non-candidates. The chunks `forced [T, M]` stay and count first. If all chosen chunks do not reach p, all stay.
    Time: O(C · T · (M + K log K)).
    """
    if p >= 1:
        return chosen
    ids, stays = _ranked(chosen, scores, forced)
    mass = log_mass.float().softmax(-1).gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    reached = mass.cumsum(-1) - mass >= p  # whether better chunks reach p already; False for NaN
    return _only(ids, stays | ~reached)


def keep_best(chosen: Tensor, scores: Tensor, forced: Tensor, n: Tensor) -> Tensor:
    """Return the best `n [T]` of each query's chosen chunks: ascending, then -1. Arguments are those of `prune`.

    The chunks `forced [T, M]` count first, so n is at least their number. Time: O(C · T · K log K).
    """
    ids, _ = _ranked(chosen, scores, forced)
    return _only(ids, torch.arange(ids.shape[-1], device=ids.device) < n[:, None])


def _ranked(chosen: Tensor, scores: Tensor, forced: Tensor) -> tuple[Tensor, Tensor]:
    """Return each query's chosen chunks, the forced ones first, then by score, then -1; and which are forced."""
    taken, index = chosen >= 0, chosen.clamp(min=0)
    stays = forced.expand(len(chosen), -1, -1).gather(-1, index) & taken
    rank = scores.float().gather(-1, index).masked_fill(~taken, -torch.inf).masked_fill(stays, torch.inf)
    order = best_first(rank, rank.shape[-1])
    return chosen.gather(-1, order), stays.gather(-1, order)


def _only(chosen: Tensor, kept: Tensor) -> Tensor:
    none = torch.iinfo(torch.int64).max
    ids = chosen.masked_fill(~kept | (chosen < 0), none).sort(dim=-1).values
    return ids.masked_fill(ids == none, -1)


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
    top_p: float | None = knob(None, TOP_P, is_share=True, kw_only=True)

    def fitted(self, label: str, window: int) -> Self:
        """Return this budget with the knobs of its growth filled in. Raises `UsageError` for knobs that cannot work."""
        if self.growth is None:
            if given := [f"budget.{x}" for x in ("grows_from", "grows_to") if getattr(self, x) is not None]:
                means = f"{given[0]} is a knob of budget.growth=sqrt and linear alone, and budget.growth is None"
                raise UsageError(f"{label}: {means}; drop {given[0]}")
            return fill_in(self, label, "budget.")
        tokens = resolved(self.tokens)
        made = fill_in(self, label, "budget.", grows_from=window, grows_to=max(window, tokens))
        if resolved(made.grows_to) < tokens:
            raise UsageError(f"{label}: budget.grows_to is {made.grows_to}; expected budget, {tokens}, or more")
        return made

    def at(self, i: Tensor) -> Tensor:
        """Return how many tokens queries `i [T]` attend with `growth`."""
        ratio = i.double() / resolved(self.grows_from)
        ratio = (ratio.sqrt() if self.growth == "sqrt" else ratio).clamp(min=1)
        return (resolved(self.tokens) * ratio).long()
