"""Counting-Stars (Song et al., 2025): 32 counts of stars, right or corrected, scattered over a long text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lce.errors import DataError
from lce.lab.eval.published.base import Answered, Benchmark, PublishedTask
from lce.lab.eval.published.reading import Row
from lce.lab.eval.sample import Sample

# The wrong counts of the published files with 32 counts; other files give the wrong counts in their text.
WRONG = ("16 116 43 70 59 106 8 48 112 67 25 101 82 93 76 62 6 18 108 4 34 53 85 90 126 22 45 121 39 96 75 30").split()
_CORRECTED = (
    r"counted (\d+) ★, but found that a mistake had been made, so the counting was done again, and this time (\d+) ★",
    r"小企鹅数了(\d+)颗★，但发现数错了，于是又数了一遍，这次数对了，是(\d+)颗★",
)


class CountingStars(Benchmark):
    """Counting-Stars' four tasks: two kinds of evidence in two languages.

    The published code sends the prompt to chat models and sets no limit on the answer; here the limit is 512 tokens.
    A sample's `group` is its context length in words or characters.
    """

    name = "counting-stars"
    answer_field = "answer"

    def paths(self, task: PublishedTask) -> tuple[str, ...]:
        kind, _, language = task.name.partition("_")
        older = {"acquisition": "searching", "reasoning": "reasoning"}[kind]
        names = [f"Counting_Stars_{language.upper()}_*{word}_*.jsonl" for word in (kind, older)]
        return (*names, *(f"test_data/{name}" for name in names))

    def samples(self, row: Row, index: int, task: PublishedTask, variant: str) -> Iterator[Sample]:
        text, question = row.text("question"), row.text("retrieval_question")
        fields = ("context_size", "reference_counting_results", "retrieval_question")
        source = {name: row.content.get(name) for name in fields}
        references = _references(row, task)
        if task.name.startswith("reasoning"):
            source["corrected"] = list(references)
        how = {"template": "chat", "cut": "none", "group": str(row.content.get("context_size", "")), "source": source}
        yield task.sample(text.removesuffix(question), question if text.endswith(question) else "", references, **how)

    def answered(self, row: Row, index: int, task: PublishedTask) -> Iterator[Answered]:
        group = str(row.content.get("context_size", ""))
        yield Answered(row.text("answer"), _references(row, task), group)

    def task_of(self, path: Path) -> PublishedTask | None:
        name = path.name.lower()
        kind = "reasoning" if "reasoning" in name else "acquisition"
        language = next((x for x in ("zh", "en") if f"_{x}" in name), None)
        return None if language is None else self.task(f"{kind}_{language}")


def _references(row: Row, task: PublishedTask) -> tuple[str, ...]:
    """Return the right counts; for reasoning tasks, each with the wrong count that it corrects."""
    right = row.texts("reference_counting_results")
    if task.name.startswith("acquisition"):
        return right
    if "corrected" in row:
        return row.texts("corrected")
    wrong = _wrong_counts(row.text("question")) if "question" in row else {}
    if not wrong and len(right) == len(WRONG):
        return tuple(f"{a}/{b}" for a, b in zip(right, WRONG, strict=True))
    if not set(right) <= set(wrong):
        raise DataError(f"{row.where} does not tell the counts that are corrected; expected its 'question' too")
    return tuple(f"{a}/{wrong[a]}" for a in right)


def _wrong_counts(text: str) -> dict[str, str]:
    return {right: wrong for pattern in _CORRECTED for wrong, right in re.findall(pattern, text)}
