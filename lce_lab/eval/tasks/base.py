"""Base of the tasks that lce generates. A task makes puzzles: statements to put into a text, and questions to ask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from lce_lab.eval.prose import ANIMALS, COLOURS, FOODS, THINGS
from lce_lab.eval.sample import Task

WORDS = tuple(dict.fromkeys([*THINGS, *ANIMALS, *FOODS, *COLOURS]))


@dataclass(frozen=True)
class Question:
    """A question, and the beginning of a sentence that the answer completes.

    `answer` is the expected continuation without the full stop. `answers` are the texts that the metric looks for.
    `facts` are the indices of the statements from which the answer follows. In a text with questions of several tasks,
    `kind` is the question's task, and `metric` that task's.
    """

    text: str
    answer: str
    answers: tuple[str, ...]
    facts: tuple[int, ...]
    kind: str = ""
    metric: str = ""  # the task's own, if empty


@dataclass(frozen=True)
class Puzzle:
    """Statements, in the order of the text, and questions about the statements."""

    statements: tuple[str, ...]
    questions: tuple[Question, ...]
    opening: str = ""  # the beginning of the document


@dataclass(frozen=True)
class MadeTask(Task, ABC):
    """A task that lce generates. Its dataclass fields are the task's knobs.

    If `fills` is set, a text consists of as many statements as the length allows. Otherwise the knobs say how many
    statements there are, and the statements are hidden in a filler.
    """

    metrics = ("starts",)
    fills: ClassVar[bool] = False
    least: ClassVar[int] = 1  # the number of statements of the smallest puzzle, if `fills` is set

    @abstractmethod
    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        """Return a puzzle, with `n` statements if `fills` is set."""


def digits(rng: Random, n: int) -> str:
    """Return `n` random digits."""
    return "".join(rng.choice("0123456789") for _ in range(n))


def distinct(rng: Random, n: int, make: Callable[[Random], str]) -> list[str]:
    """Return `n` different texts, each made by `make(rng)`. Raises `ValueError` if `make` cannot make as many."""
    found: dict[str, None] = {}
    misses = 0  # the draws since the last new text
    while len(found) < n:
        before = len(found)
        found[make(rng)] = None
        misses = misses + 1 if len(found) == before else 0
        if misses > 1000 + 20 * len(found):
            raise ValueError(f"{n} different texts of a kind that has about {len(found)}")
    return list(found)


def names(rng: Random, n: int) -> list[str]:
    """Return `n` different names of three words, such as "red fox box"; of more words if `n` is above 3,420."""
    things = 1
    while len(COLOURS) * len(ANIMALS) * len(THINGS) ** things < 2 * n:
        things += 1

    def name(rng: Random) -> str:
        return " ".join([rng.choice(COLOURS), rng.choice(ANIMALS), *(rng.choice(THINGS) for _ in range(things))])

    return distinct(rng, n, name)
