"""Asks an engine a published benchmark: the items of a task as samples, by length, answered by the common runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lce.errors import UsageError
from lce.lab.eval.published.asking import AUTO, Asking
from lce.lab.eval.published.base import Answered, Item, Suite, Task, Tokens
from lce.lab.eval.published.scoring import TaskScore, scored
from lce.lab.eval.running import WHOLE, Shard, answers
from lce.lab.eval.scores import Score

if TYPE_CHECKING:
    from lce import Engine
    from lce.lab.eval.record import Answer, Record
    from lce.lab.eval.sample import Sample


@dataclass(frozen=True)
class Prompted:
    """An item, the sample that a model is asked, and the number of tokens in the prompt."""

    item: Item
    sample: Sample
    n_tokens: int

    @property
    def length(self) -> int:
        """The prompt's length in tokens, rounded up to a power of two; records and reports use this length."""
        return 1 << max(0, self.n_tokens - 1).bit_length()


@dataclass(frozen=True)
class Outcome:
    """A task's answers: the score as published, the mean with its interval, and each item with its answer."""

    published: TaskScore
    score: Score
    answered: Sequence[tuple[Item, Answer]]

    def predictions(self, suite: Suite) -> list[dict[str, Any]]:
        """Return the lines of a file of predictions in the benchmark's own layout."""
        return [suite.prediction(item, answer.answer or "") for item, answer in self.answered]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark in a folder of the user's files. `samples` limits the questions of a task; None asks all."""

    suite: Suite
    folder: Path
    variant: str = ""
    asking: Asking = field(default_factory=Asking)
    samples: int | None = None
    mode: str = "single"
    shard: Shard = WHOLE

    def __post_init__(self) -> None:
        if self.mode not in ("single", "shared"):
            raise UsageError(f"mode is {self.mode!r}; expected single or shared: its questions are independent")

    def tasks(self, names: Sequence[str] | None = None) -> list[Task]:
        """Return the tasks called `names`, or all whose files exist. Raises `UsageError` or `DataError`."""
        return [self.suite.task(name) for name in names] if names else self.suite.present(self.folder)

    def prompted(self, engine: Engine, task: Task) -> list[Prompted]:
        """Return the task's items as samples for a model. Raises `DataError` for files that are missing or broken."""
        tokenizer = engine.tokenizer
        self.asking.check(tokenizer)
        found = []
        items = self.suite.items(self.folder, task, self.variant, Tokens.of(tokenizer))
        for item in islice(items, self.samples):
            sample = self.asking.sample(item, tokenizer)
            found.append(Prompted(item, sample, len(tokenizer.encode(sample.prompt))))
        return found

    def evaluate(
        self, engine: Engine, task: Task, made: Sequence[Prompted] | None = None, *, record: Record | None = None,
        about: Mapping[str, Any] | None = None, progress: Callable[[int, int], None] | None = None,
    ) -> Outcome | None:  # fmt: skip
        """Return the task's outcome; None if this shard has none of the task's documents.

        See `lce.lab.eval.running.answers`.
        """
        made = self.prompted(engine, task) if made is None else made
        by_length: dict[int, list[Prompted]] = {}
        for each in made:
            by_length.setdefault(each.length, []).append(each)
        places = {id(each.sample): place for place, each in enumerate(made)}
        found: list[tuple[int, Answer]] = []
        before = 0  # documents of lesser lengths: a shard has every so many-th of all
        for length, group in sorted(by_length.items()):
            n_documents = sum(1 for _ in groupby(each.sample.document for each in group))
            shard = replace(self.shard, index=(self.shard.index - before) % self.shard.count)
            before += n_documents
            if shard.index >= n_documents:
                continue
            asked = answers(
                engine, [each.sample for each in group], setting=self._setting(task, length), mode=self.mode,
                record=record, shard=shard, about=about,
                progress=progress and _behind(progress, len(found), len(made)),
            )  # fmt: skip
            found += [(places[id(sample)], answer) for sample, answer in asked]
        answered = [(made[place].item, answer) for place, answer in sorted(found, key=itemgetter(0))]
        published = scored(task, (Answered(a.answer or "", x.answers, task.metrics, x.group) for x, a in answered))
        return None if published is None else Outcome(published, Score.of(a for _, a in answered), answered)

    def _setting(self, task: Task, length: int) -> dict[str, Any]:
        """Return the fields that identify a task's samples in a record; usual values are left out."""
        found: dict[str, Any] = {"task": f"{self.suite.name}:{task.name}", "length": length}
        if self.variant not in ("", self.suite.variants[0]):
            found["prompts"] = self.variant
        if self.asking.template != AUTO:
            found["template"] = self.asking.template
        if self.asking.max_length is not None:
            found["max_length"] = self.asking.max_length
        return found


def _behind(progress: Callable[[int, int], None], before: int, total: int) -> Callable[[int, int], None]:
    """Return a function that reports a part's progress as the whole's, with `before` samples done."""
    return lambda done, _total: progress(before + done, total)
