"""The passkey task (Mohtashami and Jaggi, 2023): a fact hidden in a long text, then asked for.

A sample of length N is a text of at most N tokens: filler, the needle at some depth in it, more filler, the question.
The depths of a run are spread evenly over the text. An answer is right when the text that the model writes, greedily,
begins with the hidden one.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from random import Random
from typing import TYPE_CHECKING, Any

from lce.errors import LceError, UsageError, nearest
from lce.eval.needles import NEEDLES, Needle
from lce.eval.prose import sentences
from lce.eval.record import Answer, text_hash

if TYPE_CHECKING:
    from lce import Engine
    from lce.eval.record import Record

# The filler of the published task, repeated.
NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
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
    """A text of at most `length` tokens, as `count` counts them. Raises `UsageError` where the needle does not fit."""
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
    counted = cache(lambda text: count(" " + text))
    for rng, depth in _draws(task, length, n, seed):
        text = sentences(rng) if filler == "prose" else cycle(NOISE)
        yield make_sample(NEEDLES[task](rng), length, depth, text, counted)


def _draws(task: str, length: int, n: int, seed: int) -> Iterator[tuple[Random, float]]:
    """The random numbers of each sample, and its depth."""
    for index in range(n):
        rng = Random(f"{seed}/{task}/{length}/{index}")
        yield rng, (index + rng.random()) / n


def evaluate(
    engine: Engine, *, length: int, n: int = 50, seed: int = 0, task: str = "passkey", filler: str = "prose",
    record: Record | None = None, progress: Callable[[int, int], None] | None = None,
) -> Score:  # fmt: skip
    """Ask `n` samples of one length and score the answers; answers that `record` has are taken from it."""
    check_task(task, filler, n)
    count = _counter(engine)
    asked: dict[str, Any] = {"task": task, "filler": filler, "length": length, "samples": n, "seed": seed}
    if record:
        asked |= {"model": engine.fingerprint, "engine": repr(engine), "rope": repr(engine.rope)}
    spellings = _spellings(record, engine) if record else []
    right = 0
    for index, sample in enumerate(samples(task, filler, length, n, seed, count)):
        recorded = [{**asked, **spelling, "index": index} for spelling in spellings]
        answer = next((found for key in recorded if record and (found := record.given(key, sample.prompt))), None)
        if answer is None:
            if record:
                record.prepare()
            answer = _answer(engine, sample, count(" " + sample.answer) + 2)
            if record:
                record.add({**asked, "index": index}, answer)
        right += answer.right
        if progress:
            progress(index + 1, n)
    return Score(engine.method.name, task, length, n, right / n, *wilson(right, n))


def _answer(engine: Engine, sample: Sample, max_tokens: int) -> Answer:
    text = engine.generate(sample.prompt, max_tokens=max_tokens).text
    return Answer(text.strip().startswith(sample.answer), text_hash(sample.prompt), sample.answer, text)


def _spellings(record: Record, engine: Engine) -> list[dict[str, str]]:
    """How the record may spell this engine and its RoPE scaling: as they are, or as they were before some knobs.

    A knob that was added since a line was written does not make the line another engine's while it has its default.
    """
    method, rope = engine.method, engine.rope
    try:
        plain: Any = type(method)().resolve(engine.window)
    except (LceError, TypeError):  # no defaults, or none that fit this window
        plain = method
    spelled = []
    for name, text, owner, default in (
        ("engine", repr(engine), method, plain),
        ("rope", repr(rope), rope, type(rope)()),
    ):
        older = sorted(line for line in record.values(name) - {text} if without_new(text, line, owner, default) == line)
        spelled.append([{name: each} for each in (text, *older)])
    return [by_engine | by_rope for by_engine in spelled[0] for by_rope in spelled[1]]


def without_new(text: str, line: str, owner: Any, default: Any) -> str:
    """A text with a dataclass's repr, without the fields that `line` does not name and that have their defaults."""
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        is_new = not re.search(rf"[(\s]{field.name}=", line)
        if is_new and value == getattr(default, field.name, dataclasses.MISSING):
            text = re.sub(rf"(?<=[(\s]){field.name}={re.escape(repr(value))}(, |(?=\)))", "", text)
    return text.replace(", )", ")")


def check_task(task: str, filler: str, n: int) -> None:
    """Raise `UsageError` for a task, a filler or a number of samples that cannot be asked."""
    if task not in NEEDLES:
        raise UsageError(f"unknown task {task!r}; {nearest(task, NEEDLES)}")
    if filler not in FILLERS:
        raise UsageError(f"unknown filler {filler!r}; {nearest(filler, FILLERS)}")
    if n < 1:
        raise UsageError(f"samples is {n}; expected 1 or more")


def check_length(engine: Engine, length: int, *, task: str, filler: str, n: int, seed: int) -> None:
    """Raise `UsageError` where one of the first samples does not fit into `length` tokens. Makes no filler."""
    check_task(task, filler, n)
    for rng, depth in islice(_draws(task, length, n, seed), 1000):
        make_sample(NEEDLES[task](rng), length, depth, iter(()), _counter(engine))


def _counter(engine: Engine) -> Callable[[str], int]:
    return lambda text: len(engine.tokenizer.encode(text, bos=False))


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of `right` successes in `n` trials; z = 1.96 is 95%."""
    share = right / n
    centre = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
