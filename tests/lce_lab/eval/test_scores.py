"""Means and intervals."""

import pytest

from lce.methods.measured import sign_test
from lce_lab.eval.record import Answer
from lce_lab.eval.scores import Score, interval, wilson


def answer(score: float, document: int, **more: int) -> Answer:
    return Answer(score == 1, score=score, document=document, **more)


def test_wilson_interval() -> None:
    assert wilson(50, 50) == pytest.approx((0.9287, 1.0), abs=1e-4)
    assert wilson(0, 50) == pytest.approx((0.0, 0.0713), abs=1e-4)
    assert all(wilson(n, n)[1] == 1 for n in range(1, 99)), "not less by rounding"
    assert wilson(25, 50) == pytest.approx((0.3664, 0.6336), abs=1e-4)


def test_a_sign_test_counts_the_questions_that_differ() -> None:
    """Of five that differ four are better: (5 + 1) / 32."""
    assert sign_test([1, 1, 1, 1, 0, 1, 0], [0, 0, 0, 0, 1, 1, 0]) == 6 / 32
    assert sign_test([0, 0.5, 1], [1, 1, 1]) == 1
    assert sign_test([1, 0], [1, 0]) == 1


def test_a_plain_score_has_wilsons_interval_and_averages() -> None:
    score = Score.of([answer(i < 3, i, read_bytes=100 * i) for i in range(4)] + [Answer(True, document=9)])
    assert score == Score(5, 0.8, *wilson(4, 5), "Wilson", 150)


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
    assert interval({0: [0.5], 1: [0.5]}) == ("Wilson", *wilson(1, 2))
    assert interval({0: [0, 1], 1: [1, 0]}) == ("Wilson", *wilson(1, 2)), "two documents, not four samples"
    assert interval({0: [0.0, 1, 1, 1]}) == ("Wilson", *wilson(0, 1, share=0.75)), "one document tells of no other"


def test_both_documents_and_questions_are_drawn() -> None:
    """Questions of two documents vary more than the documents' means do, whatever they are."""
    low, high = interval({0: [1.0] * 4 + [0.0] * 4, 1: [1.0] * 5 + [0.0] * 3})[1:]
    assert high - low > 0.3
    assert interval({0: [1.0] * 8, 1: [0.0] * 8, 2: [1.0] * 8})[1:] == (0, 1), "documents that are all alike within"


def test_a_document_with_questions_of_two_tasks_is_drawn_for_both() -> None:
    one, other = ({n: [float(n < 4)] for n in range(8)}, {n: [float(n >= 4)] for n in range(8)})
    assert interval(one, other)[1:] == (0.5, 0.5), "what one task gains, the other loses"
    apart = interval(one, {n + 8: scores for n, scores in other.items()})
    assert apart[2] - apart[1] > 0.3, "other documents, drawn by themselves"
    assert apart == interval({n + 8: scores for n, scores in other.items()}, one)
