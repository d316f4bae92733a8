"""Scores answers to a published benchmark, by task, group and metric. No model is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import fsum, prod
from pathlib import Path

from lce.errors import DataError, UsageError, nearest
from lce.files import named
from lce_lab.eval.metrics import METRICS
from lce_lab.eval.published.base import Answered, Benchmark
from lce_lab.eval.sample import Task


@dataclass(frozen=True)
class TaskScore:
    """A task's mean score over samples, 0 to 100, also by group of samples and by the task's other metrics."""

    task: str
    metric: str
    samples: int
    score: float
    groups: Mapping[str, float] = field(default_factory=dict)
    others: Mapping[str, float] = field(default_factory=dict)


def scored(task: Task, answers: Iterable[Answered], metric: str | None = None) -> TaskScore | None:
    """Return the score of a task's answers; None without answers. `metric` replaces the task's own metrics."""
    found = list(answers)
    if not found:
        return None
    first, *rest = (metric,) if metric else task.metrics
    score, values = _percent(first, found)
    groups: dict[str, list[float]] = {}
    for answer, value in zip(found, values, strict=True):
        if answer.group:
            groups.setdefault(answer.group, []).append(value)
    others = {name: _percent(name, found)[0] for name in rest}
    if len(rest) == 2:  # three kinds of ROUGE; L-Eval also reports their geometric mean
        others["geometric_mean"] = prod([score, *others.values()]) ** (1 / 3)
    by_group = {name: 100 * fsum(members) / len(members) for name, members in sorted(groups.items())}
    return TaskScore(task.name, first, len(found), score, by_group, others)


def _percent(metric: str, answers: list[Answered]) -> tuple[float, list[float]]:
    values = [METRICS[metric](answer.prediction, answer.answers) for answer in answers]
    return 100 * fsum(values) / len(values), values


def score_file(benchmark: Benchmark, path: Path, task: str | None = None, metric: str | None = None) -> TaskScore:
    """Return the score of a file of predictions. Without `task`, the file's name must name the task."""
    chosen = benchmark.task_of(path) if task is None else benchmark.task(task)
    if chosen is None:
        names = ", ".join(each.name for each in benchmark.tasks)
        raise UsageError(f"the name of {named(path)} tells no task of {benchmark.name}; give --task: {names}")
    if metric is not None and metric not in METRICS:
        raise UsageError(f"unknown metric {metric!r}; {nearest(metric, METRICS)}")
    found = scored(chosen, benchmark.predictions(path, chosen), metric)
    if found is None:
        raise DataError(f"{named(path)} has no answer that is scored without a judge; name another file")
    return found


def prediction_files(benchmark: Benchmark, path: Path) -> list[Path]:
    """Return `path`, or the files named after tasks in the folder `path`. Raises `DataError` if no file is found."""
    if not path.exists():
        raise DataError(f"{named(path)} does not exist; name a file of predictions, or a folder of them")
    if not path.is_dir():
        return [path]
    files = sorted(each for each in path.iterdir() if each.suffix in (".jsonl", ".json"))
    files = [each for each in files if benchmark.task_of(each) is not None and each.name != "result.json"]
    if not files:
        first = benchmark.tasks[0].name
        raise DataError(f"{named(path)} has no file of predictions of {benchmark.title}, such as {first}.jsonl")
    return files
