"""The passkey task (Mohtashami and Jaggi, 2023): a fact hidden in a long text, then asked for.

A sample of length N is a text of at most N tokens: filler, the needle at some depth in it, more filler, the question.
The depths of a run are spread evenly over the text. An answer is right when the text that the model writes, greedily,
begins with the hidden one. The samples are those of the tasks of `lce.lab.eval.tasks` with the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lce.errors import UsageError, nearest
from lce.lab.eval.needles import NEEDLES, Needle
from lce.lab.eval.suite import Suite, counter
from lce.lab.eval.tasks import TASKS
from lce.lab.eval.tasks.making import NOISE
from lce.lab.eval.tasks.making import samples as made

if TYPE_CHECKING:
    from lce import Engine
    from lce.lab.eval.record import Record

__all__ = ["FILLERS", "NOISE", "Sample", "Score", "check_length", "check_task", "evaluate", "make_sample", "samples"]

FILLERS = ("prose", "noise")


@dataclass(frozen=True)
class Sample:
    """One prompt and the answer that it hides."""

    prompt: str
    answer: str
    depth: float  # 0 is the text's beginning, 1 its end


@dataclass(frozen=True)
class Score:
    """The share of right answers and its 95% Wilson interval, `low` to `high`."""

    method: str
    task: str
    length: int
    samples: int
    accuracy: float
    low: float
    high: float


def make_sample(
    needle: Needle, length: int, depth: float, filler: Iterator[str], count: Callable[[str], int]
) -> Sample:
    """A text of at most `length` tokens, as `count` counts its sentences one by one.

    Raises `UsageError` where the needle does not fit.
    """
    left = length - count(needle.statement) - count(needle.question) - 1  # 1 for the beginning token
    if left < 0:
        raise UsageError(f"length is {length}; expected at least {length - left} tokens for the fact and the question")
    body: list[str] = []
    for sentence in filler:
        left -= count(sentence)
        if left < 0:
            break
        body.append(sentence)
    body.insert(round(depth * len(body)), needle.statement)
    return Sample(" ".join([*body, needle.question]), needle.answer, depth)


def samples(task: str, filler: str, length: int, n: int, seed: int, count: Callable[[str], int]) -> Iterator[Sample]:
    """`n` samples of one task and length; the same seed gives the same ones."""
    check_task(task, filler, n)
    for sample in made(TASKS[task](), length=length, n=n, seed=seed, count=count, filler=filler):
        yield Sample(sample.prompt, sample.answer, sample.depth or 0.0)


def evaluate(
    engine: Engine, *, length: int, n: int = 50, seed: int = 0, task: str = "passkey", filler: str = "prose",
    record: Record | None = None, progress: Callable[[int, int], None] | None = None,
) -> Score:  # fmt: skip
    """Ask `n` samples of one length and score the answers; answers that `record` has are taken from it."""
    check_task(task, filler, n)
    suite = Suite(samples=n, seed=seed, filler=filler)
    found = suite.evaluate(engine, TASKS[task](), length, record=record, progress=progress)
    return Score(engine.method.name, task, length, n, found.mean, found.low, found.high)


def check_length(engine: Engine, length: int, *, task: str, filler: str, n: int, seed: int) -> None:
    """Raise `UsageError` where one of the samples does not fit into `length` tokens."""
    for _ in samples(task, filler, length, n, seed, counter(engine)):
        pass


def check_task(task: str, filler: str, n: int) -> None:
    """Raise `UsageError` for a task, a filler or a number of samples that cannot be asked."""
    if task not in NEEDLES:
        raise UsageError(f"unknown task {task!r}; {nearest(task, NEEDLES)}")
    if filler not in FILLERS:
        raise UsageError(f"unknown filler {filler!r}; {nearest(filler, FILLERS)}")
    if n < 1:
        raise UsageError(f"samples is {n}; expected 1 or more")
