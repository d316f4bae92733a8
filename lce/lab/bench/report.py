"""The results of a benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from lce.lab.bench.ceilings import Ceilings


@dataclass(frozen=True)
class Spread:
    """The median of several measurements, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One method at one length. `prefill` and `decode` are tokens a second, `first_token` seconds.

    A decode step reads `weight_bytes` of weights and `cache_bytes` of keys, values and what a method compares. A
    prefill computes `prefill_flops`. Shares are medians relative to the machine's ceilings of reading and of products.
    `warning` says that the text is longer than the method can read.
    """

    method: str
    length: int
    prefill: Spread
    decode: Spread
    first_token: Spread
    weight_bytes: int
    cache_bytes: int
    prefill_flops: float
    prefill_share: float
    decode_share: float
    warning: str | None


@dataclass(frozen=True)
class StepTimes:
    """The time of one step: `seconds` by category.

    `step` is `decode`, one token, or `prefill`, one block of `tokens` tokens, behind a text of `length` tokens.
    """

    method: str
    length: int
    step: str
    tokens: int
    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Report:
    """A benchmark's setting, the machine's ceilings, a row for each method and length, and step times."""

    model: str
    machine: str
    version: str
    dtype: str
    device: str
    window: int
    repeats: int
    new_tokens: int
    seed: int
    methods: Mapping[str, str]  # resolved methods by the names of the rows
    ceilings: Ceilings
    rows: Sequence[Row]
    profile: Sequence[StepTimes]
