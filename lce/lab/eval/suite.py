"""Suites: tasks, lengths and methods, and each task's ceiling within the model's window.

suite = Suite(samples=20)
for task in make_tasks(["passkey", "variables"], {"variables.hops": "3"}):
    print(suite.ceiling(lce.load("demo"), task, [512, 2048]))
    print(suite.evaluate(lce.load("demo", "longheads"), task, 2048))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lce.errors import UsageError, nearest, shown
from lce.lab.eval.naming import knob_values
from lce.lab.eval.running import MODES, WHOLE, Shard, check_contexts, evaluate
from lce.lab.eval.scores import Score
from lce.lab.eval.tasks import TASKS, Task
from lce.lab.eval.tasks.making import samples

if TYPE_CHECKING:
    from lce import Engine
    from lce.lab.eval.record import Record
    from lce.lab.eval.sample import Sample

LARGEST_KNOB = 10_000
QUESTIONS = 4  # of a document, if several are asked and no number is given


def make_tasks(names: Sequence[str], knobs: Mapping[str, str] | None = None) -> list[Task]:
    """Return the tasks called `names`, `all` for all. A knob KEY is for every task with KEY, TASK.KEY for one task.

    Raises `UsageError` for a name or a knob that no task has.
    """
    names = list(TASKS) if "all" in names else list(dict.fromkeys(names))
    for name in names:
        if name not in TASKS:
            raise UsageError(f"unknown task {shown(name)}; {nearest(name, [*TASKS, 'all'])}")
    given = dict(knobs or {})
    used: set[str] = set()
    tasks = []
    for name in names:
        kinds = {field.name: type(field.default) for field in dataclasses.fields(TASKS[name])}
        own = {}
        for key in kinds:
            for spelled in (key, f"{name}.{key}"):
                if spelled in given:
                    used.add(spelled)
                    own[key] = _knob(spelled, given[spelled], kinds[key])
        tasks.append(TASKS[name](**own))
    for key in given.keys() - used:
        valid = [f"{name}.{field.name}" for name in names for field in dataclasses.fields(TASKS[name])]
        known = nearest(key, valid) if valid else f"{', '.join(names)} take none"
        raise UsageError(f"no task has the knob {shown(key)}; {known}")
    return tasks


def _knob(name: str, value: Any, kind: type) -> Any:
    try:
        made = kind(value)
    except (TypeError, ValueError):
        made = None
    if made is None or not 0 < made <= LARGEST_KNOB:  # nor is NaN
        word = "a whole number" if kind is int else "a number"
        raise UsageError(f"{name} is {shown(value)}; expected {word} above 0, and at most {LARGEST_KNOB:,}")
    return made


@dataclass(frozen=True)
class Suite:
    """How samples are made and asked: `samples` documents for each task and length, `questions` about each.

    A single fact stands at each of `depths` in turn, or else at even depths. The fillers are those of
    `lce.lab.eval.tasks.making.samples`; modes, `contexts` and shards are those of `lce.lab.eval.running`. Raises
    `UsageError`.
    """

    samples: int = 20
    seed: int = 0
    filler: str = "prose"
    depths: tuple[float, ...] = ()
    mode: str = "single"
    questions: int | None = None  # 1 in the mode single, else 4
    shard: Shard = WHOLE
    contexts: str | Path | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"unknown mode {shown(self.mode)}; {nearest(self.mode, MODES)}")
        check_contexts(self.contexts, self.mode)
        if self.samples < 1:
            raise UsageError(f"samples is {self.samples}; expected 1 or more")
        if self.questions is not None and self.questions < 1:
            raise UsageError(f"questions is {self.questions}; expected 1 or more")
        if self.shard.index >= self.samples:
            raise UsageError(f"{self.samples} documents have none for shard {self.shard}; take more samples")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise UsageError(f"depths are {shown(self.depths)}; expected numbers from 0 to 1")

    @property
    def n_questions(self) -> int:
        return self.questions or (1 if self.mode == "single" else QUESTIONS)

    def setting(self, task: Task, length: int) -> dict[str, Any]:
        """Return the fields that identify samples of a task and length in a record; usual values are left out."""
        kind = "none" if task.fills else self.filler.partition(":")[0]
        found: dict[str, Any] = {
            "task": task.name, "filler": kind, "length": length, "samples": self.samples, "seed": self.seed,
        }  # fmt: skip
        usual = knob_values(type(task)())
        if knobs := {name: value for name, value in knob_values(task).items() if value != usual[name]}:
            found["task_knobs"] = knobs
        if self.depths:
            found["depths"] = list(self.depths)
        if self.n_questions > 1:
            found["questions"] = self.n_questions
        return found

    def made(self, engine: Engine, task: Task, length: int) -> list[Sample]:
        """Return the samples of a task and length.

        Raises `UsageError` if the samples do not fit or the knobs are too large.
        """
        try:
            return list(
                samples(
                    task, length=length, n=self.samples, seed=self.seed, count=counter(engine), filler=self.filler,
                    depths=self.depths, questions=self.n_questions,
                )
            )  # fmt: skip
        except (ValueError, IndexError) as error:
            raise UsageError(f"{task!r} cannot be made: {error}; take smaller knobs or a shorter length") from None

    def evaluate(
        self, engine: Engine, task: Task, length: int, *, made: Sequence[Sample] | None = None,
        record: Record | None = None, about: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Score:  # fmt: skip
        """Return the score of an engine at a task and length; `made` has the samples, if already made."""
        return evaluate(
            engine, self.made(engine, task, length) if made is None else made, setting=self.setting(task, length),
            mode=self.mode, record=record, shard=self.shard, contexts=self.contexts, about=about, progress=progress,
        )  # fmt: skip

    def ceiling_length(self, engine: Engine, task: Task, lengths: Sequence[int]) -> int:
        """Return the largest length at which text and answers fit the window, at most the largest of `lengths`.

        Raises `UsageError` if a puzzle does not fit.
        """
        most = min(engine.window, max(lengths))
        count = counter(engine)
        answer = max(count(" " + sample.answer) + 2 for sample in self.made(engine, task, most))
        turns = self.n_questions if self.mode == "turns" else 1
        questions = max(count(sample.question) for sample in self.made(engine, task, most))
        beyond = most + turns * (answer + questions) - questions - engine.window
        return most - max(0, beyond)


def counter(engine: Engine) -> Callable[[str], int]:
    """Return a function that counts a text's tokens."""
    return lambda text: len(engine.tokenizer.encode(text, bos=False))
