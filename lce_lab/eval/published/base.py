"""Base classes of published benchmarks: rows of their files, tasks, and benchmarks with prompts and averages."""

from __future__ import annotations

import glob
import json
import os
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from lce.errors import DataError, UsageError, nearest, shown
from lce.files import JsonError, named, open_regular, parse_json
from lce_lab.eval.sample import Sample, Task

LONGEST_LINE = 64 << 20  # bytes; a book of InfiniteBench has some 10 million
DESCRIBED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("suites.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Row:
    """A JSON object in a file of a benchmark, whose fields are checked. `where` names file and line in errors."""

    content: dict[str, Any]
    where: str

    def __contains__(self, name: str) -> bool:
        return name in self.content

    def text(self, *names: str) -> str:
        """Return the text in the first field of `names` that the row has."""
        name, value = self._value(names)
        if not isinstance(value, str):
            raise self._strange(name, value, "a text")
        return value

    def number(self, name: str) -> float:
        _, value = self._value([name])
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._strange(name, value, "a number")
        return value

    def texts(self, *names: str) -> tuple[str, ...]:
        """Return a field's list of texts or numbers as texts. A single value counts as a list of one."""
        name, value = self._value(names)
        values = value if isinstance(value, list) else [value]
        if len(values) == 1 and isinstance(values[0], list):
            values = values[0]
        if not values or not all(isinstance(x, str | int | float) and not isinstance(x, bool) for x in values):
            raise self._strange(name, value, "texts or numbers")
        return tuple(x if isinstance(x, str) else repr(x) for x in values)

    def _value(self, names: Sequence[str]) -> tuple[str, Any]:
        name = next((name for name in names if name in self.content), None)
        if name is None:
            raise DataError(f"{self.where} has no {' or '.join(map(repr, names))}; expected the published layout")
        return name, self.content[name]

    def _strange(self, name: str, value: object, expected: str) -> DataError:
        return DataError(f"{name!r} of {self.where} is {shown(value, 40)}; expected {expected}")


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
    """An answer of a model or of a file of predictions, with the expected texts `answers`."""

    prediction: str
    answers: tuple[str, ...]
    group: str = ""


class Benchmark(ABC):
    """A published benchmark. `suites.toml` lists its tasks and describes it."""

    name: ClassVar[str]
    files: ClassVar[tuple[str, ...]] = ()  # a task's file in the data folder: path patterns with {task} for the name
    answer_field: ClassVar[str] = "pred"  # the field that has the answer in files of predictions

    def __init__(self) -> None:
        found = DESCRIBED[self.name]
        self.title: str = found["title"]
        self.source: str = found["source"]  # the repository of the prompts and metrics
        self.data: str = found["data"]  # where the data are published
        self.layout: str = found["layout"]  # the files that are expected under --data
        self.tasks = tuple(
            PublishedTask(name, tuple(metrics.split()), most, category)
            for name, metrics, most, category in found["tasks"]
        )
        self.variants: tuple[str, ...] = tuple(found.get("variants", [""]))  # sets of prompts; the first is the default

    def task(self, name: str) -> PublishedTask:
        """Return the task called `name`. Raises `UsageError` for an unknown name."""
        tasks = {task.name: task for task in self.tasks}
        if name not in tasks:
            raise UsageError(f"{self.name} has no task {name!r}; {nearest(name, tasks)}")
        return tasks[name]

    def variant(self, name: str | None) -> str:
        """Return the name of a set of prompts; None stands for the default. Raises `UsageError` for unknown names."""
        if name is None:
            return self.variants[0]
        if name not in self.variants or name == "":
            known = nearest(name, self.variants) if self.variants != ("",) else "leave it out: there is one set"
            raise UsageError(f"{self.name} has no prompts {name!r}; {known}")
        return name

    def paths(self, task: PublishedTask) -> tuple[str, ...]:
        """Return patterns of the path of a task's file in the data folder, the published path first."""
        return tuple(place.format(task=task.name) for place in self.files)

    @abstractmethod
    def samples(self, row: Row, index: int, task: PublishedTask, variant: str) -> Iterable[Sample]:
        """Return the samples of line `index` of the task's file, with the set of prompts called `variant`."""

    @abstractmethod
    def answered(self, row: Row, index: int, task: PublishedTask) -> Iterable[Answered]:
        """Return the answers in line `index` of a file of predictions."""

    def prediction(self, sample: Sample, text: str) -> dict[str, Any]:
        """Return an answer as the JSON object of a file of predictions, which `answered` can read."""
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
        """Yield the samples in a task's file in `folder`. Raises `DataError` for a missing or broken file."""
        for index, row in enumerate(json_rows(self.file(folder, *self.paths(task)))):
            yield from self.samples(row, index, task, variant)

    def predictions(self, path: Path, task: PublishedTask) -> Iterator[Answered]:
        """Yield the answers in a file of predictions."""
        for index, row in enumerate(json_rows(path)):
            yield from self.answered(row, index, task)

    def task_of(self, path: Path) -> PublishedTask | None:
        """Return the task that a file of predictions is named after; None if there is no such task."""
        stem = path.name.partition(".")[0].removeprefix("preds_")
        return next((task for task in self.tasks if task.name == stem), None)

    def averages(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the benchmark's own averages of task scores. An average is left out if a task's score is missing."""
        found = [value for members in self.by_category(scores).values() for value in members]
        return {"average": fmean(found)} if len(found) == len(self.tasks) else {}

    def by_category(self, scores: Mapping[str, float]) -> dict[str, list[float]]:
        """Return the scores of the tasks of each category, without categories of which a score is missing."""
        kinds = {kind: [x.name for x in self.tasks if x.category == kind] for kind in [x.category for x in self.tasks]}
        return {kind: [scores[x] for x in names] for kind, names in kinds.items() if scores.keys() >= set(names)}


def filled(template: str, **values: str) -> tuple[str, str, str]:
    """Fill a template; return the text before `{context}`, the context, the text after it. Other braces stay."""

    def put(text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)

    before, _, after = template.partition("{context}")
    return put(before), values["context"], put(after)


@cache
def prompts(name: str) -> Any:
    """Return the prompts of a benchmark: the content of the file `name`.json beside this module."""
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))


def row_of(content: Any, where: str) -> Row:
    """Return a JSON object as a row. Raises `DataError` for other values."""
    if not isinstance(content, dict):
        raise DataError(f"{where} is {shown(content, 40)}; expected a JSON object")
    return Row(content, where)


def find_file(folder: Path, places: Sequence[str]) -> Path | None:
    """Return the first existing file of `places`, patterns under `folder`; None if there is none. Two are refused."""
    for place in places:
        found = sorted(glob.glob(os.path.join(glob.escape(str(folder)), place)))
        if len(found) > 1:
            raise DataError(f"{named(found[0])} and {named(found[1])} are both of one task; leave one of them there")
        if found:
            return Path(found[0])
    return None


def json_rows(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON-lines file, or of a `.json` file with a list of objects."""
    is_empty = True
    for content, where in _entries(path) if path.suffix == ".json" else _lines(path):
        is_empty = False
        yield row_of(content, where)
    if is_empty:
        raise DataError(f"{named(path)} is empty; expected JSON objects")


def json_value(path: Path) -> Any:
    """Return the value of a JSON file."""
    with open(open_regular(path), "rb") as file:
        return _parsed(file.read(), named(path))


def _lines(path: Path) -> Iterator[tuple[Any, str]]:
    with open(open_regular(path), "rb") as file:
        for number, line in enumerate(iter(partial(file.readline, LONGEST_LINE + 1), b""), 1):
            where = f"line {number} of {named(path)}"
            if len(line) > LONGEST_LINE:
                raise DataError(f"{where} is longer than {LONGEST_LINE:,} bytes; expected a JSON object on each line")
            if line.strip():
                yield _parsed(line, where), where


def _entries(path: Path) -> Iterator[tuple[Any, str]]:
    content = json_value(path)
    if not isinstance(content, list):
        raise DataError(f"{named(path)} holds {shown(content, 40)}; expected a list of objects")
    for number, entry in enumerate(content, 1):
        yield entry, f"entry {number} of {named(path)}"


def _parsed(raw: bytes, where: str) -> Any:
    try:
        return parse_json(raw.removeprefix(b"\xef\xbb\xbf"), len(raw))
    except JsonError as error:
        raise DataError(f"{where}: {error}; expected the published layout") from None
