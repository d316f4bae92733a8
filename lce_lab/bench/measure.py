"""Runs a benchmark. Methods take turns at each length, so that slow moments of the machine affect all methods alike.

A run prefills a text of random tokens into a new context, draws the first token, then decodes. The first decode step
fills caches and is not timed. For each method and length, an untimed first run compiles kernels and counts what a step
reads and computes.

These bytes and operations are counted. A decode step reads each weight once, one row of the embedding, the keys and
values that it attends (a chunk once for each KV head that chose it), and the summaries or projected keys it scores.
A prefill computes two operations per token for each weight of a layer, two per block for each weight of the output
head, and four times the head dimension for each attended pair of query and key. Scores of chunks are not counted.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Self

import lce
from lce.errors import CapacityError, UsageError
from lce.progress import Progress, reported
from lce.sizes import count
from lce_lab.bench.ceilings import Ceilings, ceilings, machine

OTHER = "Python and other"  # The entry of a profile for the time outside all measured parts.
OF_PLANS = ("device", "dtype", "weights", "block", "window")  # The options of `lce.load` that change operation counts.
MOST_ROWS = 1024  # The most rows of the matrix products that measure the machine.


@dataclass(frozen=True)
class Spread:
    """The median of several measurements, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """The results of one method at one length. `prefill` and `decode` are tokens per second, `first_token` seconds.

    A decode step reads `weight_bytes` of weights, and `cache_bytes` of keys, values and what a method scores. A prefill
    computes `prefill_flops`. `prefill_share` is the median prefill speed divided by the speed that the machine's
    highest rate of matrix products in any dtype allows. `decode_share` is the median decode speed divided by the speed
    that reading memory allows. `warning` says if the text is longer than the method can read, else None.
    """

    method: str
    length: int
    prefill: Spread
    decode: Spread
    first_token: Spread
    weight_bytes: int
    cache_bytes: int
    prefill_flops: float
    prefill_share: float
    decode_share: float
    warning: str | None


@dataclass(frozen=True)
class StepTimes:
    """The seconds that each part of one step takes, by the part's name, after a text of `length` tokens.

    `step` is `decode`, of one token, or `prefill`, of a block of `tokens` tokens.
    """

    method: str
    length: int
    step: str
    tokens: int
    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Report:
    """The results of a benchmark: its setting, the machine's rates, a row per method and length, and step times."""

    model: str
    machine: str
    version: str
    dtype: str
    device: str
    window: int
    repeats: int
    new_tokens: int
    seed: int
    methods: Mapping[str, str]  # the repr of each resolved method, by its name in the rows
    ceilings: Ceilings
    rows: Sequence[Row]
    profile: Sequence[StepTimes]


@dataclass
class Measured:
    """The measurements of one method at one length: what a `Row` counts, and the speeds of each timed run."""

    counts: tuple[int, int, float]
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)


class Subject:
    """An engine to measure. `ids` returns the token ids of a text of a given length, by default random ids."""

    def __init__(self, engine: lce.Engine, ids: Callable[[int], list[int]] | None = None) -> None:
        self.engine, self.ids = engine, ids or random_text(engine)

    def prefill(self, length: int, more: int) -> tuple[lce.Context, lce.Generation]:
        """Prefill `length` tokens into a new context with space for `more` tokens, and draw the first token."""
        context = self.engine.new_context(length + more)
        return context, self.engine.generate(self.ids(length), context=context, max_tokens=1)

    def decode(self, context: lce.Context, n_tokens: int, first: lce.Generation) -> float:
        """Return the tokens per second over `n_tokens` steps, after an untimed one. An end token goes on untimed."""
        seconds, left, last = 0.0, n_tokens, first
        while left > 0:
            prompt = self.ids(1) if last.finish_reason == "stop" else []
            last = self.engine.generate(prompt, context=context, max_tokens=left + 1)
            # Timed steps: one per generated token except the first, and one for an end token, which is not counted.
            left -= last.stats.generated_tokens - (last.finish_reason != "stop")
            seconds += last.stats.decode_s
        return n_tokens / seconds if seconds else 0.0


def random_text(engine: lce.Engine, seed: int = 0) -> Callable[[int], list[int]]:
    """Return a function that takes a length and returns random token ids. Shorter texts are prefixes of longer ones."""

    def ids(length: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(engine.setup.model.config.vocab_size) for _ in range(length)]

    return ids


class Bench:
    """A benchmark of some methods at some lengths. `run` measures, and `report` has the measurements so far."""

    def __init__(
        self,
        model: str | Path,
        methods: str | lce.Method | Sequence[str | lce.Method] = "full",
        *,
        lengths: int | str | Sequence[int | str] = (512, 2048, 8192),
        repeats: int | str = 3,
        new_tokens: int | str = 32,
        seed: int = 0,
        profile: bool = False,
        **loading: Any,
    ) -> None:
        """Load the model once for all methods. `loading` are options of `lce.load`."""
        self.model, self.seed, self.profile = str(model), count(seed, "seed", least=0), bool(profile)
        self.lengths = [count(length, "a length") for length in _several(lengths)]
        self.repeats, self.new_tokens = count(repeats, "repeats"), count(new_tokens, "new_tokens")
        self.subjects: dict[str, Subject] = {}
        shared: lce.Engine | None = None
        for method in _several(methods):
            shared = self.engine = lce.load(model, method, sharing=shared, **loading)
            used = self.engine.method
            name = repr(used) if used.label in self.subjects else used.label
            self.subjects[name] = Subject(self.engine, random_text(self.engine, seed))
        if not self.subjects or not self.lengths:
            raise UsageError("nothing to measure; give one method and one length, or more")
        for length, (name, subject) in product(self.lengths, self.subjects.items()):
            try:
                subject.engine.new_context(self._most(length)).close()
            except CapacityError as error:
                error.add_note(f"this is what {name} is measured with at a length of {length:,}")
                raise
        self.ceilings = Ceilings(0.0, 0.0, {}, min(MOST_ROWS, max(self.lengths)))
        self._planning = {name: loading[name] for name in OF_PLANS if name in loading}
        self._runs: dict[tuple[int, str], Measured] = {}
        self._profile: list[StepTimes] = []

    def run(self, progress: Progress | bool | None = None) -> Report:
        """Measure everything. `progress` is True for a bar, or is called with the runs done and the total."""
        turns = list(product(self.lengths, range(-1, self.repeats), self.subjects.items()))
        with reported(progress, "bench", " runs") as tell:
            tell(0, len(turns))
            self._measure_machine()
            for done, (length, repeat, (name, subject)) in enumerate(turns, 1):
                if repeat < 0:
                    self._runs[length, name] = self._counted(subject, length)
                else:
                    self._time(name, subject, length, profile=self.profile and repeat == self.repeats - 1)
                tell(done, len(turns))
            self._measure_machine()
        return self.report

    def _most(self, length: int) -> int:
        """Return the most tokens of a context at a length: the text, new tokens, and a block if steps are profiled."""
        blocks = max(subject.engine.setup.block for subject in self.subjects.values()) if self.profile else 0
        return length + 2 * self.new_tokens + 8 + blocks

    def _measure_machine(self) -> None:
        """Measure the machine's rates with the shapes of a layer's matrices, and keep the best rates of all calls."""
        c = self.engine.setup.model.config
        query, key, hidden = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.hidden_size
        shapes = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
        shapes += [(hidden, c.intermediate_size), (hidden, c.intermediate_size), (c.intermediate_size, hidden)]
        found = ceilings(shapes, self.ceilings.rows, self.engine.setup.dtype, self.engine.setup.device)
        self.ceilings = found.best(self.ceilings)

    def _counted(self, subject: Subject, length: int) -> Measured:
        """Make the untimed run. Count the operations of a prefill and the bytes that a decode step reads."""
        with lce.profiled(subject.engine) as prefill:
            context, first = subject.prefill(length, self._most(length) - length)
        with context:
            subject.decode(context, 1, first)
            with context.fork() as fork, lce.profiled(subject.engine) as step:
                subject.engine.prefill(subject.ids(1), context=fork)
        work = lce.operations(self.model, subject.engine.method, tokens=length, **self._planning)
        products = 2.0 * (work.prefill.projections + work.prefill.mlp + work.prefill.head)
        weights = work.decode.weight_bytes // work.decode.tokens  # bytes of weights that one step reads
        return Measured((weights, step.read_bytes, products + prefill.attention_flops))

    def _time(self, name: str, subject: Subject, length: int, *, profile: bool) -> None:
        context, first = subject.prefill(length, self._most(length) - length)
        with context:
            decode, runs = subject.decode(context, self.new_tokens, first), self._runs[length, name]
            runs.prefill.append(first.stats.prefill_tokens_per_s)
            runs.first_token.append(first.stats.first_token_s)
            runs.decode.append(decode)
            if profile:
                self._profile += self._steps(name, subject, length, context)

    def _steps(self, name: str, subject: Subject, length: int, context: lce.Context) -> list[StepTimes]:
        engine = subject.engine
        engine.prefill(subject.ids(1), context=context)
        with lce.profiled(engine) as steps:
            last = engine.generate([], context=context, max_tokens=self.new_tokens + 1)
        n_steps = max(1, last.stats.generated_tokens - (last.finish_reason != "stop"))
        marked = steps.total_s - steps.seconds[OTHER]
        steps.seconds[OTHER] = max(0.0, last.stats.decode_s - marked)  # the time before the first token does not count
        with lce.profiled(engine) as block:
            engine.prefill(subject.ids(engine.setup.block), context=context)
        return [
            StepTimes(name, length, step, tokens, {what: s / n for what, s in found.seconds.items()})
            for step, tokens, found, n in (("decode", 1, steps, n_steps), ("prefill", engine.setup.block, block, 1))
        ]

    @property
    def report(self) -> Report:
        """The measurements so far, without methods and lengths that have no timed run yet."""
        engine, best = self.engine, self.ceilings
        rows = []
        for (length, name), runs in self._runs.items():
            if not runs.decode:
                continue
            prefill, decode, first = map(Spread.of, (runs.prefill, runs.decode, runs.first_token))
            weights, cache, flops = runs.counts
            shares = flops / length * prefill.median / best.product, (weights + cache) * decode.median / best.reading
            warning = self.subjects[name].engine.setup.beyond(length)
            rows.append(Row(name, length, prefill, decode, first, *runs.counts, *shares, warning))
        dtype = str(engine.setup.dtype).removeprefix("torch.")
        device = ",".join(str(part.device) for part in engine.setup.layout.by_device)
        about = self.model, machine(), lce.__version__, dtype, device, engine.window
        methods = {name: repr(subject.engine.method) for name, subject in self.subjects.items()}
        asked = self.repeats, self.new_tokens, self.seed
        return Report(*about, *asked, methods, best, rows, list(self._profile))


def bench(model: str | Path, *methods: Any, progress: Progress | bool | None = None, **options: Any) -> Report:
    """Measure a model with some methods at some lengths, and return the report. Takes the arguments of `Bench`."""
    return Bench(model, *methods, **options).run(progress)


def _several(things: Any) -> list[Any]:
    return list(things) if isinstance(things, list | tuple) else [things]
