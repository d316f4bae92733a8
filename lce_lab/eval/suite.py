"""Suites make samples of tasks and ask an engine these samples. `MadeSuite` is for the tasks that lce generates."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import lce
from lce.errors import UsageError, nearest, shown
from lce.methods import knob_values
from lce_lab.eval.record import Answer
from lce_lab.eval.running import ALONE, Asking, answers
from lce_lab.eval.sample import Sample, Task
from lce_lab.eval.scores import Score
from lce_lab.eval.tasks import TASKS, MadeTask
from lce_lab.eval.tasks.making import samples as make_samples

LARGEST_KNOB = 10_000
QUESTIONS = 4  # the default number of questions about a document in the modes shared and turns


@dataclass(frozen=True, kw_only=True)
class Suite(ABC):
    """A source of samples of tasks, which also asks an engine these samples."""

    scale: ClassVar[int] = 1  # the factor by which printed scores are multiplied
    asking: Asking = ALONE

    @abstractmethod
    def make(self, engine: lce.Engine, task: Any, length: int = 0) -> list[Sample]:
        """Return a task's samples, of `length` tokens if generated. Raises `UsageError` or `DataError` on failure."""

    @abstractmethod
    def setting(self, task: Any, length: int = 0) -> dict[str, Any]:
        """Return the fields that identify a task's samples in a record, without fields that have default values."""

    @abstractmethod
    def about(self, task: Any) -> dict[str, Any]:
        """Return the fields that describe a task in JSON results."""

    def averages(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the averages of task scores that the benchmark's authors define, by name."""
        return {}

    def prediction(self, sample: Sample, text: str) -> dict[str, Any]:
        """Return an answer as the JSON object of a file of predictions, in the benchmark's own layout."""
        raise NotImplementedError

    def answers(
        self, engine: lce.Engine, task: Task, length: int = 0, *, made: Sequence[Sample] | None = None, **how: Any
    ) -> list[tuple[Sample, Answer]]:
        """Ask an engine the samples of a task, or the samples `made`. `how` is for `lce_lab.eval.running.answers`."""
        made = self.make(engine, task, length) if made is None else made
        return answers(engine, made, setting=self.setting(task, length), asking=self.asking, **how)

    def evaluate(self, engine: lce.Engine, task: Task, length: int = 0, **how: Any) -> Score:
        """Return the score of an engine on a task. `how` is for `answers`."""
        return Score.of(answer for _, answer in self.answers(engine, task, length, **how))


@dataclass(frozen=True)
class MadeSuite(Suite):
    """A suite of generated tasks: `samples` documents for each task and length, with `questions` about each document.

    If documents have a single fact, the facts stand at `depths` in turn, by default at even depths. `filler` is
    explained in `lce_lab.eval.tasks.making.filler_named`. Raises `UsageError` for wrong depths, or an empty shard.
    """

    samples: int = 20
    seed: int = 0
    filler: str = "prose"
    depths: tuple[float, ...] = ()
    questions: int | None = None  # None: 1 in the mode `single`, else QUESTIONS

    def __post_init__(self) -> None:
        if self.asking.shard.index >= self.samples:
            raise UsageError(f"{self.samples} documents have none for shard {self.asking.shard}; take more samples")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise UsageError(f"depths are {shown(self.depths)}; expected numbers from 0 to 1")

    @property
    def n_questions(self) -> int:
        return self.questions or (1 if self.asking.mode == "single" else QUESTIONS)

    def make(self, engine: lce.Engine, task: MadeTask, length: int = 0) -> list[Sample]:
        how: dict[str, Any] = {"filler": self.filler, "depths": self.depths, "questions": self.n_questions}
        count = counter(engine)
        try:
            return list(make_samples(task, length=length, n=self.samples, seed=self.seed, count=count, **how))
        except UsageError:
            raise
        except (ValueError, IndexError) as error:
            raise UsageError(f"{task!r} cannot be made: {error}; take smaller knobs or a shorter length") from None

    def setting(self, task: MadeTask, length: int = 0) -> dict[str, Any]:
        filler = "none" if task.fills else self.filler.partition(":")[0]
        usual, n_questions = knob_values(type(task)()), self.n_questions
        knobs = {name: value for name, value in knob_values(task).items() if value != usual[name]}
        more = {"task_knobs": knobs, "depths": list(self.depths), "questions": n_questions if n_questions > 1 else None}
        made = {"task": task.name, "filler": filler, "length": length, "samples": self.samples, "seed": self.seed}
        return made | {name: value for name, value in more.items() if value}

    def about(self, task: MadeTask) -> dict[str, Any]:
        return {"task_knobs": knob_values(task)}

    def ceiling_lengths(self, engine: lce.Engine, task: MadeTask, lengths: Sequence[int]) -> list[int]:
        """Return the `lengths` at which text and answers fit the window; the last is the largest length that fits.

        No length is larger than the largest of `lengths`. Raises `UsageError` if a puzzle does not fit.
        """
        most, count = min(engine.window, max(lengths)), counter(engine)
        made = self.make(engine, task, most)
        answer = max(count(" " + sample.answer) + 2 for sample in made)
        question = max(count(sample.question) for sample in made)
        turns = self.n_questions if self.asking.mode == "turns" else 1
        beyond = most + turns * (answer + question) - question - engine.window
        most -= max(0, beyond)
        return [*sorted({length for length in lengths if length < most}), most]


def make_tasks(names: Sequence[str], knobs: Mapping[str, str] | None = None) -> list[MadeTask]:
    """Return the tasks called `names`; the name `all` stands for all tasks.

    `knobs` are values by name. The name KEY sets the knob of every task that has KEY, and TASK.KEY that of one task.
    Raises `UsageError` for a name or a knob that no task has.
    """
    names = list(TASKS) if "all" in names else list(dict.fromkeys(names))
    if (unknown := next((name for name in names if name not in TASKS), None)) is not None:
        raise UsageError(f"unknown task {shown(unknown)}; {nearest(unknown, [*TASKS, 'all'])}")
    fields = {f"{name}.{field.name}": field for name in names for field in dataclasses.fields(TASKS[name])}
    own: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in sorted((knobs or {}).items(), key=lambda knob: "." in knob[0]):  # so TASK.KEY overrides KEY
        meant = [full for full in fields if key in (full, fields[full].name)]
        if not meant:
            known = nearest(key, fields) if fields else f"{', '.join(names)} take none"
            raise UsageError(f"no task has the knob {shown(key)}; {known}")
        for full in meant:
            own[full.partition(".")[0]][fields[full].name] = _knob(key, value, type(fields[full].default))
    return [TASKS[name](**own[name]) for name in names]


def _knob(name: str, value: Any, kind: type) -> Any:
    try:
        made = kind(value)
    except (TypeError, ValueError):
        made = None
    if made is None or not 0 < made <= LARGEST_KNOB:  # excludes NaN, too
        word = "a whole number" if kind is int else "a number"
        raise UsageError(f"{name} is {shown(value)}; expected {word} above 0, and at most {LARGEST_KNOB:,}")
    return made


def counter(engine: lce.Engine) -> Callable[[str], int]:
    """Return a function that counts a text's tokens."""
    return lambda text: len(engine.tokenizer.encode(text, bos=False))
