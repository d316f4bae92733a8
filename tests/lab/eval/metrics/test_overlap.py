"""F1 and ROUGE on vectors worked out by hand."""

import pytest

from lce.lab.eval.metrics.overlap import normalised, normalised_chinese
from tests.lab.eval.metrics.vectors import check


def test_normalisation() -> None:
    assert normalised("The  Cat's, a HAT!") == "cats hat"
    assert normalised("The Cat", lower=False) == "The Cat"  # articles are in lower case
    assert normalised_chinese("你好，World 。") == "你好world"


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "score"),
    [
        ("qa_f1", "The cat sat", ("a cat",), 2 / 3),  # of cat, sat: precision 1/2, recall 1
        ("qa_f1", "cat", ("dog", "Cat!"), 1),
        ("qa_f1", "", ("x",), 0),
        ("qa_f1", "the", ("the",), 0),  # nothing is left of an article
        ("qa_f1_characters", "北京。", ("北京市",), 0.8),  # precision 1, recall 2/3
        ("qa_f1_characters", "a b", ("AB",), 1),
    ],
)
def test_f1(metric: str, prediction: str, references: tuple[str, ...], score: float) -> None:
    check(metric, prediction, references, score)


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [("the cat sat", ("the cat",), 0.8), ("x", ("the cat", "x"), 1), ("", ("x",), 0), (".", ("x",), 0)],
)
def test_rouge_of_the_library_rouge(prediction: str, references: tuple[str, ...], score: float) -> None:
    pytest.importorskip("rouge")
    check("rouge_l", prediction, references, score)  # the library adds 1e-8 to what it divides by


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "score"),
    [
        ("rouge_score_1", "the cat sat", ("sat the dog",), 2 / 3),
        ("rouge_score_2", "the cat sat", ("the cat ran",), 1 / 2),
        ("rouge_score_l", "the cat sat", ("sat the cat",), 2 / 3),
        ("rouge_lsum", "a b\nc d", ("c d\na b", "x"), 1),  # each line finds its own
    ],
)
def test_rouge_of_rouge_score(metric: str, prediction: str, references: tuple[str, ...], score: float) -> None:
    pytest.importorskip("rouge_score")
    check(metric, prediction, references, score)


def test_chinese_words() -> None:
    pytest.importorskip("jieba")
    check("qa_f1_zh", "我来到北京。", ("我来到上海",), 2 / 3)  # 我, 来到 of three words each
    pytest.importorskip("rouge")
    check("rouge_l_zh", "我来到北京", ("我来到上海",), 2 / 3)
