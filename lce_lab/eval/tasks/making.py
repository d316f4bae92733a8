"""Makes samples of a generated task at a given length: statements in a filler, or as many statements as fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from random import Random
from typing import NamedTuple

from lce.errors import DataError, UsageError, nearest
from lce.files import path_of
from lce_lab.eval.prose import sentences
from lce_lab.eval.sample import Sample
from lce_lab.eval.tasks.base import MadeTask, Puzzle, Question

# The filler of the published pass key task repeats these sentences.
NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
Filler = Callable[[Random], Iterator[str]]  # yields endless sentences for one text


class Tokens(NamedTuple):
    """Functions that count a sentence's tokens: `first` at the beginning of a text; `later` within, after a space."""

    later: Callable[[str], int]
    first: Callable[[str], int]

    def more(self, sentence: str) -> int:
        """Return how many more tokens a sentence has at the beginning of a text than later in a text."""
        return self.first(sentence) - self.later(sentence)


def filler_named(name: str) -> Filler:
    """Return the filler `prose`, `noise`, or `essays:DIR`: the .txt files of a folder, from a random sentence on.

    Raises `UsageError` for other names, and `DataError` for a folder without text.
    """
    kind, _, folder = name.partition(":")
    if kind == "essays" and folder:
        return _essays(path_of(folder, "the folder of essays"))
    if name not in ("prose", "noise"):
        raise UsageError(f"unknown filler {name!r}; {nearest(kind, ('prose', 'noise', 'essays:FOLDER'))}")
    return sentences if name == "prose" else lambda rng: cycle(NOISE)


def _essays(folder: Path) -> Filler:
    try:
        files = sorted(folder.glob("*.txt"))
        text = " ".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    except OSError as error:
        raise DataError(f"cannot read the essays in {folder}: {error.strerror}; name a folder of .txt files") from error
    parts = [part for part in " ".join(text.split()).replace("? ", "?\n").replace(". ", ".\n").split("\n") if part]
    if not parts:
        raise DataError(f"{folder} has no text; expected a folder of .txt files")

    def from_anywhere(rng: Random) -> Iterator[str]:
        start = rng.randrange(len(parts))
        return cycle(parts[start:] + parts[:start])

    return from_anywhere


def samples(
    task: MadeTask,
    *,
    length: int,
    n: int,
    seed: int,
    count: Callable[[str], int],
    filler: str = "prose",
    depths: Sequence[float] = (),
    questions: int = 1,
) -> Iterator[Sample]:
    """Make `n` documents of at most `length` tokens (counted by `count`); yield a sample for each question.

    The same seed gives the same samples, but `n` changes the depths of facts. The facts of documents with a single fact
    stand at `depths` in turn, by default at even depths; several facts stand in order at random depths. A document has
    up to `questions` questions, adjacent in the result. Raises `UsageError` if a puzzle does not fit.
    """
    text = filler_named(filler)
    tokens = Tokens(cache(lambda sentence: count(" " + sentence)), cache(count))
    for index in range(n):
        rng = Random(f"{seed}/{task.name}/{length}/{index}")
        even = (index + rng.random()) / n
        depth = depths[index % len(depths)] if depths else even
        yield from _document(task, rng, length, depth, text, tokens, questions)


def _document(
    task: MadeTask, rng: Random, length: int, depth: float, filler: Filler, tokens: Tokens, questions: int
) -> Iterator[Sample]:
    puzzle = _filling(task, rng, length, tokens) if task.fills else task.puzzle(rng)
    asked = puzzle.questions[:questions]
    left = _left(puzzle, asked, length, tokens)
    if left < 0:
        needed = length - left
        raise UsageError(f"{task.name}: length is {length}; expected at least {needed} tokens for facts and question")
    body: list[str] = []
    if not task.fills:
        for sentence in filler(rng):
            if tokens.later(sentence) > left:
                break
            left -= tokens.later(sentence)
            body.append(sentence)
    if len(puzzle.statements) == 1:
        places = [round(depth * len(body))]  # for each statement, the index of the filler's sentence that follows
    else:
        places = sorted(rng.randint(0, len(body)) for _ in puzzle.statements)
    if body and places[0] and not puzzle.opening:  # the text begins with a sentence of the filler
        left -= tokens.more(body[0]) - tokens.more(puzzle.statements[0])
    if left < 0:
        del body[-1]
        places = [min(place, len(body)) for place in places]
    for place, statement in reversed(list(zip(places, puzzle.statements, strict=True))):
        body.insert(place, statement)
    document = " ".join([puzzle.opening, *body] if puzzle.opening else body)
    for question in asked:
        first = min(question.facts, default=0)
        where = depth if len(puzzle.statements) == 1 else (places[first] + first) / max(1, len(body))
        facts = tuple(puzzle.statements[i] for i in question.facts)
        answered = question.answers, question.metric or task.metrics[0], question.answer
        yield Sample(document, " " + question.text, *answered, depth=where, facts=facts, kind=question.kind)


def _left(puzzle: Puzzle, asked: Sequence[Question], length: int, tokens: Tokens) -> int:
    """Return the number of tokens left for a filler, if a text begins with a BOS token and then the puzzle."""
    texts = [puzzle.opening, *puzzle.statements] if puzzle.opening else puzzle.statements
    used = sum(map(tokens.later, texts)) + max(tokens.later(question.text) for question in asked)
    return length - used - 1 - tokens.more(texts[0])


def _filling(task: MadeTask, rng: Random, length: int, tokens: Tokens) -> Puzzle:
    """Return a puzzle of about as many statements as fit in `length` tokens.

    More statements need longer names, so the number of statements is found by guesses. A guess lies between the largest
    number that is known to fit and the smallest number that is known not to fit.
    """
    state, n = rng.getstate(), max(task.least, 8)
    fits: Puzzle | None = None
    most, too_many = 0, 1 << 62
    while True:
        rng.setstate(state)
        puzzle = task.puzzle(rng, n)
        left = _left(puzzle, puzzle.questions[:1], length, tokens)
        each = max(1.0, sum(map(tokens.later, puzzle.statements)) / len(puzzle.statements))
        if 0 <= left < 3 * each or (left < 0 and n == task.least):
            return puzzle
        if left < 0:
            too_many = min(too_many, n)
        elif n >= most:
            fits, most = puzzle, n
        if too_many - most <= 1:
            return fits or puzzle
        n = max(task.least, int(n + (left - 1.5 * each) / each))
        if not most < n < too_many:
            n = max(task.least, (most + too_many) // 2)
