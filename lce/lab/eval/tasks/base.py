"""Tasks: generators of puzzles, whose statements go into a text and whose questions end a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from lce.lab.eval.prose import ANIMALS, COLOURS, FOODS, THINGS
from lce.lab.eval.sample import Task

WORDS = tuple(dict.fromkeys([*THINGS, *ANIMALS, *FOODS, *COLOURS]))


@dataclass(frozen=True)
class Question:
    """A question whose last words begin the answer.

    `answer` is the expected continuation, without the full stop. `answers` are the texts that the metric looks for.
    `facts` are the numbers of the statements that the answer follows from.
    """

    text: str
    answer: str
    answers: tuple[str, ...]
    facts: tuple[int, ...]


@dataclass(frozen=True)
class Puzzle:
    """Statements, in the order in which they stand in the text, and questions about them."""

    statements: tuple[str, ...]
    questions: tuple[Question, ...]
    opening: str = ""  # begins the document


@dataclass(frozen=True)
class MadeTask(Task, ABC):
    """A task made here; its fields are its knobs.

    If `fills` is set, the statements are the whole text, as many as the length allows. Otherwise the knobs say how many
    statements a filler hides.
    """

    metrics = ("starts",)
    fills: ClassVar[bool] = False
    least: ClassVar[int] = 1  # statements of the smallest puzzle, where `fills` is set

    @abstractmethod
    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        """Return a puzzle, with `n` statements if `fills` is set."""


def digits(rng: Random, n: int) -> str:
    """Return `n` random digits."""
    return "".join(rng.choice("0123456789") for _ in range(n))


def distinct(rng: Random, n: int, make: Callable[[Random], str]) -> list[str]:
    """Return `n` different texts of `make(rng)`. Raises `ValueError` if `make` has too few."""
    found: dict[str, None] = {}
    misses = 0  # since the last new text
    while len(found) < n:
        before = len(found)
        found[make(rng)] = None
        misses = misses + 1 if len(found) == before else 0
        if misses > 1000 + 20 * len(found):
            raise ValueError(f"{n} different texts of a kind that has about {len(found)}")
    return list(found)


def names(rng: Random, n: int) -> list[str]:
    """Return `n` different names of three words, such as "red fox box"; more words beyond 3,420 names."""
    things = 1
    while len(COLOURS) * len(ANIMALS) * len(THINGS) ** things < 2 * n:
        things += 1

    def name(rng: Random) -> str:
        return " ".join([rng.choice(COLOURS), rng.choice(ANIMALS), *(rng.choice(THINGS) for _ in range(things))])

    return distinct(rng, n, name)
