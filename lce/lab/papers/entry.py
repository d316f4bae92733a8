"""What an entry is: a table or figure of a paper, how it is measured here, and the paper's own numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lce.lab.papers.setting import Setting

Number = float | str  # a number of a paper; a text where it printed none: ">100", "OOM"
NOT_AT_HAND = "not at hand"


@dataclass(frozen=True)
class OfWindow:
    """A knob as a part of the window: `OfWindow(64)` is W // 64, `OfWindow(4, 3)` is 3 W // 4; at least 1."""

    parts: int
    of_them: int = 1

    def __call__(self, window: int) -> int:
        return max(1, self.of_them * window // self.parts)


@dataclass(frozen=True)
class Arm:
    """A row: a method with its knobs and RoPE scaling.

    `rope` scales RoPE by the length over the window, as the papers' baselines do. `paper` has the paper's numbers by
    what they are and the length as a multiple of the window, 0 where they have no length; None: not at hand.
    """

    name: str
    method: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    rope: str | None = None
    paper: Mapping[tuple[str, float], Number] | None = None

    def sized(self, window: int) -> dict[str, Any]:
        """The knobs for a model of this window."""
        return {key: value(window) if isinstance(value, OfWindow) else value for key, value in self.knobs.items()}

    def number(self, label: str, multiple: float) -> Number | None:
        """The paper's number; None for a cell that the paper does not have."""
        if self.paper is None:
            return NOT_AT_HAND
        return self.paper.get((label, multiple), self.paper.get((label, 0)))


@dataclass(frozen=True)
class Cell:
    """One number of ours beside the paper's, with its 95% interval where there is one.

    `length` is in tokens, 0 where the measure has none; `n` is how many samples, windows or tokens it comes from. No
    `value`: it cannot be measured, and `note` says why.
    """

    row: str
    label: str
    length: int
    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    paper: Number | None = None
    note: str = ""


class Measure(Protocol):
    """A way to measure a row at a length. `data` says what the user can give it to read; nothing: empty."""

    @property
    def data(self) -> str: ...

    @property
    def labels(self) -> Sequence[str]:
        """What the numbers are called."""

    def command(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> str:
        """The command that measures the same on its own; `lengths` have one RoPE scaling."""

    def cells(self, arm: Arm, lengths: Sequence[int], setting: Setting) -> Iterator[Cell]:
        """What is measured, length by length, without the paper's numbers."""

    def check(self, arms: Sequence[Arm], lengths: Sequence[int], setting: Setting) -> None:
        """Raise for what cannot be measured, before any work."""

    def ceiling(self, lengths: Sequence[int], setting: Setting) -> Iterator[Cell]:
        """What full attention reaches within the window; nothing where that says nothing of the rows."""


@dataclass(frozen=True)
class Entry:
    """A table or figure that lce can run.

    `paper` says what the paper measured, on which data and model; `claim` what it says of the outcome. `measures` need
    none of the paper's data; `suite` runs on the user's copy of it. `same` says that `measures` are what the paper
    measured, on another model or text. Lengths are `multiples` of the window.
    """

    id: str
    title: str
    paper: str
    arms: tuple[Arm, ...]
    measures: tuple[Measure, ...]
    multiples: tuple[float, ...] = ()
    claim: str = ""
    samples: int = 20
    suite: Measure | None = None
    same: bool = False
    note: str = ""

    def is_same(self, setting: Setting) -> bool:
        """Whether what runs is the paper's own measurement, if on another model or text."""
        return self.same or (self.suite is not None and bool(setting.data))

    def difference(self, setting: Setting) -> str:
        """How what runs differs from what the paper measured, and what --data would change."""
        data = ", ".join(setting.data)
        if self.suite is not None and data:
            return f"the paper's data, in {data}"
        known = "the paper's measurement" if self.same else "another measurement than the paper's: tasks made here"
        readers = [measure for measure in (*self.measures, self.suite) if measure is not None and measure.data]
        if not readers:
            return known
        return f"{known}, on {data}" if data else f"{known}; --data takes {readers[0].data}"

    @property
    def reads_data(self) -> bool:
        """Whether --data changes what is measured."""
        return self.suite is not None or any(measure.data for measure in self.measures)

    def chosen(self, setting: Setting) -> Sequence[Measure]:
        """What is measured in this setting: the paper's own data where it is given and the entry can read it."""
        return (self.suite,) if self.suite is not None and setting.data else self.measures

    def lengths(self, setting: Setting) -> list[int]:
        """In tokens: those asked for, or the paper's multiples of the window; 0 for measures without a length."""
        if not self.multiples:
            return [0]
        return list(setting.lengths or (round(multiple * setting.window) for multiple in self.multiples))

    def commands(self, setting: Setting) -> list[str]:
        """The commands that the entry stands for, each once; one a length where the length scales RoPE."""
        lines = []
        for arm in self.arms:
            lengths = self.lengths(setting)
            groups = [lengths] if arm.rope is None else [[length] for length in lengths]
            lines += [measure.command(arm, group, setting) for measure in self.chosen(setting) for group in groups]
        return list(dict.fromkeys(lines))

    def unmatched(self, setting: Setting) -> dict[str, dict[str, Number]]:
        """The paper's numbers that no cell of this run stands beside, by row and what they are."""
        shown = {label for measure in self.chosen(setting) for label in measure.labels}
        rows = {
            arm.name: {label: x for (label, _), x in (arm.paper or {}).items() if label not in shown}
            for arm in self.arms
        }
        return {name: row for name, row in rows.items() if row}

    def check(self, setting: Setting) -> None:
        """Raise for what cannot run, before any work: `UsageError` for knobs and lengths, `DataError` for files."""
        setting.check(self)
        for measure in self.chosen(setting):
            measure.check(self.arms, self.lengths(setting), setting)

    def run(self, setting: Setting) -> Iterator[Cell]:
        """Every cell with the paper's number: what full attention reaches within the window, then row by row."""
        lengths = self.lengths(setting)
        for measure in self.chosen(setting):
            yield from measure.ceiling(lengths, setting)
        for arm in self.arms:
            for measure in self.chosen(setting):
                for cell in measure.cells(arm, lengths, setting):
                    yield replace(cell, paper=arm.number(cell.label, cell.length / setting.window))


def by_length(label: str, multiples: Sequence[float], *values: Number) -> dict[tuple[str, float], Number]:
    """A row of numbers, one a length."""
    return {(label, multiple): value for multiple, value in zip(multiples, values, strict=True)}


def at_once(**values: Number) -> dict[tuple[str, float], Number]:
    """Numbers without a length, by their labels with _ for spaces."""
    return {(label.replace("_", " "), 0): value for label, value in values.items()}
