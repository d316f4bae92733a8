"""Base class of tasks, and their samples: prompts with the expected answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Task:
    """A kind of question. `metrics` are names of `lce_lab.eval.metrics.METRICS`; the first metric gives the score."""

    name: str
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """One prompt and the expected answers.

    The prompt joins `before`, `document`, `question` and `opening`. Samples with equal `before` and `document` can
    share a context. `metric` compares a model's answer with `answers`.

    Published benchmarks put a template around all except `opening`. `template` is `none`, `chat` (the model's chat
    template, if any), or a text with `{prompt}` and perhaps `{system}`. If `fixed` is set, the user cannot choose
    another template. `cut` is a key of `lce_lab.eval.published.suite.CUTS` and says how to shorten a long prompt.
    """

    document: str
    question: str  # begins with the white space that separates document and question
    answers: tuple[str, ...]
    metric: str = "starts"
    answer: str = ""  # a perfect answer
    max_tokens: int | None = None  # of the model's answer; None stands for the tokens of `answer` plus two
    depth: float | None = None  # the place of the first fact: 0 is the document's beginning, 1 its end
    facts: tuple[str, ...] = ()  # literal parts of the document that the answer depends on
    before: str = ""
    opening: str = ""  # the beginning of the answer, given in the prompt
    template: str = "none"
    fixed: bool = False
    system: str = ""
    cut: str = "middle"
    kind: str = ""  # the question's task, in a document with questions of several tasks
    group: str = ""  # scores are also given by group, such as a length or a difficulty
    source: Mapping[str, Any] | None = None  # fields of the benchmark's data to copy to files of predictions
    n_tokens: int | None = None  # the tokens of the prompt, if a task's samples differ in length

    @property
    def beginning(self) -> str:
        return self.before + self.document

    @property
    def prompt(self) -> str:
        return self.beginning + self.question + self.opening

    @property
    def length(self) -> int | None:
        """The length in records and reports: `n_tokens` rounded up to a power of two."""
        return None if self.n_tokens is None else 1 << max(0, self.n_tokens - 1).bit_length()
