"""A sample: a document, a question about it, and how an answer is scored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One prompt and the expected answers.

    A model reads `document`, then `question`. Samples with one document can share a context. `metric` names a function
    of `lce.lab.eval.metrics.METRICS`, which compares a model's answer with `answers`.
    """

    document: str
    question: str  # begins with the white space behind the document
    answers: tuple[str, ...]
    metric: str = "starts"
    answer: str = ""  # a perfect answer; its length limits the model's answer
    max_tokens: int | None = None  # None: the tokens of `answer` plus two
    depth: float | None = None  # where the first fact stands: 0 is the document's beginning, 1 its end
    facts: tuple[str, ...] = ()  # literal parts of the document that the answer depends on

    @property
    def prompt(self) -> str:
        return self.document + self.question
