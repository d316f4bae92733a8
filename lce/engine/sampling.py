"""From logits to the next token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lce.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. The default is greedy: the likeliest token.

    With `temperature` above 0 the logits are divided by it, and then filtered in this order: `top_k` keeps the k
    likeliest tokens, `top_p` the fewest whose probabilities add up to p, `min_p` those with at least that share of the
    likeliest token's probability. 0, 1 and 0 switch these filters off. The same `seed` draws the same tokens; None
    draws others each time. The text ends before the first of the `stop` strings.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        checks = {
            f"temperature is {self.temperature!r}; expected a number, 0 or more": (
                _is_number(self.temperature) and 0 <= self.temperature < math.inf
            ),
            f"top_k is {self.top_k!r}; expected a whole number, 0 (off) or more": (
                isinstance(self.top_k, int) and self.top_k >= 0
            ),
            f"top_p is {self.top_p!r}; expected more than 0 and at most 1": _is_number(self.top_p)
            and 0 < self.top_p <= 1,
            f"min_p is {self.min_p!r}; expected 0 (off) to 1": _is_number(self.min_p) and 0 <= self.min_p <= 1,
            f"seed is {self.seed!r}; expected a whole number from 0 to 2**63 - 1": (
                self.seed is None or (isinstance(self.seed, int) and 0 <= self.seed < 2**63)
            ),
            f"stop is {self.stop!r}; expected strings, none of them empty": all(
                isinstance(stop, str) and stop for stop in self.stop
            ),
        }
        for message, holds in checks.items():
            if not holds:
                raise UsageError(message)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


class Sampler:
    """Draws tokens as a `Sampling` says; holds the state of the random numbers."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def pick(self, logits: Tensor) -> int:
        """The next token for logits `[vocab]`. Time: O(vocab log vocab) when sampling, O(vocab) when greedy."""
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        probabilities = probabilities_of(logits.float().cpu(), self.sampling)
        return int(torch.multinomial(probabilities, 1, generator=self._random))


def probabilities_of(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution `[vocab]` that a token is drawn from, behind all filters."""
    scaled = (logits - logits.max()) / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -torch.inf)
    probabilities = scaled.softmax(-1)
    if sampling.top_p < 1:
        ranked, order = probabilities.sort(descending=True, stable=True)
        beyond = ranked.cumsum(0) - ranked >= sampling.top_p  # the likelier tokens add up to top_p already
        probabilities[order[beyond]] = 0
    if sampling.min_p > 0:
        probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()
