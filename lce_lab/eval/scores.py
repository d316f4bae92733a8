"""Mean scores of samples, with 95% intervals.

If every document has one question and a score of 0 or 1, the interval is Wilson's. Otherwise the interval is a
bootstrap in two stages, the 2.5% and 97.5% quantiles of the means of 2,000 draws: documents are drawn with replacement,
and the questions of each drawn document again. A document with questions of several tasks is drawn for all of them.
Draws are seeded, so the same scores give the same interval in any order. If all documents have the same mean, or there
is one alone, draws tell nothing of other documents, so Wilson's is used, for as many samples as there are documents.
Wilson's is wide enough: of scores with a given mean, scores of 0 and 1 vary most.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from statistics import fmean

from lce.errors import UsageError
from lce_lab.eval.record import Answer

DRAWS = 2000

Documents = Mapping[Hashable, Sequence[float]]  # a task's scores, 0 to 1, by document
Scores = tuple[tuple[float, ...], ...]  # a document's, for each task


@dataclass(frozen=True)
class Score:
    """The mean score of some samples, 0 to 1, with the 95% interval from `low` to `high`.

    `read_bytes`, `prompt_tokens` and `chance` are means of the known values of `Answer`; None if no value is known.
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
        kind, low, high = interval(by_document((answer.document, answer.value) for answer in answers))
        known = ("read_bytes", "prompt_tokens", "chance")
        averages = {name: mean_of(getattr(answer, name) for answer in answers) for name in known}
        return cls(len(answers), fmean(answer.value for answer in answers), low, high, kind, **averages)


def by_document(values: Iterable[tuple[Hashable, float]]) -> Documents:
    """Return a task's scores by document, from pairs of a document and a score."""
    documents: dict[Hashable, list[float]] = {}
    for document, value in values:
        documents.setdefault(document, []).append(value)
    return documents


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are no such values."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def interval(*tasks: Documents) -> tuple[str, float, float]:
    """Return the kind and the ends of the 95% interval of the mean of the tasks' means."""
    names = {name for task in tasks for name in task}
    documents = sorted(tuple(tuple(sorted(task.get(name, ()))) for task in tasks) for name in names)
    strata = [list(group) for _, group in groupby(sorted(documents, key=_asked), key=_asked)]
    plain = len(tasks) == 1 and all(len(scores) == 1 and scores[0] in (0.0, 1.0) for (scores,) in documents)
    means = [{tuple(round(fmean(scores), 9) for scores in each if scores) for each in some} for some in strata]
    if plain or all(len(some) == 1 for some in means):
        return "Wilson", *wilson(0, len(names), share=mean_of_tasks(tasks))
    return "bootstrap", *_bootstrap(strata)


def mean_of_tasks(tasks: Sequence[Documents]) -> float:
    """Return the mean of the tasks' mean scores."""
    return fmean(fmean(chain(*task.values())) for task in tasks)


def _asked(document: Scores) -> tuple[bool, ...]:
    """Return which of the tasks a document has questions of. Documents alike in this are drawn among each other."""
    return tuple(map(bool, document))


def wilson(right: float, n: int, z: float = 1.96, *, share: float | None = None) -> tuple[float, float]:
    """Return the Wilson score interval of `right` successes, or of a share, in `n` trials, at 95% for z = 1.96."""
    share = right / n if share is None else share
    centre = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # with rounding errors, too, the share is within


def sign_test(some: Sequence[float], others: Sequence[float]) -> float:
    """Return how likely chance alone makes `some` so much better than `others`, scores of the same questions.

    It is a one-sided sign test of the pairs that differ, which for scores of 0 and 1 is McNemar's exact test.
    """
    better, worse = (sum(x > y for x, y in zip(*pair, strict=True)) for pair in ((some, others), (others, some)))
    tail = sum(math.comb(better + worse, k) for k in range(better, better + worse + 1))
    return float(tail / 2 ** (better + worse))


def _bootstrap(strata: Sequence[Sequence[Scores]]) -> tuple[float, float]:
    import numpy as np

    rng, n_tasks = np.random.default_rng(0), len(strata[0][0])
    sums, sizes = np.zeros((2, n_tasks, DRAWS))
    for stratum in strata:
        drawn = rng.integers(len(stratum), size=(DRAWS, len(stratum))) + np.arange(DRAWS)[:, None] * len(stratum)
        times = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
        for document, n_drawn in zip(stratum, times.T, strict=True):
            for task, scores in enumerate(document):
                if n := len(scores):
                    sums[task] += rng.multinomial(n_drawn * n, [1 / n] * n) @ scores
                    sizes[task] += n_drawn * n
    low, high = np.quantile((sums / sizes).mean(0), (0.025, 0.975))
    return float(low), float(high)
