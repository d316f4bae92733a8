"""The demo model's training text: documents of simple prose with hidden facts and questions about the facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from random import Random

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from lce_lab.eval.prose import sentences
from lce_lab.eval.tasks.base import MadeTask, Puzzle
from lce_lab.eval.tasks.chains import Variables, Walk, Whereabouts
from lce_lab.eval.tasks.keys import (
    NEEDLES,
    CountingStars,
    Needle,
    PassKey,
    PublishedPassKey,
    SeveralKeys,
    SeveralQueries,
    SeveralValues,
    SplitPassKey,
)
from lce_lab.eval.tasks.lists import CommonWords, FrequentWords, NthRequest, Pairs
from lce_lab.eval.tasks.making import NOISE

BOS, EOS = "<s>", "</s>"
WEIGHT_TEXT, WEIGHT_LIST, WEIGHT_ANSWER, WEIGHT_COPY = 0.3, 0.05, 4.0, 1.0
LEAST_ANSWER = 24  # least tokens of answers that a document of a format counts for
Piece = tuple[tuple[int, ...], tuple[int, ...], float]  # ids of a text, ids of its answer, the text's weight

# Each format's frequency, and a function that draws its task for a document of some tokens.
FORMATS: tuple[tuple[float, Callable[[Random, int], MadeTask]], ...] = (
    (0.7, lambda rng, size: SplitPassKey(rng.randint(2, 3))),
    (0.7, lambda rng, size: SeveralKeys(rng.randint(2, 2 + size // 48))),
    (0.5, lambda rng, size: SeveralQueries(rng.randint(2, 2 + size // 64))),
    (2, lambda rng, size: SeveralValues(rng.randint(1, 2 + size // 200), rng.randint(0, size // 200))),
    (2, lambda rng, size: CountingStars(rng.randint(2, 2 + size // 100))),
    (0.7, lambda rng, size: Pairs()),
    (2, lambda rng, size: CommonWords()),
    (2, lambda rng, size: FrequentWords()),
    (2, lambda rng, size: NthRequest(rng.randint(1, 2))),
    (1, lambda rng, size: Variables(rng.randint(1, 1 + size // 200), rng.randint(1, 1 + size // 200))),
    (0.7, lambda rng, size: Walk(rng.randint(1, 1 + size // 128))),
    (2, lambda rng, size: Whereabouts(rng.randint(2, 4), rng.randint(1, 3), rng.randint(3, 4 + size // 40))),
)


def train_tokenizer(vocab_size: int, seed: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with single digits on our own prose and facts."""
    rng, prose = Random(seed), sentences(Random(seed))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()

    def texts() -> Iterator[str]:
        for _ in range(20_000):
            needle = rng.choice(NEEDLES).draw(rng)
            yield " ".join([next(prose), next(prose), needle.statement, needle.question, needle.answer + "."])
            puzzle = _drawn_task(rng, 256).puzzle(rng, 6)
            yield " " + " ".join([*puzzle.statements[:6], puzzle.questions[0].text, puzzle.questions[0].answer + "."])

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


class Corpus:
    """Batches of training rows: token ids `[rows, length + 1]` and the weight of predicting each next token."""

    def __init__(self, tokenizer: Tokenizer, seed: int, formats: float = 0.6) -> None:
        self.rng, self.formats = Random(seed), formats
        self.vocab_size = tokenizer.get_vocab_size()
        self.bos, self.eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
        self._prose = sentences(Random(seed + 1))
        self._encode = lru_cache(maxsize=200_000)(
            lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        )

    def batch(self, rows: int, length: int, copying: float) -> tuple[np.ndarray, np.ndarray]:
        """Return `rows` rows of `length` predictions; a share `copying` of the rows repeats runs of random tokens."""
        made = [self._row(length + 1, self.rng.random() < copying) for _ in range(rows)]
        ids = np.array([row[0] for row in made], dtype=np.int64)
        return ids, np.array([row[1] for row in made], dtype=np.float32)[:, 1:]

    def _row(self, size: int, copying: bool) -> tuple[list[int], list[float]]:
        if copying:
            return self._copies(size)
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < size:  # one long document, or several short ones
            left = size - len(ids)
            whole = left < 96 or self.rng.random() < 0.7
            document, weight = self._document(left if whole else self.rng.randint(64, left))
            ids += document
            weights += weight
        return ids[:size], weights[:size]

    def _copies(self, size: int) -> tuple[list[int], list[float]]:
        """Return repeated runs of random tokens, from which a model learns to copy."""
        ids, weights = [self.bos], [0.0]
        while len(ids) < size:
            run = [self.rng.randrange(2, self.vocab_size) for _ in range(self.rng.randint(4, max(5, size // 3)))]
            ids += run + run
            weights += [0.0] * (len(run) + 1) + [WEIGHT_COPY] * (len(run) - 1)
        return ids[:size], weights[:size]

    def _document(self, size: int) -> tuple[list[int], list[float]]:
        """Return a document of about `size` tokens: prose with facts and later questions, or one of the formats."""
        rng = self.rng
        if rng.random() < self.formats:
            made = self._puzzle_document(size)
            if made is not None:
                return made
        needles = self._needles(rng.randint(1, 2 + size // 40))
        parts: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = []  # position, text, answer
        used = 2
        for needle in needles:
            statement, position = self._encode(" " + needle.statement), rng.random()
            question = self._question(needle)
            cost = len(statement) + len(question[0]) + len(question[1])
            if used + cost > size and parts:
                break
            parts.append((position, statement, ()))
            parts.append((1 + rng.random() if rng.random() < 0.65 else rng.uniform(position, 1), *question))
            used += cost
        is_published = needles[0].question == PassKey.question and rng.random() < 0.15
        if is_published and used + len(self._encode(" " + PublishedPassKey.opening)) <= size:
            parts.append((-1, self._encode(" " + PublishedPassKey.opening), ()))
            used += len(parts[-1][1])
        noise = [self._encode(" " + text) for text in NOISE] if rng.random() < 0.15 else None
        filler: list[tuple[int, ...]] = []
        size = used + int((size - used) * rng.choice((0.0, 0.3, 1.0)))
        while True:
            text = noise[len(filler) % len(noise)] if noise else self._encode(" " + next(self._prose))
            if used + len(text) > size:
                break
            filler.append(text)
            used += len(text)
        parts += [((i + 0.5) / len(filler), text, ()) for i, text in enumerate(filler)]
        ids, weights = [self.bos], [0.0]
        for _, text, answer in sorted(parts, key=lambda part: part[0]):
            ids += text + answer
            weights += [WEIGHT_TEXT] * len(text) + [WEIGHT_ANSWER] * len(answer)
        return [*ids, self.eos], [*weights, WEIGHT_TEXT]

    def _puzzle_document(self, size: int) -> tuple[list[int], list[float]] | None:
        """Return a document of one of the formats; None if the drawn puzzle does not fit."""
        rng = self.rng
        task = _drawn_task(rng, size)
        least = max(task.least, getattr(task, "same", 0) + 1, getattr(task, "steps", 0) + 1)
        budget = size * rng.uniform(0.3, 0.9) if task.fills else size
        puzzle = task.puzzle(rng, least + size // 5)
        pieces = self._statements(task, puzzle)
        while task.fills and sum(len(text) for text, _, _ in pieces) > budget and len(puzzle.statements) > least:
            puzzle = task.puzzle(rng, max(least, min(len(puzzle.statements) * 4 // 5, len(puzzle.statements) - 1)))
            pieces = self._statements(task, puzzle)
        used, questions = 2 + sum(len(text) for text, _, _ in pieces), list[Piece]()
        for asked in puzzle.questions:
            whole = self._encode(f" {asked.text} {asked.answer}.")
            answer = self._encode(f" {asked.answer}.")
            if used + len(whole) <= size:
                questions.append((whole[: -len(answer)], answer, WEIGHT_LIST))
                used += len(whole)
        if not questions:
            return None
        if not task.fills:
            pieces = self._with_filler(pieces, int((size - used) * rng.choice((0.0, 0.3, 1.0))))
        ids, weights = [self.bos], [0.0]
        answered = sum(len(answer) for _, answer, _ in questions)
        answer_weight = WEIGHT_ANSWER * max(1.0, LEAST_ANSWER / answered)
        for text, answer, weight in pieces + questions:
            ids += text + answer
            weights += [weight] * len(text) + [answer_weight] * len(answer)
        return [*ids, self.eos], [*weights, WEIGHT_TEXT]

    def _statements(self, task: MadeTask, puzzle: Puzzle) -> list[Piece]:
        texts = [puzzle.opening, *puzzle.statements] if puzzle.opening else puzzle.statements
        return [(self._encode(" " + text), (), WEIGHT_LIST) for text in texts]

    def _with_filler(self, pieces: list[Piece], left: int) -> list[Piece]:
        """Return the pieces in order, with prose or noise at random places between."""
        rng, filler = self.rng, list[Piece]()
        noise = [self._encode(" " + text) for text in NOISE] if rng.random() < 0.1 else None
        while True:
            text = noise[len(filler) % len(noise)] if noise else self._encode(" " + next(self._prose))
            left -= len(text)
            if left < 0:
                break
            filler.append((text, (), WEIGHT_LIST))
        places = sorted(rng.randint(0, len(filler)) for _ in pieces)
        for place, piece in reversed(list(zip(places, pieces, strict=True))):
            filler.insert(place, piece)
        return filler

    def _needles(self, n: int) -> list[Needle]:
        found: dict[str, Needle] = {}
        while len(found) < n:
            kind = PassKey if not found and self.rng.random() < 0.6 else self.rng.choice(NEEDLES)
            needle = kind.draw(self.rng)
            found.setdefault(needle.question, needle)
        return self.rng.sample(list(found.values()), len(found))

    def _question(self, needle: Needle) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids of the question, and of the answer with its full stop."""
        whole = self._encode(f" {needle.question} {needle.answer}.")
        answer = self._encode(f" {needle.answer}.")
        return whole[: -len(answer)], answer


def _drawn_task(rng: Random, size: int) -> MadeTask:
    return rng.choices([make for _, make in FORMATS], [weight for weight, _ in FORMATS])[0](rng, size)
