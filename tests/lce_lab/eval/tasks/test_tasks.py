"""Every task makes puzzles whose answers follow from what they state, and samples that fit their length."""

import re
from dataclasses import dataclass
from itertools import islice
from random import Random

import pytest

import lce
from lce_lab.eval.metrics import METRICS
from lce_lab.eval.prose import sentences
from lce_lab.eval.tasks import TASKS, MadeTask, Puzzle, Question
from lce_lab.eval.tasks.keys import NEEDLES, PassKey
from lce_lab.eval.tasks.making import samples


@pytest.mark.parametrize("name", TASKS)
def test_an_answer_is_scored_as_right_and_stands_in_its_facts(name):
    task = TASKS[name]()
    for seed in range(20):
        puzzle = task.puzzle(Random(seed), 20)
        assert puzzle == task.puzzle(Random(seed), 20)
        for question in puzzle.questions:
            metric = METRICS[question.metric or task.metrics[0]]
            assert metric(" " + question.answer + ". The", question.answers) == 1
            assert metric(" zzz.", question.answers) < 0.5
            text = " ".join(puzzle.statements[i] for i in question.facts)
            answer = re.sub(r"\(\d\)", "", question.answer)  # the numbers of several answers
            assert all(word in text for word in re.findall(r"\w+", answer) if word not in ("and", "in"))


def test_a_medley_has_the_statements_and_questions_of_seven_tasks_each_with_its_metric():
    puzzle = TASKS["medley"]().puzzle(Random(0))
    kinds = {question.kind: question.metric for question in puzzle.questions}
    assert list(kinds) == "passkey several_facts several_keys pairs variables counting_stars two_hops".split()
    assert {kind for kind, metric in kinds.items() if metric == "recall"} == {"variables", "counting_stars"}
    counts = {kind: sum(question.kind == kind for question in puzzle.questions) for kind in kinds}
    assert list(counts.values()) == [1, 8, 4, 8, 2, 1, 3]
    assert {i for question in puzzle.questions for i in question.facts} == set(range(len(puzzle.statements)))
    variables = [question for question in puzzle.questions if question.kind == "variables"]
    for question in variables:  # a copy's source stands before it
        copies = [puzzle.statements[i] for i in question.facts]
        assert [copy.rstrip(".").split()[-1] for copy in copies] == list(question.answers)


def test_needles_state_their_answers_and_prose_states_none_of_them():
    text = " ".join(islice(sentences(Random(2)), 2000))
    for kind in NEEDLES:
        for seed in range(100):
            needle = kind.draw(Random(seed))
            assert needle.answer in needle.statement
            assert needle.answer not in needle.question
            assert needle.question.split()[-1] in needle.statement.split()
            assert needle.statement not in text
    key = PassKey.draw(Random(0))
    assert key.statement == f"The pass key is {key.answer}. Remember it. {key.answer} is the pass key."
    assert (key.question, len(key.answer)) == ("What is the pass key? The pass key is", 5)


def test_prose_goes_on_from_a_seed_and_states_no_fact():
    made = list(islice(sentences(Random(3)), 3000))
    assert len(set(made)) > 2000
    assert made[:50] == list(islice(sentences(Random(3)), 50)) != list(islice(sentences(Random(4)), 50))
    for word in ("pass key", "secret", "code of", " hid ", "Most of all", *"0123456789"):
        assert word not in " ".join(made)


def test_whereabouts_agrees_with_a_replay_of_its_story():
    for seed in range(200):
        puzzle = TASKS["whereabouts"]().puzzle(Random(seed))
        place, held, lies, had = {}, {}, {}, {}
        for statement in puzzle.statements:
            name, *_, last = statement.rstrip(".").split()
            if "moved" in statement:
                place[name] = last
            elif "picked" in statement:
                assert lies.pop(last, place[name]) == place[name]
                held[last] = had[last] = name
            else:
                assert held.pop(last) == name
                lies[last] = place[name]
        for question in puzzle.questions:
            thing = question.text.split(",")[0].split()[-1]
            assert question.answers == (had[thing], place[held[thing]] if thing in held else lies[thing])


def test_variables_and_walks_follow_the_links():
    for seed in range(50):
        puzzle = TASKS["variables"]().puzzle(Random(seed))
        values = {}
        for statement in puzzle.statements:
            _, source, _, name = statement.rstrip(".").split()
            values[name] = values.get(source, source)
        for question in puzzle.questions:
            value = question.text.split("?")[0].split()[-1]
            assert sorted(question.answers) == sorted(name for name in values if values[name] == value)
        puzzle = TASKS["walk"]().puzzle(Random(seed), 30)
        after = dict(re.findall(r"([\w ]+) leads to ([\w ]+)", "".join(puzzle.statements)))
        for question in puzzle.questions:
            at, path = question.text.split("from ")[1].split(".")[0], []
            for _ in range(3):
                path.append(at := after[at])
            assert tuple(path) == question.answers


def test_common_and_frequent_words_are_the_most_counted_ones():
    for name in ("common_words", "frequent_words"):
        for seed in range(20):
            puzzle = TASKS[name]().puzzle(Random(seed), 150)
            words = [statement.rstrip(",") for statement in puzzle.statements]
            counts = sorted((words.count(word) for word in set(words)), reverse=True)
            assert sorted((words.count(word) for word in puzzle.questions[0].answers), reverse=True) == counts[:3]


def words(text):
    return len(text.split())


def unspaced(text):
    """Words, and two more for one that no space comes before."""
    return words(text) + (2 if not text.startswith(" ") else 0)


@pytest.mark.parametrize("name", TASKS)
def test_samples_fit_their_length_and_hold_their_facts(name):
    task = TASKS[name]()
    for length in (500, 3000):
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
            list(islice(samples(TASKS["passkey"](), length=60, n=1, seed=0, count=words, filler=filler), 1))


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
        assert expected - 3 <= sample.document.count(" is") <= expected, length
        assert words(sample.prompt) <= length
