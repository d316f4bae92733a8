"""`lce eval published`, `lce eval score` and `lce eval benchmarks`: a line a task, and the benchmark's own averages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lce
from lce.files import check_folder, write_whole
from lce.lab.eval.naming import cut
from lce.lab.eval.published import SUITES, Suite
from lce.lab.eval.published.base import Task
from lce.lab.eval.published.running import Benchmark, Outcome, Prompted
from lce.lab.eval.published.scoring import TaskScore, prediction_files, score_file
from lce.lab.eval.record import Record
from lce.lab.eval.running import make_folder
from lce.terminal.capacity import check_capacity
from lce.terminal.output import Output

HEADER = f"{'task':<26}{'method':<18}{'samples':>8}{'score':>8}  {'95% interval':<18}metric"


@dataclass(frozen=True)
class PublishedRun:
    """A run of `lce eval published`; `predictions` is a folder for the answers in the benchmark's own layout."""

    model: str
    methods: Sequence[lce.Method]
    benchmark: Benchmark
    tasks: Sequence[str]
    predictions: str | None
    loading: Mapping[str, Any]

    def measure(self, record: str | None, output: Output) -> None:
        """Measure and print task by task. Refusals of the first task come before the first line."""
        tasks = self.benchmark.tasks(self.tasks)
        answers = None if record is None else Record(record)
        if answers:
            answers.prepare()
        if self.predictions is not None:
            _make_folder(Path(self.predictions))
        engines: list[lce.Engine] = []
        for method in self.methods:
            engines.append(lce.load(self.model, method, sharing=engines[0] if engines else None, **self.loading))
        objects: list[dict[str, Any]] = []
        scores: dict[str, dict[str, float]] = {}
        for number, task in enumerate(tasks):
            made = self.benchmark.prompted(engines[0], task)
            longest = max((each.n_tokens + (each.sample.max_tokens or 0) for each in made), default=1)
            check_capacity(self.model, self.methods, longest, self.loading)
            if number == 0:
                output.text(HEADER)
            for engine, outcome in self._outcomes(engines, task, made, answers, output):
                label = engine.method.label
                scores.setdefault(label, {})[task.name] = outcome.published.score
                objects.append(outcome_object(self.benchmark, engine, outcome))
                output.text(row(label, outcome.published, outcome), *detail_lines(outcome.published))
                self._keep(label, task, outcome)
        for label, found in scores.items():
            for name, score in self.benchmark.suite.averages(found).items():
                objects.append({"suite": self.benchmark.suite.name, "average": name, "method": label, "score": score})
                output.text(f"{name:<26}{label:<18}{'':>8}{score:>8.2f}")
        output.object(objects)

    def _outcomes(
        self, engines: Sequence[lce.Engine], task: Task, made: Sequence[Prompted], answers: Record | None,
        output: Output,
    ) -> Iterator[tuple[lce.Engine, Outcome]]:  # fmt: skip
        longest = max((each.n_tokens + (each.sample.max_tokens or 0) for each in made), default=0)
        for engine in engines:
            noting = output.noting(engine.beyond(longest))
            with noting, output.bar(f"{task.name}, {engine.method.label}:", " samples") as bar:
                about = {"checkpoint": self.model}
                found = self.benchmark.evaluate(engine, task, made, record=answers, about=about, progress=bar)
            if found is not None:
                yield engine, found

    def _keep(self, label: str, task: Task, outcome: Outcome) -> None:
        if self.predictions is not None:
            path = Path(self.predictions) / label / f"{task.name}.jsonl"
            _make_folder(path.parent)
            lines = outcome.predictions(self.benchmark.suite)
            write_whole(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())


def _make_folder(folder: Path) -> None:
    """Make a folder in which files can be written. Raises `UsageError`."""
    make_folder(folder, "predictions")
    check_folder(folder / "predictions.jsonl")


def score_predictions(suite: Suite, path: str, task: str | None, metric: str | None, output: Output) -> None:
    """Score a file of predictions, or the files of a folder, and print a line a task."""
    found = [score_file(suite, each, task, metric) for each in prediction_files(suite, Path(path))]
    averages = {} if metric else suite.averages({each.task: each.score for each in found})
    output.object(
        [{"suite": suite.name, **dataclasses.asdict(each)} for each in found]
        + [{"suite": suite.name, "average": name, "score": score} for name, score in averages.items()]
    )
    output.text(f"{'task':<26}{'samples':>8}{'score':>8}  metric")
    for each in found:
        output.text(f"{each.task:<26}{each.samples:>8,}{each.score:>8.2f}  {each.metric}", *detail_lines(each))
    output.text(*(f"{name:<26}{'':>8}{score:>8.2f}" for name, score in averages.items()))


def row(method: str, found: TaskScore, outcome: Outcome) -> str:
    """Return one line under `HEADER`; scores are 0 to 100."""
    ends = f"{100 * outcome.score.low:.2f} to {100 * outcome.score.high:.2f}"
    return f"{found.task:<26}{method:<18}{found.samples:>8,}{found.score:>8.2f}  {ends:<18}{found.metric}"


def detail_lines(found: TaskScore) -> list[str]:
    """Return lines with the scores by group and by the task's other metrics."""
    lines = [f"  {cut(name)}: {score:.2f}" for name, score in found.groups.items()]  # names are of the user's files
    return lines + [f"  by {name}: {score:.2f}" for name, score in found.others.items()]


def outcome_object(benchmark: Benchmark, engine: lce.Engine, outcome: Outcome) -> dict[str, Any]:
    """Return a task's outcome for JSON; the interval is 0 to 100 too."""
    interval = {"low": 100 * outcome.score.low, "high": 100 * outcome.score.high, "interval": outcome.score.interval}
    found = {"suite": benchmark.suite.name, "method": engine.method.label, **dataclasses.asdict(outcome.published)}
    found["max_length"] = benchmark.asking.max_length
    return {**found, **interval, "read_bytes": outcome.score.read_bytes, "prompt_tokens": outcome.score.prompt_tokens}


def suite_object(suite: Suite) -> dict[str, Any]:
    """Return a benchmark's description, the source of its files, and its tasks."""
    return {
        "name": suite.name, "title": suite.title, "summary": " ".join((type(suite).__doc__ or "").split()),
        "files": suite.layout, "published": suite.data, "prompts_and_metrics": suite.source,
        "prompts": [name for name in suite.variants if name],
        "tasks": [dataclasses.asdict(task) for task in suite.tasks],
    }  # fmt: skip


def suite_lines(suite: Suite) -> list[str]:
    """Return the object of `suite_object` as text."""
    names = ", ".join(task.name for task in suite.tasks)
    lines = [f"{suite.name}: {suite.title}", f"  files: {suite.layout}", f"  published at: {suite.data}"]
    prompts = [f"  prompts: {', '.join(suite.variants)}"] if suite.variants != ("",) else []
    return [*lines, f"  prompts and metrics of: {suite.source}", *prompts, f"  tasks: {names}"]


def all_suites() -> list[Suite]:
    return list(SUITES.values())
