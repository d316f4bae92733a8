"""L-Eval's metrics on vectors worked out by hand."""

import pytest

from tests.lab.eval.metrics.vectors import check


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "score"),
    [
        ("exact", "topic: The Role of  Art", ("the role ofart",), 1),
        ("exact", "12.0", ("12",), 1),
        ("exact", "A", ("AB",), 1 / 4),
        ("letter", "Both (B) and (A)", ("B. Paris",), 1),
        ("letter", "it is (B), not (A)", ("B",), 1),
        ("letter", "", ("A",), 0),
        ("letter", "nothing", ("A",), 1),  # a guess
        ("letters", "BA", ("AB",), 1),
        ("letters", "A. x  B) y", ("AB",), 1),
        ("letters", "A. x", ("ABD",), 1 / 4),
        ("letters", "A, E", ("A",), 1),
        ("worked_number", "So 7. The answer is $1,234.50", ("The answer is 1234",), 1),
        ("worked_number", "first 5 then 18 apples\n\n99", ("18",), 1),
        ("program_output", "The final output is: the final output of the code is [1, 2]", ("[1 2]",), 1),
        ("program_output", "a b c d e 12 x y z", ("12",), 1),  # among the last words: one of the output's and three
        ("program_output", "12 a b c d", ("12",), 0),
        ("judgement", "I hold this Untrue; False", ("true",), 1),
        ("judgement", "perhaps", ("true",), 0),
    ],
)
def test_scores(metric: str, prediction: str, references: tuple[str, ...], score: float) -> None:
    check(f"leval.{metric}", prediction, references, score)
