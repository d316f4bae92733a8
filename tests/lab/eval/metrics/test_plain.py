"""The metrics of our own tasks, on vectors worked out by hand."""

import pytest

from lce.lab.eval.metrics import METRICS


@pytest.mark.parametrize(
    ("metric", "answer", "expected", "score"),
    [
        ("starts", " 12345. The", ("12345",), 1),
        ("starts", "the 12345", ("12345",), 0),
        ("starts", "b", ("a", "b"), 1),
        ("recall", "11, 22. 33", ("11", "22", "33"), 2 / 3),
        ("recall", "", ("1",), 0),
        ("similarity", " red cat. More", ("red cat",), 1),
        ("similarity", "abcd", ("bcde",), 0.75),  # 2 · 3 characters in common of 8
    ],
)
def test_scores(metric, answer, expected, score):
    assert METRICS[metric](answer, expected) == pytest.approx(score)
