"""Mean scores of samples, with 95% intervals.

If every document has one question and a score of 0 or 1, the interval is Wilson's. Otherwise the interval is a
bootstrap over documents: the 2.5% and 97.5% quantiles of the means of 2,000 draws with replacement. Draws are seeded,
so the same scores give the same interval in any order. If all documents have the same mean, a bootstrap interval would
have no width, so Wilson's is used. Wilson's is wide enough: of scores with a given mean, scores of 0 and 1 vary most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lce.errors import UsageError
from lce.lab.eval.record import Answer

DRAWS = 2000


@dataclass(frozen=True)
class Score:
    """The mean score of some samples, 0 to 1, with the 95% interval from `low` to `high`.

    `read_bytes`, `prompt_tokens` and `chance` are those of `Answer`, averaged over samples with known values; None if
    no value is known.
    """

    samples: int
    mean: float
    low: float
    high: float
    interval: str  # the kind of interval: "Wilson" or "bootstrap"
    read_bytes: float | None = None
    prompt_tokens: float | None = None
    chance: float | None = None

    @classmethod
    def of(cls, answers: Iterable[Answer]) -> Score:
        """Return the score of answers, in any order. Raises `UsageError` if there are none."""
        answers = list(answers)
        if not answers:
            raise UsageError("there are no answers to score; expected one or more: ask more samples, or fewer shards")
        documents: dict[int | None, list[float]] = {}
        for answer in answers:
            documents.setdefault(answer.document, []).append(answer.value)
        kind, low, high = interval(list(documents.values()))
        averages = {
            name: mean_of(getattr(answer, name) for answer in answers)
            for name in ("read_bytes", "prompt_tokens", "chance")
        }
        mean = math.fsum(answer.value for answer in answers) / len(answers)
        return cls(len(answers), mean, low, high, kind, **averages)


def mean_interval(groups: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the mean of the groups' means and the ends of its 95% interval, a bootstrap within each group."""
    import numpy as np

    rng, values = np.random.default_rng(0), [np.array(sorted(group)) for group in groups]
    drawn = [group[rng.integers(len(group), size=(DRAWS, len(group)))].mean(1) for group in values]
    low, high = np.quantile(np.mean(drawn, axis=0), (0.025, 0.975))
    return float(np.mean([group.mean() for group in values])), float(low), float(high)


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are no such values."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def interval(documents: Sequence[Sequence[float]]) -> tuple[str, float, float]:
    """Return the kind and the ends of the 95% interval of the mean. `documents` has one list of scores per document."""
    total, n = math.fsum(math.fsum(scores) for scores in documents), sum(map(len, documents))
    plain = all(len(scores) == 1 and scores[0] in (0.0, 1.0) for scores in documents)
    means = {round(math.fsum(scores) / len(scores), 9) for scores in documents}
    if plain or len(means) == 1:
        return "Wilson", *wilson(total, n if plain else len(documents), share=total / n)
    return "bootstrap", *_bootstrap(documents)


def wilson(right: float, n: int, z: float = 1.96, *, share: float | None = None) -> tuple[float, float]:
    """Return the Wilson score interval of `right` successes in `n` trials, at 95% for z = 1.96."""
    share = right / n if share is None else share
    centre = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # with rounding errors, too, the share is within


def _bootstrap(documents: Sequence[Sequence[float]]) -> tuple[float, float]:
    import numpy as np

    ordered = sorted(tuple(sorted(scores)) for scores in documents)  # the draws do not depend on the order of answers
    sums = np.array([math.fsum(scores) for scores in ordered])
    sizes = np.array([len(scores) for scores in ordered], dtype=float)
    drawn = np.random.default_rng(0).integers(len(ordered), size=(DRAWS, len(ordered)))
    low, high = np.quantile(sums[drawn].sum(1) / sizes[drawn].sum(1), (0.025, 0.975))
    return float(low), float(high)
