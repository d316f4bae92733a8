"""Metrics of LongBench (Bai et al., 2024) and LongBench v2, scored as metrics.py there does, with its oddities."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import SequenceMatcher

from lce_lab.eval.metrics import libraries, overlap

_COMMENT_SIGNS = ("`", "#", "//")


def _first_line(text: str) -> str:
    """Return the first line with text. After few-shot prompts, models write more examples on later lines."""
    return text.lstrip("\n").split("\n")[0]


def trivia_f1(prediction: str, references: tuple[str, ...]) -> float:
    """Return F1 of the first line (TriviaQA)."""
    return overlap.qa_f1(_first_line(prediction), references)


def dialogue_rouge(prediction: str, references: tuple[str, ...]) -> float:
    """Return ROUGE-L of the first line (SAMSum)."""
    return overlap.rouge_l(_first_line(prediction), references)


def count(prediction: str, references: tuple[str, ...]) -> float:
    """Return the share of the answer's numbers that equal the right number (PassageCount)."""
    numbers = re.findall(r"\d+", prediction)
    return max(numbers.count(reference) / len(numbers) if numbers else 0.0 for reference in references)


def retrieval(prediction: str, references: tuple[str, ...]) -> float:
    """Return the share of the answer's numbers that equal the number of a reference: `Paragraph 7` or `段落7`."""
    found = [re.search(r"(?:Paragraph |段落)(\d+)", reference) for reference in references]
    return count(prediction, tuple(number[1] if number else "" for number in found))


def code_similarity(prediction: str, references: tuple[str, ...]) -> float:
    """Return difflib's ratio of the answer's first line of code and the reference in whole percents, as published."""
    return _best_ratio(prediction, references, lambda *texts: SequenceMatcher(None, *texts).ratio())


def code_similarity_indel(prediction: str, references: tuple[str, ...]) -> float:
    """Score like `code_similarity`, but by the distance in insertions and deletions.

    Some papers use this ratio, which fuzzywuzzy computes if python-Levenshtein is installed. Scores on LCC and
    RepoBench-P are about 2 points higher than by `code_similarity`.
    """
    return _best_ratio(prediction, references, lambda *texts: libraries.library("rapidfuzz.fuzz").ratio(*texts) / 100)


def _best_ratio(prediction: str, references: tuple[str, ...], ratio: Callable[[str, str], float]) -> float:
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(sign in line for sign in _COMMENT_SIGNS)), "")

    def in_percent(reference: str) -> float:
        if line == reference:
            return 1.0
        return round(100 * ratio(line, reference)) / 100 if line and reference else 0.0

    return max(map(in_percent, references))


def classification(prediction: str, references: tuple[str, ...]) -> float:
    """Return 1 / n if the answer names n labels with the right label among them, else 0.

    The references are the right labels, an empty text, and all labels. A named label that is a substring of the right
    label does not count, except directly after another such label, as in LongBench's code.
    """
    border, prediction = references.index(""), _first_line(prediction)
    right, labels = references[:border], references[border + 1 :]
    return max(_share_of_labels(prediction, label, labels) for label in right)


def _share_of_labels(prediction: str, right: str, labels: tuple[str, ...]) -> float:
    found = [label for label in labels if label in prediction]
    at = 0
    while at < len(found):
        if found[at] in right and found[at] != right:
            found.remove(found[at])  # the next label moves to the index `at` and is skipped
        at += 1
    return 1 / len(found) if right in found else 0.0


def stated_letter(prediction: str, references: tuple[str, ...]) -> float:
    """Return 1 if the answer states the right letter, as in `The correct answer is (B)` (LongBench v2)."""
    text = prediction.strip().replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return float(found is not None and found[1] in references)
