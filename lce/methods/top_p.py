"""A budget by attention mass: a query keeps the fewest of its chosen chunks whose estimated attention reaches p.

Twilight (Lin et al., 2025, "Twilight: Adaptive Attention Sparsity with Hierarchical Top-p Pruning", arXiv:2502.02770)
prunes the tokens that a selector chose to the smallest set whose attention weights add up to p, so that a head with
sharp attention reads less than a head with flat attention. Twilight estimates the weights from keys in 4 bits. Here the
weights are estimated from the method's own scores, so nothing else is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lce.methods.base import knob


def top_p_knob() -> float | None:
    """Declare the knob `top_p`."""
    meaning = "choose no more than reaches this share of the estimated attention; none is off"
    return knob(None, meaning, is_share=True, kw_only=True)


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
    taken, index = chosen >= 0, chosen.clamp(min=0)
    mass = log_mass.float().softmax(-1).gather(-1, index).masked_fill(~taken, 0.0)
    stays = forced.expand(len(chosen), -1, -1).gather(-1, index) & taken
    rank = scores.float().gather(-1, index).masked_fill(~taken, -torch.inf).masked_fill(stays, torch.inf)
    order = rank.argsort(dim=-1, descending=True, stable=True)
    sorted_mass = mass.gather(-1, order)
    reached = sorted_mass.cumsum(-1) - sorted_mass >= p  # whether better chunks reach p already; False for NaN
    stays |= ~torch.empty_like(taken).scatter_(-1, order, reached)
    return _only(chosen, stays & taken)


def keep_best(chosen: Tensor, scores: Tensor, forced: Tensor, n: Tensor) -> Tensor:
    """Return the best `n [T]` of each query's chosen chunks: ascending, then -1. Arguments are those of `prune`.

    The chunks `forced [T, M]` count first, so n is at least their number. Time: O(C · T · K log K).
    """
    taken, index = chosen >= 0, chosen.clamp(min=0)
    first = forced.expand(len(chosen), -1, -1).gather(-1, index)
    rank = scores.float().gather(-1, index).masked_fill(first, torch.inf).masked_fill(~taken, -torch.inf)
    order = rank.argsort(dim=-1, descending=True, stable=True)
    within = (torch.arange(chosen.shape[-1], device=chosen.device) < n[:, None]).expand_as(order)
    return _only(chosen, torch.empty_like(taken).scatter_(-1, order, within) & taken)


def _only(chosen: Tensor, kept: Tensor) -> Tensor:
    """Return the ids of `chosen [C, T, K]` that are `kept`: ascending, then -1."""
    none = torch.iinfo(torch.int64).max
    ids = chosen.masked_fill(~kept, none).sort(dim=-1).values
    return ids.masked_fill(ids == none, -1)
