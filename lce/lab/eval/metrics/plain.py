"""The metrics of our own tasks."""

from __future__ import annotations

from difflib import SequenceMatcher


def starts(answer: str, expected: tuple[str, ...]) -> float:
    """Return 1 where the answer, white space aside, begins with one of the expected texts."""
    return float(answer.strip().startswith(expected))


def recall(answer: str, expected: tuple[str, ...]) -> float:
    """Return the share of expected texts in the answer's first sentence, in any order (RULER's string match)."""
    first = answer.partition(".")[0]
    return sum(text in first for text in expected) / len(expected)


def similarity(answer: str, expected: tuple[str, ...]) -> float:
    """Return difflib's ratio between the answer's first sentence and the best expected text (MRCR)."""
    first = answer.strip().partition(".")[0]
    return max(SequenceMatcher(None, first, text).ratio() for text in expected)
