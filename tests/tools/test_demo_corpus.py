"""The demo model's corpus: reproducible, and every question has its answer before it."""

import re

import numpy as np
import pytest
from tokenizers import Tokenizer

from lce.weights.source import DEMO
from tools.demo_corpus import BOS, WEIGHT_ANSWER, Corpus

TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.mark.parametrize("length", [64, 512])
def test_a_seed_says_which_batches(length: int) -> None:
    first, again, other = (Corpus(TOKENIZER, seed).batch(4, length, 0.3) for seed in (1, 1, 2))
    assert all(map(np.array_equal, first, again))
    assert not np.array_equal(first[0], other[0])
    assert [x.shape for x in first] == [(4, length + 1), (4, length)]


def test_every_answer_stands_before_it_is_asked_for() -> None:
    ids, weights = Corpus(TOKENIZER, 5).batch(20, 512, 0.0)
    asked = 0
    for row, weight in zip(ids, weights, strict=True):
        starts = np.flatnonzero(row == TOKENIZER.token_to_id(BOS))
        answers = np.flatnonzero((weight[1:] >= WEIGHT_ANSWER) & (weight[:-1] < WEIGHT_ANSWER)) + 2
        for at in answers:
            end = at
            while end < 512 and weight[end - 1] >= WEIGHT_ANSWER:
                end += 1
            document = row[starts[starts < at].max() : at]
            answer, text = TOKENIZER.decode(row[at:end].tolist()), TOKENIZER.decode(document.tolist())
            assert all(word in text for word in re.findall(r"\w+", answer) if word not in ("and", "in"))
            asked += 1
    assert asked > 40


def test_every_format_comes_up_and_is_asked_about() -> None:
    corpus = Corpus(TOKENIZER, 2, formats=1.0)
    texts = [TOKENIZER.decode(row.tolist()) for row in corpus.batch(60, 512, 0.0)[0]]
    formats = "split key|codes of|words of|penguin|Key |common words|frequent|Repeat the|Which names|Walk |Where is the"
    for words in formats.split("|"):
        assert any(words in text for text in texts), words


def test_rows_without_documents_repeat_runs_of_tokens() -> None:
    ids, weights = Corpus(TOKENIZER, 3).batch(4, 64, 1.0)
    assert (ids[:, 0] == TOKENIZER.token_to_id(BOS)).all()
    assert set(np.unique(weights)) == {0.0, 1.0}
