"""A sample: a document, a question about it, and how an answer is scored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One prompt and what it should be answered with.

    A model reads `document` and then `question`; samples with one document can share a context. `metric` names a
    function of `lce.lab.eval.metrics.METRICS`, which compares a model's answer with `answers`.
    """

    document: str
    question: str  # begins with the white space that parts it from the document
    answers: tuple[str, ...]
    metric: str = "starts"
    answer: str = ""  # what a model that answers perfectly writes; its length limits the answer
    max_tokens: int | None = None  # None: as many as `answer` takes, and two more
    depth: float | None = None  # where the first fact stands: 0 is the document's beginning, 1 its end
    facts: tuple[str, ...] = ()  # the parts of the document that the answer depends on, word for word

    @property
    def prompt(self) -> str:
        return self.document + self.question
