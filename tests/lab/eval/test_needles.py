"""The hidden facts: each states its answer, and its question leads to it without giving it away."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from random import Random

import pytest

from lce.lab.eval.needles import NEEDLES, Needle, passkey
from lce.lab.eval.prose import sentences

KINDS = pytest.mark.parametrize("kind", NEEDLES.values(), ids=NEEDLES)


@KINDS
def test_the_question_leads_to_the_answer(kind: Callable[[Random], Needle]) -> None:
    for seed in range(30):
        needle = kind(Random(seed))
        assert needle.answer in needle.statement
        assert needle.answer not in needle.question
        opening = needle.question.partition("? ")[2]
        assert opening
        assert opening.split()[-1] in needle.statement.split()


@KINDS
def test_a_seed_says_which_needle(kind: Callable[[Random], Needle]) -> None:
    assert kind(Random(5)) == kind(Random(5))
    assert len({kind(Random(seed)) for seed in range(30)}) > 5


@KINDS
def test_needles_of_one_topic_ask_the_same(kind: Callable[[Random], Needle]) -> None:
    questions: dict[str, str] = {}
    for seed in range(300):
        needle = kind(Random(seed))
        assert questions.setdefault(needle.topic, needle.question) == needle.question


@KINDS
def test_the_filler_never_states_it(kind: Callable[[Random], Needle]) -> None:
    needle, text = kind(Random(1)), " ".join(islice(sentences(Random(2)), 2000))
    assert needle.statement not in text


def test_the_published_wording() -> None:
    needle = passkey(Random(0))
    assert needle.answer.isdecimal()
    assert len(needle.answer) == 5
    assert needle.statement == f"The pass key is {needle.answer}. Remember it. {needle.answer} is the pass key."
    assert needle.question == "What is the pass key? The pass key is"
