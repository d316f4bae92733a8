"""Tasks whose text is one long list of pairs, words or requests."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from lce_lab.eval.prose import ANIMALS
from lce_lab.eval.tasks.base import WORDS, MadeTask, Puzzle, Question, digits, names
from lce_lab.eval.tasks.keys import ORDINALS, check_ordinals

FORMS = "song tale joke poem riddle prayer".split()


@dataclass(frozen=True)
class Pairs(MadeTask):
    """Keys and values. The question asks for one value (key-value retrieval, arXiv:2307.03172)."""

    name = "pairs"
    fills = True

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        keys = names(rng, max(1, n))
        values = [digits(rng, 4) for _ in keys]
        questions = tuple(
            Question(f"What has key {keys[i]}? Key {keys[i]} has", values[i], (values[i],), (i,))
            for i in rng.sample(range(len(keys)), min(16, len(keys)))
        )
        return Puzzle(tuple(f"Key {key} has {value}." for key, value in zip(keys, values, strict=True)), questions)


@dataclass(frozen=True)
class CommonWords(MadeTask):
    """A list of words, `common` of which are `ratio` times as frequent as each other word (RULER's common words)."""

    name = "common_words"
    metrics = ("recall",)
    fills = True
    least = 12
    common: int = 3
    ratio: int = 10

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        others = max(1, min(len(WORDS) - self.common, max(n, self.least) - self.common * 3))
        words = rng.sample(WORDS, self.common + others)
        weights = [self.ratio] * self.common + [1] * others
        drawn = _drawn(rng, words, weights, max(n, self.least))
        return _word_list(drawn, words[: self.common], "Which words are common? The common words are")


@dataclass(frozen=True)
class FrequentWords(MadeTask):
    """Words with frequencies by Zipf's law. The question asks for the most frequent words (RULER's frequent words)."""

    name = "frequent_words"
    metrics = ("recall",)
    fills = True
    least = 12
    asked: int = 3
    exponent: float = 2.0

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        words = rng.sample(WORDS, 40)
        weights = [rank**-self.exponent for rank in range(1, len(words) + 1)]
        drawn = _drawn(rng, words, weights, max(n, self.least))
        best = sorted(set(drawn), key=lambda word: (-drawn.count(word), drawn.index(word)))[: self.asked]
        return _word_list(drawn, best, "Which words are most frequent? The most frequent words are")


def _drawn(rng: Random, words: list[str], weights: list[float] | list[int], n: int) -> list[str]:
    """Return `n` words in random order. The counts of words are proportional to `weights`, apart from rounding."""
    sums = list(accumulate(weights))
    drawn = [words[bisect_left(sums, (i + 0.5) / n * sums[-1])] for i in range(n)]
    rng.shuffle(drawn)
    return drawn


def _word_list(drawn: list[str], asked: list[str], question: str) -> Puzzle:
    """Return a puzzle that lists the words `drawn`. The answer has the words `asked` in the order of the list."""
    answers = tuple(sorted(asked, key=lambda word: drawn.index(word) if word in drawn else len(drawn)))
    facts = tuple(i for i, word in enumerate(drawn) if word in answers)
    statements = tuple(f"{word}," for word in drawn)
    return Puzzle(statements, (Question(question, ", ".join(answers), answers, facts),), "Here are words:")


@dataclass(frozen=True)
class NthRequest(MadeTask):
    """Requests and replies. One request recurs; the question asks for its i-th reply (MRCR, arXiv:2409.12640)."""

    name = "nth_request"
    metrics = ("similarity",)
    fills = True
    least = 4
    same: int = 2

    def puzzle(self, rng: Random, n: int = 0) -> Puzzle:
        check_ordinals("same", self.same)
        n = max(n, self.least, self.same + 1)
        kinds = [f"a {form} about the {animal}" for form in FORMS for animal in ANIMALS]
        rng.shuffle(kinds)
        wanted, others = kinds[0], kinds[1:]
        requests = [wanted] * self.same + [rng.choice(others) for _ in range(n - self.same)]
        rng.shuffle(requests)
        replies = [" ".join(rng.sample(WORDS, 4)) for _ in requests]
        places = [i for i, request in enumerate(requests) if request == wanted]
        questions = tuple(
            Question(f"Repeat the {ORDINALS[i]} reply to {wanted}. It was:", replies[at], (replies[at],), (at,))
            for i, at in rng.sample(list(enumerate(places)), len(places))
        )
        statements = tuple(f"Asked for {a}. Reply: {b}." for a, b in zip(requests, replies, strict=True))
        return Puzzle(statements, questions)
