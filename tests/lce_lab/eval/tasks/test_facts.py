"""Facts in words: how many there are, which words they share, and what a question has in common with its fact."""

import re
from collections import Counter
from random import Random

import pytest

from lce_lab.eval.metrics import METRICS
from lce_lab.eval.tasks import TASKS
from lce_lab.eval.tasks.facts import MANY, OTHER, Deck, FactsAtOnce
from lce_lab.eval.tasks.making import samples

KINDS = {"many_facts": 24, "facts_at_once": 4, "other_words": 8, "similar": 8}
LITTLE = set("the a an of in by is was were are did does what which who how why where at on that one to".split())


def words(text):
    return re.findall(r"\w+", text.lower())


def stems(text):
    """Content words without the endings of verbs and nouns, and no more than five letters of each."""
    return {re.sub(r"(ed|ing|en|es|s|e)$", "", word)[:5] for word in words(text) if word not in LITTLE}


@pytest.mark.parametrize("task", ["many_facts", "other_words", "similar", "similar_in_order"])
def test_a_question_asks_for_one_word_of_one_fact(task):
    for seed in range(10):
        puzzle = TASKS[task]().puzzle(Random(seed))
        assert sorted(question.facts for question in puzzle.questions) == [(i,) for i in range(len(puzzle.statements))]
        for question in puzzle.questions:
            assert question.answer in words(puzzle.statements[question.facts[0]]) or question.answer[0].isupper()
            assert re.fullmatch(r"\w+", question.answer)
            assert question.answer not in re.findall(r"\w+", question.text)


def test_there_are_24_facts_of_as_many_kinds_and_one_word_is_in_one_fact():
    assert len({statement for statement, _, _ in MANY}) == len(MANY) == 24
    for seed in range(20):
        puzzle = TASKS["facts_medley"]().puzzle(Random(seed))
        drawn = {word for each in Deck(Random()).words.values() for word in each}
        counts = Counter(word for text in puzzle.statements for word in re.findall(r"\w+", text) if word in drawn)
        assert set(counts.values()) == {1}, counts.most_common(3)


def test_no_content_word_leads_to_a_fact_that_is_asked_for_in_other_words():
    assert len(OTHER) == KINDS["other_words"]
    assert stems("The kids were roused") & stems("What rouses a kid?") == {"kid", "rous"}
    for statement, question, _, begin in OTHER:
        assert not stems(re.sub(r"{\w+}", "", statement)) & stems(f"{question} {begin}"), statement


def test_similar_statements_differ_in_two_words_or_in_one_and_stand_in_their_order():
    puzzle = TASKS["similar"]().puzzle(Random(0))
    shared = set.intersection(*(set(words(text)) for text in puzzle.statements))
    assert {len(set(words(text)) - shared) for text in puzzle.statements} == {2}
    puzzle = TASKS["similar_in_order"]().puzzle(Random(0))
    shared = set.intersection(*(set(words(text)) for text in puzzle.statements))
    assert {len(set(words(text)) - shared) for text in puzzle.statements} == {1}
    asked = {question.facts[0]: words(question.text)[-6] for question in puzzle.questions}
    assert [asked[i] for i in range(8)] == "first second third fourth fifth sixth seventh eighth".split()


def test_three_facts_at_once_are_scored_by_how_many_the_answer_has():
    puzzle = FactsAtOnce().puzzle(Random(0))
    assert len(puzzle.questions) == 8
    assert {i for question in puzzle.questions for i in question.facts} == set(range(24))
    for question in puzzle.questions:
        first, _, third = question.answers
        assert METRICS[question.metric](f" {first}. (2) nothing. (3) {third}.", question.answers) == pytest.approx(
            2 / 3
        )


def test_a_medley_of_facts_asks_44_questions_of_facts_all_over_the_text():
    puzzle = TASKS["facts_medley"]().puzzle(Random(0))
    assert Counter(question.kind for question in puzzle.questions) == KINDS
    assert len(puzzle.statements) == 40
    assert {i for question in puzzle.questions for i in question.facts} == set(range(40))
    assert {q.metric for q in puzzle.questions if q.kind == "facts_at_once"} == {"ruler.match_all"}
    assert len({question.kind for question in puzzle.questions[:12]}) >= 3
    made = list(
        samples(TASKS["facts_medley"](), length=4000, n=2, seed=0, count=lambda text: len(text.split()), questions=60)
    )
    assert len(made) == 88
    fifths = Counter(int(5 * sample.depth) for sample in made)
    assert min(fifths[i] for i in range(5)) >= 6
