"""Metrics on vectors worked out by hand, and the error where a library of theirs is not installed."""

import sys
from typing import Any

import pytest

from lce.errors import UsageError
from lce_lab.eval.metrics import METRICS, libraries
from lce_lab.eval.metrics.overlap import normalised, normalised_chinese

OPTION = ("Georgie", "B")
FUNCTION = ("cmd_gen", "C")


def check(metric: str, prediction: str, references: tuple[str, ...], score: float) -> None:
    assert METRICS[metric](prediction, references) == pytest.approx(score)


CASES: list[tuple[str, list[Any]]] = [
    ("starts", [(" 12345. The", ("12345",), 1), ("the 12345", ("12345",), 0), ("b", ("a", "b"), 1)]),
    ("recall", [("11, 22. 33", ("11", "22", "33"), 2 / 3), ("", ("1",), 0)]),
    ("similarity", [(" red cat. More", ("red cat",), 1), ("abcd", ("bcde",), 0.75)]),  # 2 · 3 in common of 8
    ("longbench.trivia_f1", [("\nParis\nQuestion: next", ("Paris",), 1)]),  # the first line that says something
    ("longbench.count", [("3 or 4, I say 3", ("3",), 2 / 3), ("none", ("3",), 0)]),
    ("longbench.retrieval", [("Paragraph 13 and 3", ("Paragraph 3",), 1 / 2), ("段落7", ("段落7",), 1)]),
    ("longbench.classification", [("A City, or a Person", ("City", "", "City", "Person", "Food"), 1 / 2)]),
    ("longbench.classification", [("City\nPerson", ("City", "", "City", "Person"), 1)]),
    ("longbench.classification", [("animal dog", ("animal dog", "", "animal", "food", "animal dog"), 1)]),
    ("longbench.classification", [("a b c", ("a b c", "", "a", "b", "a b c"), 1 / 2)]),  # b moves up and stays
    ("longbench.classification", [("Food", ("City", "", "City", "Person"), 0)]),
    ("longbench.code_similarity", [("\n# a comment\n`x`\nreturn x", ("return x",), 1), ("abcd", ("bcde",), 0.75)]),
    ("longbench.code_similarity", [("ab", ("b" * 7,), 0.22)]),  # 2/9 in whole percent
    ("longbench.code_similarity", [("// all\n# comments", ("x",), 0), ("// all", ("",), 1)]),
    ("longbench.stated_letter", [("**The correct answer is (B)**", ("B",), 1)]),
    ("longbench.stated_letter", [("The correct answer is C, not (B)", ("B",), 0), ("B", ("B",), 0)]),  # not stated
    ("infinitebench.first_integer", [("The pass key is 71432. 5", ("71432",), 1), ("none", ("71432",), 0)]),
    ("infinitebench.word", [('It is: "c14c-b8".', ("c14c-b8",), 1), ("c14c-b8x", ("c14c-b8",), 0)]),
    ("infinitebench.speaker", [("It was Ace.", ("ACE", "ACE ROTHSTEIN"), 1)]),
    ("infinitebench.speaker", [("Rothstein", ("ACE", "ACE ROTHSTEIN"), 0)]),  # the first name alone counts
    ("infinitebench.last_integer", [("So f(2) = `-7`.", ("-7",), 1), ("it is seven", ("7",), 0)]),
    ("infinitebench.first_number", [("about 3.5 or 4", ("3.5",), 1), ("88", ("88",), 1), ("88.0", ("88",), 0)]),
    ("infinitebench.running_values", [("[3, 1, 9, 4]", ("3", "1", "2", "4"), 1 / 2)]),  # up to the first that is wrong
    ("infinitebench.running_values", [("-3", ("-3",), 0)]),  # signs are not read
    ("infinitebench.running_values_after_first", [("8, 3, 1", ("3", "1"), 1)]),
    ("infinitebench.option", [("B. Walking", OPTION, 1), ("Georgie", OPTION, 1)]),
    ("infinitebench.option", [("I think the answer is: B", OPTION, 1), ("the answer is A or B", OPTION, 0)]),
    ("infinitebench.option", [("perhaps D or B", OPTION, 0), ("", OPTION, 0)]),  # the first letter that stands alone
    ("infinitebench.buggy_function", [("C: cmd_gen", FUNCTION, 1), ("The correct option is: cmd_gen", FUNCTION, 1)]),
    ("infinitebench.buggy_function", [("cmd_gen", FUNCTION, 0)]),
    ("leval.exact", [("topic: The Role of  Art", ("the role ofart",), 1), ("12.0", ("12",), 1), ("A", ("AB",), 1 / 4)]),
    ("leval.letter", [("Both (B) and (A)", ("B. Paris",), 1), ("it is (B), not (A)", ("B",), 1), ("", ("A",), 0)]),
    ("leval.letter", [("nothing", ("A",), 1)]),  # a guess
    ("leval.letters", [("BA", ("AB",), 1), ("A. x  B) y", ("AB",), 1), ("A. x", ("ABD",), 1 / 4), ("A, E", ("A",), 1)]),
    ("leval.worked_number", [("So 7. The answer is $1,234.50", ("The answer is 1234",), 1)]),
    ("leval.worked_number", [("first 5 then 18 apples\n\n99", ("18",), 1)]),
    ("leval.program_output", [("The final output is: the final output of the code is [1, 2]", ("[1 2]",), 1)]),
    # Among the last words: its own and three.
    ("leval.program_output", [("a b c d e 12 x y z", ("12",), 1), ("12 a b c d", ("12",), 0)]),
    ("leval.judgement", [("I hold this Untrue; False", ("true",), 1), ("perhaps", ("true",), 0)]),
    ("ruler.match_all", [("abc\x01 12", ("ABC", "12", "34"), 2 / 3)]),
    ("ruler.match_all", [("a\tb", ("a\nb",), 1)]),  # control characters become line breaks
    ("ruler.match_part", [("it is Paris", ("london", "paris"), 1), ("", ("london",), 0)]),
    ("needlebench.keywords", [("red and blue", ("red", "Blue"), 1 / 2)]),
    ("needlebench.boxed", [("\\boxed{x}, no: \\boxed{Ann  \\text{Lee}}", ("Ann Lee",), 1)]),
    ("needlebench.boxed", [("\\boxed{{Ann Lee}}", ("Ann Lee",), 1)]),
    ("needlebench.boxed", [(each, ("Ann Lee",), 0) for each in ("Ann Lee", "\\boxed{Ann Lee")]),
    ("counting_stars.stars", [('{"little_penguin": [3, 5, 5]}', ("3", "5", "7", "9"), 1 / 2)]),
    ("counting_stars.stars", [('```json\n{"小企鹅": [3]}\n```', ("3", "5"), 1 / 2)]),
    ("counting_stars.stars", [('{"little_penguin": [1, 2, 3]}', ("3", "2"), 1 / 2)]),  # no more are read than there are
    ("counting_stars.stars", [('{"other": [3]}', ("3",), 0)]),
    # right alone, both, wrong alone, neither
    ("counting_stars.corrected_stars", [('{"小企鹅": [1, 2, 12, 13]}', ("1/11", "2/12", "3/13", "4/14"), 7 / 16)]),
    ("qa_f1", [("The cat sat", ("a cat",), 2 / 3)]),  # of cat, sat: precision 1/2, recall 1
    ("qa_f1", [("cat", ("dog", "Cat!"), 1), ("", ("x",), 0), ("the", ("the",), 0)]),  # nothing is left of an article
    ("qa_f1_characters", [("北京。", ("北京市",), 0.8), ("a b", ("AB",), 1)]),  # precision 1, recall 2/3
]


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "score"), [(metric, *case) for metric, cases in CASES for case in cases]
)
def test_scores(metric: str, prediction: str, references: tuple[str, ...], score: float) -> None:
    check(metric, prediction, references, score)


@pytest.mark.parametrize(
    ("library", "metric", "prediction", "references", "score"),
    [
        ("rapidfuzz", "longbench.code_similarity_indel", "ab ba", ("ba ab",), 0.6),  # "b b" in common: 6 of 10
        ("json_repair", "counting_stars.stars", "{'little_penguin': [3, 5", ("3", "5"), 1),
        ("rouge", "rouge_l", "the cat sat", ("the cat",), 0.8),
        ("rouge", "rouge_l", "x", ("the cat", "x"), 1),
        ("rouge", "rouge_l", "", ("x",), 0),
        ("rouge", "rouge_l", ".", ("x",), 0),
        ("rouge_score", "rouge_score_1", "the cat sat", ("sat the dog",), 2 / 3),
        ("rouge_score", "rouge_score_2", "the cat sat", ("the cat ran",), 1 / 2),
        ("rouge_score", "rouge_score_l", "the cat sat", ("sat the cat",), 2 / 3),
        ("rouge_score", "rouge_lsum", "a b\nc d", ("c d\na b", "x"), 1),  # each line finds its own
        ("jieba", "qa_f1_zh", "我来到北京。", ("我来到上海",), 2 / 3),  # 我, 来到 of three words each
        ("jieba", "rouge_l_zh", "我来到北京", ("我来到上海",), 2 / 3),
    ],
)
def test_libraries(library: str, metric: str, prediction: str, references: tuple[str, ...], score: float) -> None:
    pytest.importorskip(library)
    check(metric, prediction, references, score)


def test_ratios_and_normalisation() -> None:
    check("longbench.code_similarity", "ab ba", ("ba ab",), 0.4)  # difflib takes the longest match, "ab", first
    assert (normalised("The  Cat's, a HAT!"), normalised_chinese("你好，World 。")) == ("cats hat", "你好world")
    assert normalised("The Cat", lower=False) == "The Cat"  # articles are in lower case


NEEDED = {"rouge_l": "rouge", "rouge_lsum": "rouge_score.rouge_scorer", "qa_f1_zh": "jieba"}
NEEDED |= {"counting_stars.stars": "json_repair", "longbench.code_similarity_indel": "rapidfuzz.fuzz"}


@pytest.mark.parametrize(("metric", "module"), NEEDED.items())
def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, metric: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for cached in (libraries.rouge, libraries.rouge_scorer, libraries.cut_chinese):
        cached.cache_clear()
    named = module.partition(".")[0]
    with pytest.raises(UsageError, match=rf"needs the library {named}, .*; run pip install 'lce\[eval\]'"):
        METRICS[metric]("[x", ("1",))
