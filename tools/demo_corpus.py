"""The demo model's training text: documents of simple prose that hide facts and then ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from random import Random

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from lce.eval.needles import NEEDLES, Needle
from lce.eval.passkey import NOISE
from lce.eval.prose import sentences

BOS, EOS = "<s>", "</s>"
WEIGHT_TEXT, WEIGHT_ANSWER, WEIGHT_COPY = 0.3, 4.0, 1.0


def train_tokenizer(vocab_size: int, seed: int) -> Tokenizer:
    """A byte-level BPE tokenizer with single digits, trained on our own prose and facts."""
    rng, prose = Random(seed), sentences(Random(seed))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()

    def texts() -> Iterator[str]:
        for _ in range(20_000):
            needle = rng.choice(list(NEEDLES.values()))(rng)
            yield " ".join([next(prose), next(prose), needle.statement, needle.question, needle.answer + "."])

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

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.rng = Random(seed)
        self.vocab_size = tokenizer.get_vocab_size()
        self.bos, self.eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
        self._prose = sentences(Random(seed + 1))
        self._encode = lru_cache(maxsize=200_000)(
            lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        )

    def batch(self, rows: int, length: int, copying: float) -> tuple[np.ndarray, np.ndarray]:
        """`rows` rows of `length` predictions; a share `copying` of them repeats runs of random tokens."""
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
        """Runs of random tokens, each repeated: trained on them, a model learns to copy."""
        ids, weights = [self.bos], [0.0]
        while len(ids) < size:
            run = [self.rng.randrange(2, self.vocab_size) for _ in range(self.rng.randint(4, max(5, size // 3)))]
            ids += run + run
            weights += [0.0] * (len(run) + 1) + [WEIGHT_COPY] * (len(run) - 1)
        return ids[:size], weights[:size]

    def _document(self, size: int) -> tuple[list[int], list[float]]:
        """A document of at most `size` tokens: prose, facts in it, questions after the facts."""
        rng = self.rng
        needles = self._needles(max(1, min(rng.randint(1, 2 + size // 64), 9)))
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
        noise = [self._encode(" " + text) for text in NOISE] if rng.random() < 0.15 else None
        filler: list[tuple[int, ...]] = []
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

    def _needles(self, n: int) -> list[Needle]:
        kinds, found = list(NEEDLES.values()), {}
        while len(found) < n:
            kind = NEEDLES["passkey"] if not found and self.rng.random() < 0.6 else self.rng.choice(kinds)
            needle = kind(self.rng)
            found.setdefault(needle.topic, needle)
        return self.rng.sample(list(found.values()), len(found))

    def _question(self, needle: Needle) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The question's ids and the answer's, the latter with its full stop."""
        whole = self._encode(f" {needle.question} {needle.answer}.")
        answer = self._encode(f" {needle.answer}.")
        return whole[: -len(answer)], answer
