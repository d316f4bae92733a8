"""The embedded demo model does what the README says, at lengths short enough for a test."""

from pathlib import Path

import pytest

import lce
from lce.weights.source import DEMO
from tests.asking import pass_keys

HAYSTACK = Path(__file__).parent.parent / "examples" / "haystack.txt"


def test_it_is_small_and_was_trained_on_a_short_window() -> None:
    engine = lce.load("demo")
    assert engine.window == 512
    assert sum(file.stat().st_size for file in DEMO.iterdir()) < 32 * 2**20


@pytest.mark.slow
def test_full_attention_answers_within_the_window_and_fails_beyond_it() -> None:
    engine = lce.load("demo", method="full")
    assert pass_keys(engine, 512, 20).mean >= 0.95
    assert pass_keys(engine, 4096, 6).mean <= 0.2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["longheads", "esa"])
def test_it_answers_beyond_the_window(method: str) -> None:
    assert pass_keys(lce.load("demo", method=method), 3000, 6).mean >= 0.8


@pytest.mark.slow
def test_esa_finds_the_fact_in_the_haystack() -> None:
    text = HAYSTACK.read_text()
    engine = lce.load("demo", method="esa")
    assert len(engine.tokenizer.encode(text)) > 31_000
    answer = text.partition("The pass key is ")[2][:5]
    assert answer in engine.generate(text, max_tokens=12).text
