"""Tasks of many facts in words, so that one reading of a text serves many questions. Templates are in facts.toml."""

from __future__ import annotations

import tomllib
from abc import abstractmethod
from pathlib import Path
from random import Random
from string import Formatter
from typing import Any

from lce_lab.eval import prose
from lce_lab.eval.tasks.base import MadeTask, Puzzle, Question
from lce_lab.eval.tasks.keys import ORDINALS

_FOUND: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
MANY: list[tuple[str, str, str]] = _FOUND["many"]["facts"]
OTHER: list[tuple[str, str, str, str]] = _FOUND["other"]["facts"]
ALIKE = len(ORDINALS)  # the number of statements that differ in one attribute


class Deck:
    """Words of each kind in random order. No word is drawn twice, so facts from one deck share none."""

    def __init__(self, rng: Random) -> None:
        words = prose.WORDS | {kind: text.split() for kind, text in _FOUND["words"].items()}
        self.words = {kind: rng.sample(each, len(each)) for kind, each in words.items()}

    def draw(self, template: str) -> dict[str, str]:
        """Return a new word for each kind that the template names. Raises `IndexError` if a kind has none left."""
        return {kind: self.words[kind].pop() for _, kind, _, _ in Formatter().parse(template) if kind}


class DeckTask(MadeTask):
    """A task whose facts use words of a deck, so that several such tasks can stand in one text."""

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        return self.of(rng, Deck(rng))

    @abstractmethod
    def of(self, rng: Random, deck: Deck) -> Puzzle:
        """Return a puzzle with words of `deck`."""


def _shuffled(rng: Random, statements: list[str], questions: list[Question]) -> Puzzle:
    rng.shuffle(questions)
    return Puzzle(tuple(statements), tuple(questions))


class ManyFacts(DeckTask):
    """Twenty-four facts of different kinds, in words. The question asks for one of them."""

    name = "many_facts"

    def of(self, rng: Random, deck: Deck) -> Puzzle:
        statements, questions = [], []
        for number, (statement, question, asked) in enumerate(rng.sample(MANY, len(MANY))):
            words = deck.draw(statement)
            told, answer = statement.format(**words), words[asked]
            statements.append(told)
            text = f"{question.format(**words)} {told[: told.rindex(answer)].rstrip()}"
            questions.append(Question(text, answer, (answer,), (number,)))
        return _shuffled(rng, statements, questions)


class FactsAtOnce(ManyFacts):
    """The facts of `many_facts`. A question asks for three of them, in the order of the question."""

    name = "facts_at_once"
    metrics = ("ruler.match_all",)

    def of(self, rng: Random, deck: Deck) -> Puzzle:
        puzzle = super().of(rng, deck)
        return Puzzle(puzzle.statements, self.joined(puzzle.questions))

    def joined(self, questions: tuple[Question, ...]) -> tuple[Question, ...]:
        """Return a question for each three of `questions`."""
        found = []
        for three in zip(questions[::3], questions[1::3], questions[2::3], strict=False):
            asked, begins = zip(*(question.text.split("? ") for question in three), strict=True)
            numbered = [f"({i}) {text}" for i, text in enumerate(asked, 1)]
            said = [f"({i}) {begin} {q.answer}" for i, (begin, q) in enumerate(zip(begins, three, strict=True), 1)]
            text = f"{'? '.join(numbered)}? Answers: (1) {begins[0]}"
            answer = ". ".join(said).removeprefix(f"(1) {begins[0]} ")
            answers, facts = tuple(question.answer for question in three), tuple(q.facts[0] for q in three)
            found.append(Question(text, answer, answers, facts, self.name, self.metrics[0]))
        return tuple(found)


class OtherWords(DeckTask):
    """Facts that are asked for in other words: no content word of a question is in its fact (NoLiMa, arXiv:2502.05167).

    For example, "Around the Eiffel Tower flew a drone." answers "What was seen in the sky over Paris?". NoLiMa asks for
    names of people. A model of 1.5B parameters hardly can do that, so each question asks for another kind of word.
    """

    name = "other_words"

    def of(self, rng: Random, deck: Deck) -> Puzzle:
        statements, questions = [], []
        for number, (statement, question, asked, begin) in enumerate(rng.sample(OTHER, len(OTHER))):
            words = deck.draw(statement)
            statements.append(statement.format(**words))
            text = f"\n\nQuestion: {question}\nAnswer with words from the text.\nAnswer: {begin}"
            questions.append(Question(text, words[asked], (words[asked],), (number,)))
        return _shuffled(rng, statements, questions)


class Similar(DeckTask):
    """Eight statements that differ in a colour and a thing. The question names the colour."""

    name = "similar"

    def of(self, rng: Random, deck: Deck) -> Puzzle:
        statements, questions = [], []
        for number in range(ALIKE):
            words = deck.draw("{colour} {thing}")
            begin = "In the {colour} drawer lies the".format(**words)
            statements.append(f"{begin} {words['thing']}.")
            text = "What lies in the {colour} drawer?".format(**words)
            questions.append(Question(f"{text} {begin}", words["thing"], (words["thing"],), (number,)))
        return _shuffled(rng, statements, questions)


class SimilarInOrder(DeckTask):
    """Eight statements that differ in one word. The question asks for the i-th of them (MRCR, arXiv:2409.12640)."""

    name = "similar_in_order"

    def of(self, rng: Random, deck: Deck) -> Puzzle:
        name = deck.draw("{name}")["name"]
        things = [deck.draw("{thing}")["thing"] for _ in range(ALIKE)]
        statements = [f"Then {name} said the word {thing}." for thing in things]
        questions = []
        for number, (ordinal, thing) in enumerate(zip(ORDINALS, things, strict=True)):
            text = f"Which word did {name} say {ordinal}? The {ordinal} word that {name} said was"
            questions.append(Question(text, thing, (thing,), (number,)))
        return _shuffled(rng, statements, questions)
