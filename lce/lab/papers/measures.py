"""How an entry is measured: by answers, perplexity, operations, distances, or time."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import lce
from lce.errors import UsageError
from lce.lab.eval import perplexity
from lce.lab.eval.prose import sentences
from lce.lab.eval.record import Record
from lce.lab.eval.report import fails
from lce.lab.eval.suite import Suite, make_tasks
from lce.lab.papers.entry import Arm, Cell
from lce.lab.papers.setting import Setting

Matrix = list[list[int | None]]
WITHIN = Arm("full, within the window", "full")


def listed(lengths: Sequence[int]) -> str:
    """Lengths as an option takes them."""
    return ",".join(map(str, lengths))


def load_each(arms: Sequence[Arm], lengths: Sequence[int], setting: Setting) -> None:
    """Raise where the model cannot be loaded for one of the rows: without its maps, for example."""
    for arm in arms:
        setting.engine(arm, max(lengths))


def contents(length: int, setting: Setting) -> list[tuple[str, str]]:
    """The user's texts with their names, or one of `length` tokens or some more that is made here."""
    return setting.once(("contents", length), lambda: _contents(length, setting))


def _contents(length: int, setting: Setting) -> list[tuple[str, str]]:
    if setting.data:
        read = setting.tool("read_text")
        return [(path, read(path)) for path in setting.data]
    tokenizer, prose, text, n_tokens = setting.engine(WITHIN, 0).tokenizer, sentences(Random(setting.seed)), "", 0
    while n_tokens < length:  # counted again for each tenth, so that the time is that of ten or so readings
        more = 100 + len(text) // 1000
        text = " ".join([text, *(next(prose) for _ in range(more))]).strip()
        n_tokens = len(tokenizer.encode(text, bos=False))
    return [("prose", text)]


def texts(length: int, setting: Setting) -> list[perplexity.Text]:
    """The same as token ids; what is made here has `length` of them."""

    def made() -> list[perplexity.Text]:
        engine = setting.engine(WITHIN, 0)
        found = [perplexity.Text.of(engine, *content) for content in contents(length, setting)]
        return found if setting.data else [perplexity.Text(text.name, text.ids[:length]) for text in found]

    return setting.once(("texts", length), made)


class WithoutCeiling:
    """A measure whose numbers need none of full attention within the window beside them, and that reads no data."""

    @property
    def data(self) -> str:
        return ""

    def check(self, arms: Sequence[Arm], lengths: Sequence[int], setting: Setting) -> None:
        pass

    def ceiling(self, lengths: Sequence[int], setting: Setting) -> Iterator[Cell]:
        return iter(())


@dataclass(frozen=True)
class Answers:
    """The mean scores of tasks made here. `called` is what the paper calls its tasks that they stand for."""

    tasks: tuple[str, ...]
    filler: str = "prose"
    called: tuple[str, ...] = ()

    @property
    def data(self) -> str:
        return ""

    @property
    def labels(self) -> tuple[str, ...]:
        return self.called or self.tasks

    def command(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> str:
        words = [f"lce eval run --task {','.join(self.tasks)}"]
        words += [f"--filler {self.filler}"] * (self.filler != "prose")
        words += [f"--lengths {listed(lengths)} --samples {setting.samples} --seed {setting.seed}"]
        words += setting.recorded()
        return f"{' '.join(words)} {setting.options(arm, lengths[0])}"

    def cells(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> Iterator[Cell]:
        for task in range(len(self.tasks)):
            for length in lengths:
                yield self._cell(arm, task, length, setting)

    def check(self, arms: Sequence[Arm], lengths: Sequence[int], setting: Setting) -> None:
        load_each(arms, lengths, setting)
        setting.kept(Record)
        for task in make_tasks(self.tasks):
            self._suite(setting).made(setting.engine(WITHIN, 0), task, min(lengths))

    def ceiling(self, lengths: Sequence[int], setting: Setting) -> Iterator[Cell]:
        suite = self._suite(setting)
        for index, task in enumerate(make_tasks(self.tasks)):
            try:
                length = suite.ceiling_length(setting.engine(WITHIN, 0), task, lengths)
            except UsageError as error:
                yield Cell(
                    WITHIN.name, self.labels[index], setting.window, None, note=f"not within the window: {error}"
                )
                continue
            yield self._cell(WITHIN, index, length, setting, ceiling=True)

    def _suite(self, setting: Setting) -> Suite:
        return Suite(setting.samples, setting.seed, self.filler)

    def _cell(self, arm: Arm, index: int, length: int, setting: Setting, *, ceiling: bool = False) -> Cell:
        task, label = make_tasks(self.tasks)[index], self.labels[index]
        record = setting.kept(Record)
        about = {"checkpoint": setting.model} | ({"ceiling": True} if ceiling else {})
        with setting.advancing(f"{arm.name}, {label} at {length:,}") as advance:
            score = self._suite(setting).evaluate(
                setting.engine(arm, length), task, length, record=record, about=about, progress=advance
            )
        reason = fails(score) if ceiling else None
        note = "" if reason is None else f"tells methods apart nowhere: {reason} within the window"
        return Cell(arm.name, label, length, score.mean, score.low, score.high, score.samples, note=note)


PASS_KEYS = Answers(("passkey_published",), "noise", ("pass keys",))


@dataclass(frozen=True)
class Operations(WithoutCeiling):
    """The figures of cost that a method's paper states, for the model's sizes: see `Method.paper_figures`."""

    labels: tuple[str, ...]  # of the figures, in the method's order

    def command(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> str:
        return f"lce plan --operations --tokens {setting.window} {setting.options(arm, lengths[0])}"

    def cells(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> Iterator[Cell]:
        options = {name: setting.loading[name] for name in ("window", "dtype") if name in setting.loading}
        found = lce.operations(setting.model, setting.method(arm), tokens=setting.window, **options).paper_figures
        for name, figure in zip(self.labels, found, strict=True):
            yield Cell(
                arm.name, name, 0, figure.value, note=f"{figure.text} ({figure.where})" if figure.where else figure.text
            )


@dataclass(frozen=True)
class Distances(WithoutCeiling):
    """The share of a figure's cells that are as printed: which keys are attended, and at which distances."""

    tokens: int
    window: int
    printed: Callable[[str], Matrix]  # the figure's cells, by the name of the row
    labels: ClassVar = ("equal cells",)

    def command(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> str:
        knobs = "".join(f" -o {key}={value}" for key, value in arm.knobs.items())
        return f"lce explain {arm.method} --tokens {self.tokens} --window {self.window}{knobs}"

    def cells(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> Iterator[Cell]:
        method = lce.methods.make(arm.method, arm.knobs)
        rows = setting.tool("explain")(method, tokens=self.tokens, window=self.window).rows()
        pairs = [
            pair
            for ours, theirs in zip(rows, self.printed(arm.name), strict=True)
            for pair in zip(ours, theirs, strict=True)
        ]
        yield Cell(arm.name, self.labels[0], 0, sum(a == b for a, b in pairs) / len(pairs), n=len(pairs))


@dataclass(frozen=True)
class Speed(WithoutCeiling):
    """Seconds of a prefill, the median; the interval is the fastest and the slowest run."""

    labels: ClassVar = ("prefill seconds",)

    def command(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> str:
        return f"lce bench --lengths {listed(lengths)} --repeats {setting.samples} {setting.options(arm, lengths[0])}"

    def cells(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> Iterator[Cell]:
        options = {name: value for name, value in setting.loading.items() if name != "threads"}
        for length in lengths:
            with setting.advancing(f"{arm.name} at {length:,}") as advance:
                report = setting.tool("bench")(
                    setting.model, setting.method(arm), lengths=length, repeats=setting.samples, new_tokens=1,
                    seed=setting.seed, progress=advance, **options,
                )  # fmt: skip
            speed = report.rows[0].prefill
            median, low, high = (length / tokens_per_s for tokens_per_s in (speed.median, speed.high, speed.low))
            note = "the interval is the fastest and the slowest run"
            yield Cell(arm.name, self.labels[0], length, median, low, high, setting.samples, note=note)


@dataclass(frozen=True)
class Perplexity(WithoutCeiling):
    """The perplexity of texts in windows that slide by `stride` tokens; `scored` tokens of each count.

    The texts are the user's, or prose that is made here. Losses are recorded beside the answers, in FILE.perplexity.
    """

    scored: str = "all"
    stride: int = perplexity.STRIDE
    labels: ClassVar = ("perplexity",)

    @property
    def data(self) -> str:
        return "texts, such as those of PG19, in the place of prose that is made here"

    def command(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> str:
        words = ["lce eval perplexity", *(f"--text {shlex.quote(path)}" for path in setting.data or ["FILE"])]
        words += [f"--lengths {listed(lengths)} --windows {setting.samples} --scored {self.scored}"]
        words += setting.recorded(".perplexity")
        return f"{' '.join(words)} {setting.options(arm, lengths[0])}"

    def check(self, arms: Sequence[Arm], lengths: Sequence[int], setting: Setting) -> None:
        load_each(arms, lengths, setting)
        setting.kept(perplexity.Losses, ".perplexity")
        perplexity.ends(self._texts(lengths, setting), max(lengths), self.stride)

    def cells(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> Iterator[Cell]:
        record = setting.kept(perplexity.Losses, ".perplexity")
        for length in lengths:
            engine = setting.engine(arm, length)
            with setting.advancing(f"{arm.name}, perplexity at {length:,}") as advance:
                found = perplexity.windows(
                    engine, self._texts(lengths, setting), length=length, longest=max(lengths),
                    stride=self.stride, scored=self.scored, most=setting.samples, record=record,
                    about={"checkpoint": setting.model}, progress=advance,
                )  # fmt: skip
            yield Cell(arm.name, self.labels[0], length, found.perplexity, found.low, found.high, found.samples)

    def _texts(self, lengths: Sequence[int], setting: Setting) -> list[perplexity.Text]:
        return texts(max(lengths) + self.stride * (setting.samples - 1), setting)
