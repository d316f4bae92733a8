"""`lce recommend`: which method finds most facts in texts longer than a model's window, by asking the model itself.

Nearly all of the time is that of reading texts, so their length follows from how fast the machine reads the first one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lce
from lce.methods.auto import CANDIDATES, Choice
from lce_lab.eval.record import Answer
from lce_lab.eval.running import Asking, Shard
from lce_lab.eval.scores import Score, mean_of
from lce_lab.eval.suite import MadeSuite, make_tasks

DOCUMENTS = 12  # of each method, at most
CEILING = 1 / 2  # length of the ceiling's texts, in windows: the rest of the time is for the methods
LENGTHS = (1.5, 1.375, 1.25, 1.125)  # lengths of the methods' texts, in windows, the first that there is time for
GROWTH = 1.5  # the seconds of a text grow with its length to this power: products to the first, attention to the second
DOUBT = 0.05  # two methods are told apart if equal ones would differ as much with a smaller probability
FULL = Choice("full")

Advance = Callable[[int, int], None]  # called with the seconds spent and all seconds


@dataclass(frozen=True)
class Probe:
    """What a method found in texts of `length` tokens. `seconds` is the mean time of a text and its questions."""

    choice: Choice
    length: int
    score: Score
    seconds: float
    values: Sequence[float]  # the score of each question

    @property
    def read_bytes(self) -> float:
        return self.score.read_bytes or 0.0


@dataclass(frozen=True)
class Recommendation:
    """The results of all methods.

    `ceiling` is the result of `full` within the window. `probes` has a result for each method that was asked, the best
    first; among equals, the method that reads fewest bytes per token. There was no time to ask the methods `left`.
    """

    ceiling: Probe
    probes: Sequence[Probe]
    left: Sequence[Choice]

    @property
    def alike(self) -> Sequence[Probe]:
        """The best method, and all methods whose scores do not differ from its scores by more than chance."""
        return [each for each in self.probes if not told_apart(self.probes[0].values, each.values)]

    @property
    def chosen(self) -> Probe:
        """The method to use: of the methods in `alike`, the one that reads the fewest bytes a token."""
        return min(self.alike, key=lambda each: each.read_bytes)


def told_apart(some: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether two methods' scores of the same questions differ by more than chance, by a sign test."""
    better = sum(x > y for x, y in zip(some, others, strict=True))
    n = sum(x != y for x, y in zip(some, others, strict=True))
    return 2 * sum(math.comb(n, k) for k in range(min(better, n - better) + 1)) < DOUBT * 2.0**n


@dataclass
class _Turns:
    choice: Choice
    engine: lce.Engine | None = None
    answers: list[Answer] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def probe(self, length: int) -> Probe:
        values = [answer.value for answer in self.answers]
        return Probe(self.choice, length, Score.of(self.answers), mean_of(self.times) or 0.0, values)


def recommend(
    model: str,
    *,
    length: int | None = None,
    seconds: float = 120.0,
    task: str = "several_facts",
    filler: str = "noise",
    seed: int = 0,
    candidates: Sequence[Choice] = CANDIDATES,
    progress: Advance | None = None,
    **loading: Any,
) -> Recommendation:
    """Ask a model about facts in texts of `length` tokens, with each method in turn, for about `seconds`.

    `length` is by default what the time affords for a text of each method, by the speed of the ceiling: see `LENGTHS`.
    `task` is one of `lce eval tasks`, up to eight questions a text, and `filler` as in `MadeSuite`: `noise`, since its
    words are in no fact. Each method reads one text. While there is time, every method reads another text. A turn that
    would end too late is not begun, but the ceiling and one method are always asked. `loading` are options of
    `lce.load`. Raises what `lce.load` and `MadeSuite` raise.
    """
    suite = MadeSuite(samples=DOCUMENTS, questions=8, seed=seed, filler=filler)
    (asked,), began = make_tasks([task]), time.monotonic()
    engine = lce.load(model, **loading)
    within = suite.ceiling_lengths(engine, asked, [int(CEILING * engine.window)])[-1]
    made = {each: suite.make(engine, asked, each) for each in (within, length) if each}
    full, *others = _Turns(FULL), *map(_Turns, candidates)
    full.engine = engine

    def ask(turns: _Turns, number: int, n_tokens: int) -> None:
        start = time.monotonic()
        if turns.engine is None:
            turns.engine = lce.load(model, turns.choice.make(), sharing=engine, **loading)
        some = replace(suite, asking=Asking("shared", Shard(number, DOCUMENTS), brief=True))
        found = some.answers(turns.engine, asked, n_tokens, made=made[n_tokens])
        turns.answers += [answer for _, answer in found]
        turns.times.append(time.monotonic() - start)
        if progress:
            progress(round(min(time.monotonic() - began, seconds)), round(seconds))

    def is_time_for(needed: float) -> bool:
        return time.monotonic() + needed <= began + seconds

    ask(full, 0, within)
    if length is None:
        sizes, pace = [int(each * engine.window) for each in LENGTHS], len(others) * full.times[0]
        length = next((size for size in sizes if is_time_for(pace * (size / within) ** GROWTH)), sizes[-1])
        made[length] = suite.make(engine, asked, length)
    for turns in others:
        if is_time_for(max((each.times[0] for each in others if each.times), default=-math.inf)):
            ask(turns, 0, length)
    for number in range(1, DOCUMENTS):
        if not (all(each.times for each in others) and is_time_for(sum(each.times[-1] for each in (full, *others)))):
            break
        ask(full, number, within)
        for turns in others:
            ask(turns, number, length)
    probes = [turns.probe(length) for turns in others if turns.times]
    best_first = sorted(probes, key=lambda each: (-each.score.mean, each.read_bytes))
    return Recommendation(full.probe(within), best_first, [each.choice for each in others if not each.times])
