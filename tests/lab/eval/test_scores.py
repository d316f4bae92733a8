"""Means and intervals."""

import pytest

from lce.lab.eval.record import Answer
from lce.lab.eval.scores import Score, interval, wilson


def answer(score: float, document: int, **more: int) -> Answer:
    return Answer(score == 1, score=score, document=document, **more)


def test_wilson_interval() -> None:
    assert wilson(50, 50) == pytest.approx((0.9287, 1.0), abs=1e-4)
    assert wilson(0, 50) == pytest.approx((0.0, 0.0713), abs=1e-4)
    assert all(wilson(n, n)[1] == 1 for n in range(1, 99)), "not less by rounding"
    assert wilson(25, 50) == pytest.approx((0.3664, 0.6336), abs=1e-4)


def test_a_plain_score_has_wilsons_interval_and_averages() -> None:
    score = Score.of([answer(i < 3, i, read_bytes=100 * i) for i in range(4)] + [Answer(True, document=9)])
    assert (score.samples, score.mean, score.interval) == (5, 0.8, "Wilson")
    assert (score.low, score.high) == wilson(4, 5)
    assert (score.read_bytes, score.prompt_tokens) == (150, None)


def test_other_scores_are_drawn_again_by_document_whatever_their_order() -> None:
    """The bootstrap's interval is about that of a normal distribution; questions of one document are drawn together."""
    scores = [i / 199 for i in range(200)]
    made = [answer(score, i) for i, score in enumerate(scores)]
    found = Score.of(made)
    deviation = (sum((x - 0.5) ** 2 for x in scores) / 200 / 200) ** 0.5
    assert found.interval == "bootstrap"
    assert (found.low, found.high) == pytest.approx((0.5 - 1.96 * deviation, 0.5 + 1.96 * deviation), abs=0.005)
    assert Score.of(made[::-1]) == found
    together = Score.of([answer(score, i // 20) for i, score in enumerate(scores)])
    assert together.high - together.low > 3 * (found.high - found.low)


def test_documents_of_one_mean_have_an_interval_all_the_same() -> None:
    assert interval([[0.5], [0.5]]) == ("Wilson", *wilson(1, 2))
    assert interval([[0.0, 1.0], [1.0, 0.0]]) == ("Wilson", *wilson(1, 2)), "two documents, not four samples"
