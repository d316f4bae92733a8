"""The base of published benchmarks: files in the published layout, exact prompts, metrics, and averages."""

from __future__ import annotations

import json
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from lce.errors import DataError, UsageError, nearest
from lce.files import named
from lce.lab.eval.published.reading import Row, find_file, json_rows
from lce.lab.eval.sample import Sample, Task


@dataclass(frozen=True)
class PublishedTask(Task):
    """One task of a published benchmark. Answers have at most `max_tokens` tokens."""

    name: str
    metrics: tuple[str, ...]
    max_tokens: int
    category: str = ""  # some benchmarks average scores by category

    def sample(self, document: str, question: str, answers: tuple[str, ...], **more: Any) -> Sample:
        """Return a sample of this task. `more` are further fields of `Sample`."""
        return Sample(document, question, answers, self.metrics[0], max_tokens=self.max_tokens, **more)


@dataclass(frozen=True)
class Answered:
    """An answer to score, from a model or a file of predictions."""

    prediction: str
    answers: tuple[str, ...]
    group: str = ""


class Benchmark(ABC):
    """A published benchmark. Its tasks and texts are those of `suites.toml`."""

    name: ClassVar[str]
    files: ClassVar[tuple[str, ...]] = ()  # patterns of a task's file under the data folder, with {task}
    answer_field: ClassVar[str] = "pred"  # the field of the answer in files of predictions

    def __init__(self) -> None:
        found = _described()[self.name]
        self.title: str = found["title"]
        self.source: str = found["source"]  # the repository of the prompts and metrics
        self.data: str = found["data"]  # where the data are published
        self.layout: str = found["layout"]  # the files that are expected under --data
        self.tasks = tuple(
            PublishedTask(name, tuple(metrics.split()), most, category)
            for name, metrics, most, category in found["tasks"]
        )
        self.variants: tuple[str, ...] = tuple(found.get("variants", [""]))  # prompts; first the default

    def task(self, name: str) -> PublishedTask:
        """Return the task called `name`. Raises `UsageError`."""
        found = next((task for task in self.tasks if task.name == name), None)
        if found is None:
            raise UsageError(f"{self.name} has no task {name!r}; {nearest(name, [task.name for task in self.tasks])}")
        return found

    def variant(self, name: str | None) -> str:
        """Return `name` if there is such a set of prompts, and the default for None. Raises `UsageError`."""
        if name is None:
            return self.variants[0]
        if name not in self.variants or name == "":
            known = nearest(name, self.variants) if self.variants != ("",) else "leave it out: there is one set"
            raise UsageError(f"{self.name} has no prompts {name!r}; {known}")
        return name

    def paths(self, task: PublishedTask) -> tuple[str, ...]:
        """Return the patterns of the task's file under the data folder. The first is the published path."""
        return tuple(place.format(task=task.name) for place in self.files)

    @abstractmethod
    def samples(self, row: Row, index: int, task: PublishedTask, variant: str) -> Iterable[Sample]:
        """Make the samples of one line of the task's file."""

    @abstractmethod
    def answered(self, row: Row, index: int, task: PublishedTask) -> Iterable[Answered]:
        """Return the answers in one line of a file of predictions."""

    def prediction(self, sample: Sample, text: str) -> dict[str, Any]:
        """Return the line of an answer in a file of predictions, which `answered` can read."""
        return {**(sample.source or {}), self.answer_field: text}

    def present(self, folder: Path) -> list[PublishedTask]:
        """Return the tasks whose files exist. Raises `DataError`, which names the expected files, if there are none."""
        found = [task for task in self.tasks if find_file(folder, self.paths(task)) is not None]
        if not found:
            first = self.paths(self.tasks[0])[0]
            raise DataError(f"{named(folder)} has no file of {self.title}, such as {first}; {self.remedy}")
        return found

    @property
    def remedy(self) -> str:
        return f"put there what is published at {self.data}: {self.layout}"

    def file(self, folder: Path, *places: str) -> Path:
        """Return the first existing file of `places` under `folder`. Raises `DataError` if there is none."""
        path = find_file(folder, places)
        if path is None:
            raise DataError(f"{named(folder / places[0])} is missing; {self.remedy}")
        return path

    def read(self, folder: Path, task: PublishedTask, variant: str, tokenizer: Any) -> Iterator[Sample]:
        """Yield the samples of the user's file of a task. Raises `DataError` for a missing or broken file."""
        for index, row in enumerate(json_rows(self.file(folder, *self.paths(task)))):
            yield from self.samples(row, index, task, variant)

    def predictions(self, path: Path, task: PublishedTask) -> Iterator[Answered]:
        """Yield the answers in a file of predictions."""
        for index, row in enumerate(json_rows(path)):
            yield from self.answered(row, index, task)

    def task_of(self, path: Path) -> PublishedTask | None:
        """Return the task that the name of a file of predictions tells; None if it tells none."""
        stem = path.name.partition(".")[0].removeprefix("preds_")
        return next((task for task in self.tasks if task.name == stem), None)

    def averages(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the benchmark's own averages of task scores. An average needs the scores of all of its tasks."""
        if {task.name for task in self.tasks} - set(scores):
            return {}
        return {"average": sum(scores[task.name] for task in self.tasks) / len(self.tasks)}


def filled(template: str, **values: str) -> tuple[str, str, str]:
    """Fill a template; return the text before `{context}`, the context, and the text after.

    Braces that enclose no name of a value, and braces in values, stay as they are.
    """

    def put(text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)

    before, _, after = template.partition("{context}")
    return put(before), values["context"], put(after)


@cache
def _described() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("suites.toml").read_text(encoding="utf-8"))


@cache
def prompts(name: str) -> Any:
    """Return the content of the JSON file `name` in this folder: the prompts of a benchmark."""
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))
