"""`lce eval score` and `lce eval benchmarks`: predictions of published benchmarks, and what the benchmarks are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from lce.lab.eval.naming import cut
from lce.lab.eval.published import Benchmark
from lce.lab.eval.published.scoring import TaskScore, prediction_files, score_file
from lce.terminal.output import Output


def score_predictions(benchmark: Benchmark, path: str, task: str | None, metric: str | None, output: Output) -> None:
    """Score a file of predictions, or the files of a folder, and print a line a task."""
    found = [score_file(benchmark, each, task, metric) for each in prediction_files(benchmark, Path(path))]
    averages = {} if metric else benchmark.averages({each.task: each.score for each in found})
    output.object(
        [{"suite": benchmark.name, **dataclasses.asdict(each)} for each in found]
        + [{"suite": benchmark.name, "average": name, "score": score} for name, score in averages.items()]
    )
    output.text(f"{'task':<26}{'samples':>8}{'score':>8}  metric")
    for each in found:
        output.text(f"{each.task:<26}{each.samples:>8,}{each.score:>8.2f}  {each.metric}", *detail_lines(each))
    output.text(*(f"{name:<26}{'':>8}{score:>8.2f}" for name, score in averages.items()))


def detail_lines(found: TaskScore) -> list[str]:
    """Return lines with the scores by group and by the task's other metrics."""
    lines = [f"  {cut(name)}: {score:.2f}" for name, score in found.groups.items()]  # names are of the user's files
    return lines + [f"  by {name}: {score:.2f}" for name, score in found.others.items()]


def benchmark_object(benchmark: Benchmark) -> dict[str, Any]:
    """Return a benchmark's description, the source of its files, and its tasks."""
    return {
        "name": benchmark.name, "title": benchmark.title, "summary": " ".join((type(benchmark).__doc__ or "").split()),
        "files": benchmark.layout, "published": benchmark.data, "prompts_and_metrics": benchmark.source,
        "prompts": [name for name in benchmark.variants if name],
        "tasks": [dataclasses.asdict(task) for task in benchmark.tasks],
    }  # fmt: skip


def benchmark_lines(benchmark: Benchmark) -> list[str]:
    """Return the object of `benchmark_object` as text."""
    names = ", ".join(task.name for task in benchmark.tasks)
    lines = [
        f"{benchmark.name}: {benchmark.title}",
        f"  files: {benchmark.layout}",
        f"  published at: {benchmark.data}",
    ]
    prompts = [f"  prompts: {', '.join(benchmark.variants)}"] if benchmark.variants != ("",) else []
    return [*lines, f"  prompts and metrics of: {benchmark.source}", *prompts, f"  tasks: {names}"]
