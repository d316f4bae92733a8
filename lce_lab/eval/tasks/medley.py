"""A text with the statements of several tasks: one prefill, and questions of all of them on forks of its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from random import Random

from lce_lab.eval.prose import COLOURS, NAMES, PLACES, THINGS
from lce_lab.eval.tasks.base import MadeTask, Puzzle, Question
from lce_lab.eval.tasks.chains import Variables
from lce_lab.eval.tasks.facts import Deck, FactsAtOnce, ManyFacts, OtherWords, Similar
from lce_lab.eval.tasks.keys import CountingStars, PassKey, SeveralFacts, SeveralKeys
from lce_lab.eval.tasks.lists import Pairs


@dataclass(frozen=True)
class TwoHops(MadeTask):
    """People keep things, and things come from places. The question asks where a person's thing came from."""

    name = "two_hops"
    people: int = 3

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        kinds = [rng.sample(words, self.people) for words in (NAMES, COLOURS, THINGS, PLACES)]
        statements, questions = [], []
        for i, (name, colour, thing, place) in enumerate(zip(*kinds, strict=True)):
            statements += [f"{name} keeps the {colour} {thing}.", f"The {colour} {thing} came from the {place}."]
            text = f"Where did the thing that {name} keeps come from? The thing that {name} keeps came from the"
            questions.append(Question(text, place, (place,), (2 * i, 2 * i + 1)))
        return _interleaved(rng, [[statement] for statement in statements], questions)


@dataclass(frozen=True)
class Medley(MadeTask):
    """Pass key, facts, keys, pairs, variables, counts and two hops in one text. A question is scored as its task does.

    A document is read once for all, so that many tasks and methods can be asked. `--mode shared --questions 40` asks
    all; reports have a table for each task.
    """

    name = "medley"
    keys: int = 4
    pairs: int = 8

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        parts = (PassKey(), SeveralFacts(), SeveralKeys(self.keys), Pairs(), Variables(), CountingStars(), TwoHops())
        return _joined(rng, [(task, task.puzzle(rng, self.pairs)) for task in parts], self.pairs)


@dataclass(frozen=True)
class FactsMedley(MadeTask):
    """Facts in words, in one text: 24 asked one by one and 12 of them by threes, 8 in other words, and 8 alike.

    A document is read once for 44 questions: `--mode shared --questions 44`. No word is in two facts. The questions
    are in random order, so fewer of them are of all kinds, too.
    """

    name = "facts_medley"

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        deck = Deck(rng)
        many, others = ManyFacts().of(rng, deck), [(task, task.of(rng, deck)) for task in (OtherWords(), Similar())]
        at_once = FactsAtOnce().joined(many.questions)[:4]
        made = _joined(rng, [(ManyFacts(), replace(many, questions=many.questions + at_once)), *others])
        return replace(made, questions=tuple(rng.sample(made.questions, len(made.questions))))


def _joined(rng: Random, parts: Sequence[tuple[MadeTask, Puzzle]], most: int | None = None) -> Puzzle:
    """Return one puzzle of the puzzles of several tasks, with at most `most` questions of each."""
    statements: list[list[str]] = []
    questions: list[Question] = []
    for task, puzzle in parts:
        first = sum(map(len, statements))
        statements.append(list(puzzle.statements))
        for question in puzzle.questions[:most]:
            kind, metric = question.kind or task.name, question.metric or task.metrics[0]
            facts = tuple(first + i for i in question.facts)
            questions.append(replace(question, facts=facts, kind=kind, metric=metric))
    return _interleaved(rng, statements, questions)


def _interleaved(rng: Random, groups: list[list[str]], questions: list[Question]) -> Puzzle:
    """Return a puzzle of the statements of `groups` in random order, but each group's in its own order.

    The facts of `questions` are indices of the statements as listed, group after group.
    """
    order = [group for group, statements in enumerate(groups) for _ in statements]
    rng.shuffle(order)
    flat = [statement for statements in groups for statement in statements]
    ends = list(accumulate(map(len, groups), initial=0))
    numbers = [iter(range(*ends)) for ends in pairwise(ends)]  # of each group, its statements' places in `flat`
    listed = [next(numbers[group]) for group in order]  # of each place in the text, its statement's place in `flat`
    place = {index: at for at, index in enumerate(listed)}
    moved = [replace(question, facts=tuple(sorted(place[i] for i in question.facts))) for question in questions]
    return Puzzle(tuple(flat[index] for index in listed), tuple(moved))
