"""`lce recommend`: which method finds most facts in texts longer than a model's window, by asking the model itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import lce
from lce.lab.eval.record import Answer
from lce.lab.eval.running import Asking, Shard
from lce.lab.eval.scores import Score, mean_of
from lce.lab.eval.suite import MadeSuite, make_tasks
from lce.methods.auto import CANDIDATES, Choice

DOCUMENTS = 12  # of each method, at most
CEILING = 15 / 16  # length of the ceiling's texts, in windows: small models are weak at the window's end
FULL = Choice("full")

Advance = Callable[[int, int], None]  # called with the seconds spent and all seconds


@dataclass(frozen=True)
class Probe:
    """What a method found in texts of `length` tokens. `seconds` is the mean time of a text and its questions."""

    choice: Choice
    length: int
    score: Score
    seconds: float


@dataclass(frozen=True)
class Recommendation:
    """What each method found.

    `ceiling` is `full` within the window. `probes` are the methods at the length that was asked for, the best first; of
    equal ones the one that reads fewest bytes a token. For the methods `left` there was no time.
    """

    ceiling: Probe
    probes: Sequence[Probe]
    left: Sequence[Choice]


def recommend(
    model: str, *, length: int | None = None, seconds: float = 120.0, task: str = "several_facts",
    filler: str = "noise", seed: int = 0, candidates: Sequence[Choice] = CANDIDATES, progress: Advance | None = None,
    **loading: Any,
) -> Recommendation:  # fmt: skip
    """Ask a model about facts in texts of `length` tokens, with each method in turn, for about `seconds`.

    `length` is by default one and a half windows. `task` is one of `lce eval tasks`, up to eight questions a text, and
    `filler` as in `MadeSuite`: `noise`, since its words are in no fact. Methods take turns, a text each. A turn that
    would end too late is not begun, but the ceiling and one method are always asked. `loading` are options of
    `lce.load`. Raises what `lce.load` and `MadeSuite` raise.
    """
    suite = MadeSuite(samples=DOCUMENTS, questions=8, seed=seed, filler=filler, asking=Asking("shared"))
    (asked,), began = make_tasks([task]), time.monotonic()
    engine = lce.load(model, **loading)
    length = length or 3 * engine.window // 2
    within = suite.ceiling_lengths(engine, asked, [int(CEILING * engine.window)])[-1]
    made = {each: suite.make(engine, asked, each) for each in (within, length)}
    engines = [engine, *(lce.load(model, choice.make(), sharing=engine, **loading) for choice in candidates)]
    places = [(FULL, within), *((choice, length) for choice in candidates)]
    answers: list[list[Answer]] = [[] for _ in places]
    spent: list[list[float]] = [[] for _ in places]
    last = 0.0
    for number, turn in product(range(DOCUMENTS), range(len(places))):
        start, n_tokens = time.monotonic(), places[turn][1]
        if start + (spent[turn] or [last])[-1] > began + seconds and any(spent[1:]):
            break
        some = replace(suite, asking=Asking("shared", Shard(number, DOCUMENTS)))
        answers[turn] += [answer for _, answer in some.answers(engines[turn], asked, n_tokens, made=made[n_tokens])]
        spent[turn].append(last := time.monotonic() - start)
        if progress:
            progress(round(min(start + last - began, seconds)), round(seconds))
    ceiling, *probes = [
        Probe(*place, Score.of(given), mean_of(times) or 0.0)
        for place, given, times in zip(places, answers, spent, strict=True)
        if given
    ]
    best_first = sorted(probes, key=lambda each: (-each.score.mean, each.score.read_bytes or 0.0))
    left = [choice for choice, times in zip(candidates, spent[1:], strict=True) if not times]
    return Recommendation(ceiling, best_first, left)
