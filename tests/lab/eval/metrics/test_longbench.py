"""LongBench's metrics on vectors worked out by hand."""

import pytest

from tests.lab.eval.metrics.vectors import check


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "score"),
    [
        ("longbench.trivia_f1", "\nParis\nQuestion: next", ("Paris",), 1),  # the first line that says something
        ("longbench.count", "3 or 4, I say 3", ("3",), 2 / 3),
        ("longbench.count", "none", ("3",), 0),
        ("longbench.retrieval", "Paragraph 13 and 3", ("Paragraph 3",), 1 / 2),
        ("longbench.retrieval_zh", "段落7", ("段落7",), 1),
        ("longbench.classification", "A City, or a Person", ("City", "", "City", "Person", "Food"), 1 / 2),
        ("longbench.classification", "City\nPerson", ("City", "", "City", "Person"), 1),
        ("longbench.classification", "animal dog", ("animal dog", "", "animal", "food", "animal dog"), 1),
        ("longbench.classification", "a b c", ("a b c", "", "a", "b", "a b c"), 1 / 2),  # b moves up and stays
        ("longbench.classification", "Food", ("City", "", "City", "Person"), 0),
        ("longbench.code_similarity", "\n# a comment\n`x`\nreturn x", ("return x",), 1),
        ("longbench.code_similarity", "abcd", ("bcde",), 0.75),  # 2 · 3 of 8 characters
        ("longbench.code_similarity", "ab", ("b" * 7,), 0.22),  # 2/9 in whole percent
        ("longbench.code_similarity", "// all\n# comments", ("x",), 0),
        ("longbench.code_similarity", "// all", ("",), 1),
        ("longbench.stated_letter", "**The correct answer is (B)**", ("B",), 1),
        ("longbench.stated_letter", "The correct answer is C, not (B)", ("B",), 0),
        ("longbench.stated_letter", "B", ("B",), 0),  # it must be stated
    ],
)
def test_scores(metric: str, prediction: str, references: tuple[str, ...], score: float) -> None:
    check(metric, prediction, references, score)


def test_the_ratio_of_insertions_and_deletions() -> None:
    check("longbench.code_similarity", "ab ba", ("ba ab",), 0.4)  # difflib takes the longest match, "ab", first
    pytest.importorskip("rapidfuzz")
    check("longbench.code_similarity_indel", "ab ba", ("ba ab",), 0.6)  # "b b" or "a a" in common: 6 of 10
