"""`lce eval run` and `lce eval tasks`: tasks by lengths and methods, a line for each measured cell, or JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lce
from lce.errors import UsageError
from lce.lab.eval.naming import knob_values
from lce.lab.eval.record import Record
from lce.lab.eval.report import all_reach, fails
from lce.lab.eval.sample import Sample
from lce.lab.eval.scores import Score
from lce.lab.eval.suite import Suite
from lce.lab.eval.tasks import TASKS, Task
from lce.sizes import size_text
from lce.terminal.capacity import check_capacity
from lce.terminal.output import Output

HEADER = (
    f"{'task':<18}{'method':<18}{'length':>9}{'samples':>9}{'score':>8}  {'95% interval':<16}{'by':<11}read a token"
)
CEILING = "full, ceiling"


@dataclass(frozen=True)
class SuiteRun:
    """A run of `lce eval run`."""

    model: str
    methods: Sequence[lce.Method]
    lengths: Sequence[int]
    tasks: Sequence[Task]
    suite: Suite
    ceiling: bool
    loading: Mapping[str, Any]

    def measure(self, record: str | None, output: Output) -> None:
        """Measure and print the cells. Refusals come before the first line."""
        answers = None if record is None else Record(record)
        if answers:
            answers.prepare()
        check_capacity(self.model, self.methods, max(self.lengths), self.loading)
        engines = self._engines()
        full = self._full(engines) if self.ceiling else None
        within: list[int] = []  # lengths of the ceilings
        for task in self.tasks:
            self.suite.made(engines[0], task, min(self.lengths))  # raises if the task does not fit
            within.append(0 if full is None else self._within(full, task))
        objects: list[dict[str, Any]] = []
        with output.noting(*(engine.beyond(max(self.lengths)) for engine in engines)):
            output.text(HEADER)
            for task, length in zip(self.tasks, within, strict=True):
                objects += self._task(task, engines, full, length, answers, output)
        output.object(objects)

    def _within(self, full: lce.Engine, task: Task) -> int:
        try:
            return self.suite.ceiling_length(full, task, self.lengths)
        except UsageError as error:
            error.add_note("this is full attention within the window, which --no-ceiling leaves out")
            raise

    def _task(
        self, task: Task, engines: Sequence[lce.Engine], full: lce.Engine | None, length: int, answers: Record | None,
        output: Output,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Return the cells of a task. Unless `full` is None, `full` is asked first, at `length`."""
        objects: list[dict[str, Any]] = []
        top, reason = None, None
        if full is not None:
            top = self._cell(task, full, length, None, answers, output, ceiling=True)
            output.text(row(task, CEILING, length, top))
            objects.append(cell_object(task, full, length, top, ceiling=True))
            if (reason := fails(top)) is not None:
                output.text(f"{task.name} does not discriminate: {reason} within the window")
        for length in self.lengths:
            made = self.suite.made(engines[0], task, length)
            scores = []
            for engine in engines:
                scores.append(self._cell(task, engine, length, made, answers, output))
                output.text(row(task, engine.method.label, length, scores[-1], hidden=reason is not None))
            tells = None if top is None else reason is None and not all_reach(scores, top)
            if tells is False and reason is None:
                output.text(f"{task.name} does not discriminate at {length:,}: every method reaches the ceiling")
            cells = [cell_object(task, *cell) for cell in zip(engines, [length] * len(scores), scores, strict=True)]
            objects += [{**cell, "discriminates": tells} for cell in cells]
        return objects

    def _cell(
        self, task: Task, engine: lce.Engine, length: int, made: Sequence[Sample] | None, answers: Record | None,
        output: Output, *, ceiling: bool = False,
    ) -> Score:  # fmt: skip
        about = {"checkpoint": self.model} | ({"ceiling": True} if ceiling else {})
        label = f"{task.name}, {engine.method.label} at {length:,}:"
        with output.bar(label, " samples") as bar:
            return self.suite.evaluate(engine, task, length, made=made, record=answers, about=about, progress=bar)

    def _engines(self) -> list[lce.Engine]:
        """Return an engine for each method, over the same weights."""
        engines: list[lce.Engine] = []
        for method in self.methods:
            engines.append(lce.load(self.model, method, sharing=engines[0] if engines else None, **self.loading))
        return engines

    def _full(self, engines: Sequence[lce.Engine]) -> lce.Engine:
        """Return an engine of `full` with the checkpoint's own RoPE scaling."""
        plain = {**self.loading, "rope": None, "rope_factor": None}
        return lce.load(self.model, "full", sharing=engines[0], **plain)


def row(task: Task, method: str, length: int, score: Score, *, hidden: bool = False) -> str:
    """Return one line under `HEADER`; `hidden` replaces the score by a dash."""
    mean = "-" if hidden else f"{score.mean:.1%}"
    ends = "-" if hidden else f"{score.low:.1%} to {score.high:.1%}"
    read = "" if score.read_bytes is None else size_text(round(score.read_bytes))
    return f"{task.name:<18}{method:<18}{length:>9,}{score.samples:>9,}{mean:>8}  {ends:<16}{score.interval:<11}{read}"


def cell_object(task: Task, engine: lce.Engine, length: int, score: Score, *, ceiling: bool = False) -> dict[str, Any]:
    """Return a cell for JSON."""
    return {
        "task": task.name, "task_knobs": knob_values(task), "method": engine.method.label,
        "knobs": knob_values(engine.method), "length": length, "ceiling": ceiling, **dataclasses.asdict(score),
        "warning": engine.beyond(length),
    }  # fmt: skip


def task_object(name: str) -> dict[str, Any]:
    """Return a task's name, its question and source, its metric, and its knobs with defaults."""
    cls = TASKS[name]
    summary = " ".join((cls.__doc__ or "").split())
    return {"name": name, "summary": summary, "metric": cls.metric, "fills": cls.fills, "knobs": knob_values(cls())}


def task_lines(task: Mapping[str, Any]) -> list[str]:
    """Return the object of `task_object` as text."""
    knobs = " ".join(f"{name}={value}" for name, value in task["knobs"].items())
    text = "its own text" if task["fills"] else "hidden in a filler"
    return [task["name"], f"  {task['summary']}", f"  metric {task['metric']}; {text}{'; ' if knobs else ''}{knobs}"]
