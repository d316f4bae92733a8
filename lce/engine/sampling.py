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
        number = int | float
        checks = (
            ("temperature", "a number, 0 or more", number, lambda x: 0 <= x < math.inf),
            ("top_k", "a whole number, 0 (off) or more", int, lambda x: x >= 0),
            ("top_p", "more than 0 and at most 1", number, lambda x: 0 < x <= 1),
            ("min_p", "0 (off) to 1", number, lambda x: 0 <= x <= 1),
            ("seed", "a whole number from 0 to 2**63 - 1", int | None, lambda x: x is None or 0 <= x < 2**63),
            ("stop", "strings, none of them empty", tuple, lambda x: all(isinstance(s, str) and s for s in x)),
        )
        for knob, expected, kind, holds in checks:
            value = getattr(self, knob)
            if not isinstance(value, kind) or not holds(value):
                raise UsageError(f"{knob} is {value!r}; expected {expected}")


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
