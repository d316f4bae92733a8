"""`lce recommend`: which method finds most facts in texts longer than a model's window, by asking the model itself.

Nearly all of the time is that of reading texts. So a few hundred tokens are read first; how fast they were read says
how long the ceiling's text is, and the ceiling's time says how long the methods' texts are. The clock is looked at
after every block that is read and after every answer, so that the end does not depend on these estimates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lce
from lce.methods.auto import CANDIDATES, Choice
from lce_lab.eval.record import Answer
from lce_lab.eval.running import Asking, Shard
from lce_lab.eval.scores import Score, mean_of, sign_test
from lce_lab.eval.suite import MadeSuite, make_tasks
from lce_lab.eval.tasks import MadeTask

DOCUMENTS = 12  # of each method, at most
FEW, SAMPLE = 16, 256  # the tokens that are read first, at most
CEILINGS = (1 / 2, 1 / 4, 1 / 8, 1 / 16)  # lengths of the ceiling's texts, in windows, the first that is short enough
SHARE = 1 / 8  # of the time for the ceiling's first text: the rest is for the methods
LENGTHS = (1.5, 1.375, 1.25, 1.125)  # lengths of the methods' texts, in windows, the first that there is time for
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
    """The results of all methods in texts of `length` tokens.

    `ceiling` is the result of `full` within the window. `probes` has a result for each method that was asked, the best
    first; among equals, the method that reads fewest bytes per token. There was no time to ask the methods `left`, of
    which a text takes about `needed` seconds. Without time for any method, there is no ceiling either. `usual` is what
    the method `auto` is for texts of this length.
    """

    length: int
    usual: Choice
    ceiling: Probe | None
    probes: Sequence[Probe]
    left: Sequence[Choice]
    needed: float = 0.0

    @property
    def alike(self) -> Sequence[Probe]:
        """The best method, and all methods whose scores do not differ from its scores by more than chance."""
        return [each for each in self.probes if not told_apart(self.probes[0].values, each.values)]

    @property
    def chosen(self) -> Choice:
        """The method to use: `usual`, unless a method is told apart as better.

        Then it is the one of the methods in `alike` that reads the fewest bytes a token.
        """
        alike = {each.choice.spelled: each for each in self.alike}
        if not alike or self.usual.spelled in alike:
            return self.usual
        return min(alike.values(), key=lambda each: each.read_bytes).choice


def told_apart(some: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether two methods' scores of the same questions differ by more than chance, by a sign test."""
    return 2 * min(sign_test(some, others), sign_test(others, some)) < DOUBT


class _Late(Exception):
    """The time is over."""


@dataclass
class _Clock:
    """The time for all questions. `tick` reports the seconds spent; at the end it raises `_Late`."""

    seconds: float
    progress: Advance | None
    began: float = field(default_factory=lambda: time.monotonic())

    @property
    def left(self) -> float:
        return self.began + self.seconds - time.monotonic()

    def tick(self, *_: int) -> None:
        if self.progress:
            self.progress(round(min(self.seconds - self.left, self.seconds)), round(self.seconds))
        if self.left < 0:
            raise _Late


@dataclass
class _Turns:
    """The texts that a method was asked: the answers to each, and the seconds that each took."""

    choice: Choice
    engine: lce.Engine | None = None
    answers: list[list[Answer]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def probe(self, length: int, n_texts: int) -> Probe:
        """Return the result of the first `n_texts` texts."""
        answers = [answer for some in self.answers[:n_texts] for answer in some]
        values = [answer.value for answer in answers]
        return Probe(self.choice, length, Score.of(answers), mean_of(self.times[:n_texts]) or 0.0, values)


@dataclass
class _Questions:
    """Asks the questions of one task about made texts, until the time is over."""

    suite: MadeSuite
    task: MadeTask
    clock: _Clock
    load: Callable[[Choice], lce.Engine]
    made: dict[int, Any] = field(default_factory=dict)

    def ask(self, turns: _Turns, number: int, n_tokens: int) -> bool:
        """Ask a method the questions about text `number`. Return whether there was time for all of them."""
        start = time.monotonic()
        try:
            self.clock.tick()
            turns.engine = turns.engine or self.load(turns.choice)
            if n_tokens not in self.made:
                self.made[n_tokens] = self.suite.make(turns.engine, self.task, n_tokens)
            how = Asking("shared", Shard(number, DOCUMENTS), brief=True, reading=self.clock.tick)
            some, made = replace(self.suite, asking=how), self.made[n_tokens]
            found = some.answers(turns.engine, self.task, n_tokens, made=made, progress=self.clock.tick)
        except _Late:
            return False
        turns.answers.append([answer for _, answer in found])
        turns.times.append(time.monotonic() - start)
        return True


def work(engine: lce.Engine, n_tokens: int) -> float:
    """Return the multiply-adds of reading a text; those of attention, slower than products, count 1.5 times."""
    c = engine.setup.model.config
    products = c.hidden_size * (2 * (c.n_heads + c.n_kv_heads) * c.head_dim + 3 * c.intermediate_size)
    return float(n_tokens * c.n_layers * (products + 1.5 * n_tokens * c.n_heads * c.head_dim))


def speed(engine: lce.Engine, clock: _Clock) -> float:
    """Return the seconds that a unit of `work` takes: by a few tokens, and by `SAMPLE` if there is time for so many."""
    pace = 0.0
    for size in (FEW, FEW, SAMPLE):  # kernels may be compiled in the first
        ids = [i % 97 + 3 for i in range(min(size, engine.window // 4))]
        if size > FEW and pace * work(engine, len(ids)) > SHARE * clock.left:
            break
        start = time.monotonic()
        engine.prefill(ids, progress=clock.tick).close()
        pace = (time.monotonic() - start) / work(engine, len(ids))
    return pace


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
    tell: Callable[[str], None] = lambda line: None,
    **loading: Any,
) -> Recommendation:
    """Ask a model about facts in texts of `length` tokens, with each method in turn, for at most about `seconds`.

    `length` is by default what the time affords for a text of each method, by the speed of the ceiling: see `LENGTHS`.
    `task` is one of `lce eval tasks`, up to eight questions a text, and `filler` as in `MadeSuite`: `noise`, since its
    words are in no fact. Each method reads one text, first the one that `auto` is. While there is time, every method
    reads another text. A turn that would end too late is not begun, and one that is late is dropped. `tell` is called
    with lines that say what is done. `loading` are options of `lce.load`. Raises what `lce.load` and `MadeSuite` raise.
    """
    clock, suite = _Clock(seconds, progress), MadeSuite(samples=DOCUMENTS, questions=8, seed=seed, filler=filler)
    (asked,) = make_tasks([task])
    engine = lce.load(model, **loading)
    load = lambda choice: lce.load(model, choice.make(), sharing=engine, **loading)  # noqa: E731
    ask, sizes = _Questions(suite, asked, clock, load), [int(each * engine.window) for each in LENGTHS]
    if length:
        ask.made[length], sizes = suite.make(engine, asked, length), [length]
    usual, full = engine.setup.choice(sizes[-1]), _Turns(FULL, engine)
    others = [*map(_Turns, (usual, *(each for each in candidates if each != usual)))]
    length, within, needed = sizes[-1], int(CEILINGS[0] * engine.window), 0.0
    try:
        pace = speed(engine, clock)
        within = _within(ask, engine, pace)
        needed = pace * work(engine, length)
        tell(f"full attention reads {within:,} tokens first, in about {pace * work(engine, within):,.0f} s")
        if needed + pace * work(engine, within) <= clock.left and ask.ask(full, 0, within):
            pace = full.times[0] / work(engine, within)
            fits = (size for size in sizes if len(others) * pace * work(engine, size) <= clock.left)
            length = next(fits, length)
            needed = pace * work(engine, length)
            tell(f"{len(others)} methods take turns, in texts of {length:,} tokens, about {needed:,.0f} s each")
            _take_turns(ask, full, within, others, length, needed)
    except _Late:
        pass
    n_texts = min((len(each.times) for each in others if each.times), default=0)
    probes = [turns.probe(length, n_texts) for turns in others if turns.times]
    best_first = sorted(probes, key=lambda each: (-each.score.mean, each.read_bytes))
    ceiling = full.probe(within, len(full.times)) if full.times else None
    left = [each.choice for each in others if not each.times]
    needed = max([needed, *(each.times[0] for each in others if each.times)])
    return Recommendation(length, usual, ceiling, best_first, left, needed)


def _within(ask: _Questions, engine: lce.Engine, pace: float) -> int:
    """Return the length of the ceiling's text: of `CEILINGS` the first that takes at most `SHARE` of the time."""
    sizes = [size for each in CEILINGS if (size := int(each * engine.window)) >= SAMPLE] or [int(engine.window / 2)]
    most = next((size for size in sizes if pace * work(engine, size) <= SHARE * ask.clock.seconds), sizes[-1])
    return ask.suite.ceiling_lengths(engine, ask.task, [most])[-1]


def _take_turns(
    ask: _Questions, full: _Turns, within: int, others: Sequence[_Turns], length: int, needed: float
) -> None:
    """Ask each method about one text, then about another one in turn, while there is time."""
    for turns in others:
        if max((each.times[0] for each in others if each.times), default=needed) <= ask.clock.left:
            ask.ask(turns, 0, length)
    for number in range(1, DOCUMENTS):
        if not all(each.times for each in others):
            return
        if sum(each.times[-1] for each in (full, *others)) > ask.clock.left or not ask.ask(full, number, within):
            return
        if not all(ask.ask(turns, number, length) for turns in others):
            return
