"""Scores of answers to a published benchmark: by task, by group, and its own averages. No model is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import fsum, prod
from pathlib import Path

from lce.errors import DataError, UsageError, nearest
from lce.files import named
from lce.lab.eval.metrics import METRICS
from lce.lab.eval.published.base import Answered, Suite, Task


@dataclass(frozen=True)
class TaskScore:
    """A task's score, 0 to 100: the mean over its samples, also by group and by each other metric of the task."""

    task: str
    metric: str
    samples: int
    score: float
    groups: Mapping[str, float] = field(default_factory=dict)
    others: Mapping[str, float] = field(default_factory=dict)


def scored(task: Task, answers: Iterable[Answered], metric: str | None = None) -> TaskScore | None:
    """Return the score of `answers`; None without any. `metric` replaces the task's own metrics."""
    sums: dict[str, list[float]] = {}
    groups: dict[str, list[float]] = {}
    for answer in answers:
        for number, name in enumerate((metric,) if metric else answer.metrics):
            value = METRICS[name](answer.prediction, answer.answers)
            sums.setdefault(name, []).append(value)
            if number == 0 and answer.group:
                groups.setdefault(answer.group, []).append(value)
    if not sums:
        return None
    means = {name: _percent(values) for name, values in sums.items()}
    first, *rest = means
    others = {name: means[name] for name in rest}
    if len(means) == 3:  # ROUGE: L-Eval also gives the geometric mean
        others["geometric_mean"] = prod(means.values()) ** (1 / 3)
    by_group = {name: _percent(values) for name, values in sorted(groups.items())}
    return TaskScore(task.name, first, len(sums[first]), means[first], by_group, others)


def _percent(values: list[float]) -> float:
    return 100 * fsum(values) / len(values)


def score_file(suite: Suite, path: Path, task: str | None = None, metric: str | None = None) -> TaskScore:
    """Return the score of a file of predictions in the benchmark's own layout.

    Without `task`, the file's name tells the task. Raises `UsageError` if the name tells none, and `DataError` for a
    file that cannot be read or that has no answer for this metric.
    """
    chosen = suite.task_of(path) if task is None else suite.task(task)
    if chosen is None:
        names = ", ".join(each.name for each in suite.tasks)
        raise UsageError(f"the name of {named(path)} tells no task of {suite.name}; give --task: {names}")
    if metric is not None and metric not in METRICS:
        raise UsageError(f"unknown metric {metric!r}; {nearest(metric, METRICS)}")
    found = scored(chosen, suite.predictions(path, chosen), metric)
    if found is None:
        raise DataError(f"{named(path)} has no answer that is scored without a judge; name another file")
    return found


def prediction_files(suite: Suite, path: Path) -> list[Path]:
    """Return the file `path`, or a folder's files whose names tell tasks. Raises `DataError` for none."""
    if not path.exists():
        raise DataError(f"{named(path)} does not exist; name a file of predictions, or a folder of them")
    if not path.is_dir():
        return [path]
    files = sorted(each for each in path.iterdir() if each.suffix in (".jsonl", ".json"))
    files = [each for each in files if suite.task_of(each) is not None and each.name != "result.json"]
    if not files:
        first = suite.tasks[0].name
        raise DataError(f"{named(path)} has no file of predictions of {suite.title}, such as {first}.jsonl")
    return files
