"""The metrics of RULER, NeedleBench and Counting-Stars on vectors worked out by hand."""

import pytest

from tests.lab.eval.metrics.vectors import check


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "score"),
    [
        ("ruler.match_all", "abc\x01 12", ("ABC", "12", "34"), 2 / 3),
        ("ruler.match_all", "a\tb", ("a\nb",), 1),  # control characters become line breaks
        ("ruler.match_part", "it is Paris", ("london", "paris"), 1),
        ("ruler.match_part", "", ("london",), 0),
        ("needlebench.keywords", "red and blue", ("red", "Blue"), 1 / 2),
        ("needlebench.boxed", "\\boxed{x}, no: \\boxed{Ann  \\text{Lee}}", ("Ann Lee",), 1),
        ("needlebench.boxed", "\\boxed{{Ann Lee}}", ("Ann Lee",), 1),
        ("needlebench.boxed", "Ann Lee", ("Ann Lee",), 0),
        ("needlebench.boxed", "\\boxed{Ann Lee", ("Ann Lee",), 0),
        ("counting_stars.stars", '{"little_penguin": [3, 5, 5]}', ("3", "5", "7", "9"), 1 / 2),
        ("counting_stars.stars", '```json\n{"小企鹅": [3]}\n```', ("3", "5"), 1 / 2),
        ("counting_stars.stars", '{"little_penguin": [1, 2, 3]}', ("3", "2"), 1 / 2),  # no more are read than there are
        ("counting_stars.stars", '{"other": [3]}', ("3",), 0),
        # right alone, both, wrong alone, neither
        ("counting_stars.corrected_stars", '{"小企鹅": [1, 2, 12, 13]}', ("1/11", "2/12", "3/13", "4/14"), 7 / 16),
    ],
)
def test_scores(metric: str, prediction: str, references: tuple[str, ...], score: float) -> None:
    check(metric, prediction, references, score)


def test_almost_json_is_repaired() -> None:
    pytest.importorskip("json_repair")
    check("counting_stars.stars", "{'little_penguin': [3, 5", ("3", "5"), 1)
