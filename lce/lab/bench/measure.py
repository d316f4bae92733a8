"""Runs the measurements: methods by lengths, in turns, so that slow moments of the machine affect all methods.

A run prefills a text of random tokens into a new context, draws the first token, then decodes. The first decode step
fills caches and is not timed. For each method and length, an untimed first run compiles kernels and counts what a step
reads and computes.

A decode step must read each weight once, one row of the embedding, the keys and values that it attends (a chunk once
for each KV head that chose it), and the summaries or low-dim keys that it compares. A prefill must compute two
operations for each weight of a layer and token, the head for the last token of each block, and four times the head
dimension for each attended pair of query and key. Scores of a selection do not count.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import lce
from lce.errors import CapacityError, UsageError
from lce.lab.bench.ceilings import Ceilings, Shape, ceilings, machine
from lce.lab.bench.report import Report, Row, Spread, StepTimes
from lce.progress import Progress, reported
from lce.sizes import count

OTHER = "Python and other"  # time outside a profile's timers
OF_PLANS = ("device", "dtype", "weights", "block", "window")  # options of `lce.load` that decide what is counted
MOST_ROWS = 1024  # rows of the products that set the ceiling


@dataclass
class Measured:
    """The measurements of one method at one length; the first three fields are counted."""

    weight_bytes: int
    cache_bytes: int
    prefill_flops: float
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)


class Subject:
    """One measured engine. `ids` makes a text of a length; by default random tokens."""

    def __init__(self, engine: lce.Engine, ids: Callable[[int], list[int]] | None = None) -> None:
        self.engine, self.ids = engine, ids or random_text(engine)

    def prefill(self, length: int, more: int) -> tuple[lce.Context, lce.Generation]:
        """Prefill `length` tokens into a new context with space for `more`, and draw the first token."""
        context = self.engine.new_context(length + more)
        return context, self.engine.generate(self.ids(length), context=context, max_tokens=1)

    def decode(self, context: lce.Context, n_tokens: int, first: lce.Generation) -> float:
        """Return the tokens a second over `n_tokens` decode steps after an untimed one.

        If the model ends its text, a prompt of one token continues the text; that step is not timed.
        """
        seconds, left, last = 0.0, n_tokens, first
        while left > 0:
            prompt = self.ids(1) if last.finish_reason == "stop" else []
            last = self.engine.generate(prompt, context=context, max_tokens=left + 1)
            # The step that draws an end token is timed too, and the first token of each call is not.
            left -= last.stats.generated_tokens - (last.finish_reason != "stop")
            seconds += last.stats.decode_s
        return n_tokens / seconds if seconds else 0.0


def random_text(engine: lce.Engine, seed: int = 0) -> Callable[[int], list[int]]:
    """Return a function that makes random texts from the engine's vocabulary; longer texts begin with shorter."""

    def ids(length: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(engine.model.config.vocab_size) for _ in range(length)]

    return ids


def layer_shapes(engine: lce.Engine) -> list[Shape]:
    """Return the inputs and outputs of each matrix of a layer."""
    c = engine.model.config
    query, key, hidden, inner = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
    attention = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
    return [*attention, (hidden, inner), (hidden, inner), (inner, hidden)]


class Bench:
    """A benchmark in steps: `run` measures; `report` has the measurements so far."""

    def __init__(
        self, model: str | Path, methods: str | lce.Method | Sequence[str | lce.Method] = "full", *,
        lengths: int | str | Sequence[int | str] = (512, 2048, 8192), repeats: int | str = 3,
        new_tokens: int | str = 32, seed: int = 0, profile: bool = False, **loading: Any,
    ) -> None:  # fmt: skip
        """Load the model once for all methods. `loading` are options of `lce.load`.

        Raises `UsageError` for invalid options, and `CapacityError` for a length that cannot fit.
        """
        self.model, self.seed, self.profile = str(model), count(seed, "seed", least=0), bool(profile)
        self.lengths = [count(length, "a length") for length in _several(lengths)]
        self.repeats, self.new_tokens = count(repeats, "repeats"), count(new_tokens, "new_tokens")
        wanted = _several(methods)
        if not wanted or not self.lengths:
            raise UsageError("nothing to measure; give one method and one length, or more")
        self.subjects: dict[str, Subject] = {}
        first: lce.Engine | None = None
        for method in wanted:
            engine = lce.load(model, method, sharing=first, **loading)
            first, used = first or engine, engine.method
            name = repr(used) if used.label in self.subjects else used.label
            self.subjects[name] = Subject(engine, random_text(engine, seed))
        assert first is not None
        self.engine = first
        for length, (name, subject) in product(self.lengths, self.subjects.items()):
            try:
                subject.engine.new_context(self._most(length)).close()
            except CapacityError as error:
                error.add_note(f"this is what {name} is measured with at a length of {length:,}")
                raise
        self.ceilings: Ceilings | None = None
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
        """Return the tokens of the longest context at a length."""
        blocks = max(subject.engine.block for subject in self.subjects.values()) if self.profile else 0
        return length + 2 * self.new_tokens + 8 + blocks

    def _measure_machine(self) -> None:
        """Measure the ceilings, keeping the best; called at the beginning and at the end."""
        rows = min(MOST_ROWS, max(self.lengths))
        found = ceilings(layer_shapes(self.engine), rows, self.engine.dtype, self.engine.device)
        self.ceilings = found if self.ceilings is None else self.ceilings.best(found)

    def _counted(self, subject: Subject, length: int) -> Measured:
        """Make the untimed run, and count what a prefill computes and a decode step reads."""
        with lce.profiled(subject.engine) as prefill:
            context, first = subject.prefill(length, self._most(length) - length)
        with context:
            subject.decode(context, 1, first)
            with context.fork() as fork, lce.profiled(subject.engine) as step:
                subject.engine.prefill(subject.ids(1), context=fork)
        work = lce.operations(self.model, subject.engine.method, tokens=length, **self._planning)
        products = 2.0 * (work.prefill.projections + work.prefill.mlp + work.prefill.head)
        weights = work.decode.weight_bytes // work.decode.tokens  # of one step
        return Measured(weights, step.read_bytes, products + prefill.attention_flops)

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
        """Measure the parts of the time of a decode step, then of a block of prefill."""
        engine = subject.engine
        engine.prefill(subject.ids(1), context=context)
        with lce.profiled(engine) as steps:
            last = engine.generate([], context=context, max_tokens=self.new_tokens + 1)
        n_steps = max(1, last.stats.generated_tokens - (last.finish_reason != "stop"))
        marked = steps.total_s - steps.seconds[OTHER]
        steps.seconds[OTHER] = max(0.0, last.stats.decode_s - marked)  # without the call's time before its first token
        with lce.profiled(engine) as block:
            engine.prefill(subject.ids(engine.block), context=context)
        return [
            StepTimes(name, length, step, tokens, {what: s / n for what, s in found.seconds.items()})
            for step, tokens, found, n in (("decode", 1, steps, n_steps), ("prefill", engine.block, block, 1))
        ]

    @property
    def report(self) -> Report:
        """The measurements so far: the methods and lengths with a timed run."""
        engine, best = self.engine, self.ceilings or Ceilings(0.0, 0.0, 0.0, 0)
        rows = [self._row(length, name, runs, best) for (length, name), runs in self._runs.items() if runs.decode]
        return Report(
            self.model, machine(), lce.__version__, str(engine.dtype).removeprefix("torch."),
            engine.layout.devices_text, engine.window, self.repeats, self.new_tokens, self.seed,
            {name: repr(subject.engine.method) for name, subject in self.subjects.items()},
            best, rows, list(self._profile),
        )  # fmt: skip

    def _row(self, length: int, name: str, runs: Measured, best: Ceilings) -> Row:
        prefill, decode, first = (Spread.of(x) for x in (runs.prefill, runs.decode, runs.first_token))
        weights, cache, flops = runs.weight_bytes, runs.cache_bytes, runs.prefill_flops
        return Row(
            name, length, prefill, decode, first, weights, cache, flops,
            prefill_share=flops / length * prefill.median / best.product if best.product else 0.0,
            decode_share=(weights + cache) * decode.median / best.reading if best.reading else 0.0,
            warning=self.subjects[name].engine.beyond(length),
        )  # fmt: skip


def bench(
    model: str | Path, methods: str | lce.Method | Sequence[str | lce.Method] = "full", *,
    progress: Progress | bool | None = None, **options: Any,
) -> Report:  # fmt: skip
    """Measure a model with some methods at some lengths; takes the options of `Bench`."""
    return Bench(model, methods, **options).run(progress)


def _several(things: Any) -> list[Any]:
    """Return one thing or several as a list."""
    return list(things) if isinstance(things, list | tuple) else [things]
