"""Samples fit their length, hold their facts, and are the same for the same seed."""

import itertools
import re
from dataclasses import dataclass
from random import Random

import pytest

import lce
from lce_lab.eval.tasks import TASKS, MadeTask, Puzzle, Question
from lce_lab.eval.tasks.making import samples


def words(text):
    return len(text.split())


def unspaced(text):
    """Words, and two more for one that no space comes before."""
    return words(text) + (2 if not text.startswith(" ") else 0)


@pytest.mark.parametrize("name", TASKS)
def test_samples_fit_their_length_and_hold_their_facts(name):
    task = TASKS[name]()
    for length in (300, 3000):
        made = list(samples(task, length=length, n=3, seed=1, count=words, questions=2))
        assert made == list(samples(task, length=length, n=3, seed=1, count=words, questions=2))
        assert len({sample.document for sample in made}) == 3
        for sample in made:
            assert 0.7 * length < words(sample.prompt) <= length
            assert all(fact in sample.document for fact in sample.facts)


@pytest.mark.parametrize("name", TASKS)
def test_the_first_word_of_a_text_may_have_more_tokens(name):
    """As with byte-level tokens, where a word has fewer behind a space."""
    for sample in samples(TASKS[name](), length=400, n=20, seed=1, count=unspaced):
        assert unspaced(sample.prompt) <= 399  # the beginning token takes one


def test_a_needle_stands_at_the_depths_asked_for():
    made = list(samples(TASKS["passkey"](), length=2000, n=4, seed=0, count=words, depths=(0.0, 0.5)))
    places = [sample.document.index("The pass key is") / len(sample.document) for sample in made]
    assert places == pytest.approx([0, 0.5, 0, 0.5], abs=0.05)


def test_fillers(tmp_path):
    noise = next(samples(TASKS["passkey_published"](), length=300, n=1, seed=0, count=words, filler="noise"))
    assert noise.document.startswith("There is an important info")
    assert "There and back again." in noise.document
    (tmp_path / "one.txt").write_text("An essay.  Is it long? It is.")
    essay = next(samples(TASKS["passkey"](), length=60, n=1, seed=0, count=words, filler=f"essays:{tmp_path}"))
    assert "Is it long? It is. An essay." in essay.document
    for filler, error in (("essays:" + str(tmp_path / "essays"), lce.LceError), ("pros", lce.UsageError)):
        with pytest.raises(error, match="essays"):
            list(itertools.islice(samples(TASKS["passkey"](), length=60, n=1, seed=0, count=words, filler=filler), 1))


def test_a_puzzle_that_does_not_fit_is_refused_with_the_length_that_would():
    with pytest.raises(lce.UsageError, match="several_keys: length is 50; expected at least"):
        list(samples(TASKS["several_keys"](), length=50, n=1, seed=0, count=words))


@pytest.mark.parametrize("name", ["pairs", "walk"])
def test_names_become_longer_where_the_short_ones_run_out(name):
    """Three words can name 6,840 keys or nodes."""
    made = [" ".join(TASKS[name]().puzzle(Random(0), n).statements) for n in (40, 7000)]
    found = [re.findall(r"Key ([\w ]+) has" if name == "pairs" else r"([\w ]+) leads", text) for text in made]
    assert [len(set(names)) for names in found] == [40, 7000]
    assert [{len(each.split()) for each in names} for names in found] == [{3}, {4}]


@dataclass(frozen=True)
class Numbers(MadeTask):
    """Statements of two words, and of six where there are more than 100."""

    name = "numbers"
    fills = True

    def puzzle(self, rng, n=0):
        statements = tuple(f"{i} is{' large' * 4 * (n > 100)}." for i in range(n))
        return Puzzle(statements, (Question("Which?", "0", ("0",), (0,)),))


def test_as_many_statements_as_fit_where_they_become_longer_with_their_number():
    for length, expected in ((150, 74), (300, 100), (500, 100), (650, 107)):
        (sample,) = samples(Numbers(), length=length, n=1, seed=0, count=words)
        n = sample.document.count(" is")
        assert expected - 3 <= n <= expected, length
        assert words(sample.prompt) <= length
