"""What a model is asked: a task, and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Task:
    """A task's name, and the metrics of its answers, names of `lce.lab.eval.metrics.METRICS`; the first one counts."""

    name: str
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """One prompt and the expected answers.

    A model reads `before`, `document`, `question` and `opening`. Samples with one beginning, `before` and `document`,
    can share a context. `metric` compares a model's answer with `answers`.

    A published benchmark puts a template around all but `opening`: `none`, `chat` (the model's chat template, if any),
    or a text with `{prompt}` and perhaps `{system}`. If `fixed` is set, the user cannot choose another. `cut` names the
    way to shorten a long prompt.
    """

    document: str
    question: str  # begins with the white space behind the document
    answers: tuple[str, ...]
    metric: str = "starts"
    answer: str = ""  # a perfect answer; its length limits the model's answer
    max_tokens: int | None = None  # None: the tokens of `answer` plus two
    depth: float | None = None  # where the first fact stands: 0 is the document's beginning, 1 its end
    facts: tuple[str, ...] = ()  # literal parts of the document that the answer depends on
    before: str = ""
    opening: str = ""  # begins the answer
    template: str = "none"
    fixed: bool = False
    system: str = ""
    cut: str = "middle"
    group: str = ""  # a length, a difficulty, ...: scores are also given by group
    source: Mapping[str, Any] | None = None  # fields that a file of predictions repeats
    n_tokens: int | None = None  # of the prompt, if the task has samples of several lengths

    @property
    def beginning(self) -> str:
        return self.before + self.document

    @property
    def prompt(self) -> str:
        return self.beginning + self.question + self.opening

    @property
    def length(self) -> int | None:
        """`n_tokens` rounded up to a power of two, as records and reports have it."""
        return None if self.n_tokens is None else 1 << max(0, self.n_tokens - 1).bit_length()
