"""Entries: tables and figures of papers, with the paper's numbers and the commands that measure them with lce.

A verdict says whether a difference that lce measured has the direction of the paper's. The paper's difference is
that between a row and the entry's baseline, in every printed table that has both. If no column shows what lce measured,
the table's average is used. The difference of two perplexities that lce measured is the mean over windows of the
difference of losses, with Student's 95% interval, since one window's losses differ less than those of two windows. The
difference of other cells has an interval computed from the intervals of the cells (Newcombe, 1998, method 10; for means
MOVER, Zou and Donner, 2008). It is too wide rather than too narrow, because both cells have the same samples. If the
interval contains 0, or the printed tables disagree, the verdict is `cannot tell`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import copysign, hypot, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import lce
from lce.errors import UsageError, nearest
from lce_lab.eval.perplexity import student
from lce_lab.papers import measures
from lce_lab.papers.measures import WITHIN, Answers, Measure, Published
from lce_lab.papers.setting import Cell, Printed, Row, Setting

SAME, OPPOSITE, UNKNOWN = "same direction", "opposite", "cannot tell"
SHOWN = 0.001  # nats: papers print three digits of a perplexity, which show no smaller difference
Run = Callable[[str, int], Any]  # (command, number of tokens of prose for the command's FILE) -> the command's JSON


@dataclass(frozen=True)
class Entry:
    """A table or figure that lce can reproduce.

    `paper` says what the paper measured, on which data and model, and `claim` what the paper concludes. `measures` do
    not need the paper's data. If the user has the paper's data, `suite`, if set, is used instead. `same` says that
    `measures` measure what the paper measured, though on another model or text. `multiples` are the text lengths as
    multiples of the model's window. `printed` has the paper's cells, `average` the name of its mean over the tasks of
    `suite`. Rows are compared with the row called `baseline`. An entry without rows is printed and not measured.
    `on_demo` says why the demo model differs from the paper, if that is known.
    """

    id: str
    title: str
    paper: str
    rows: tuple[Row, ...] = ()
    measures: tuple[Measure, ...] = ()
    printed: tuple[Printed, ...] = ()
    baseline: str = ""
    average: str = ""
    multiples: tuple[float, ...] = ()
    claim: str = ""
    samples: int = 20
    suite: tuple[Published, ...] = ()
    same: bool = False
    note: str = ""
    on_demo: str = ""

    def is_same(self, setting: Setting) -> bool:
        """Return whether the run measures what the paper measured, perhaps on another model or text."""
        published = bool(self.suite and setting.data)
        return self.same or (published and not any(measure.differs for measure in self.suite))

    def difference(self, setting: Setting) -> str:
        """Return a text that says how the run differs from the paper's measurement, and which data --data takes."""
        data = ", ".join(setting.data)
        if self.suite and data:
            others = ", ".join(measure.differs for measure in self.suite if measure.differs)
            known = f"another measurement than the paper's: {others}" if others else "the paper's data"
            return f"{known}, in {data}"
        known = "the paper's measurement" if self.same else "another measurement than the paper's: tasks made here"
        readers = [measure for measure in (*self.measures, *self.suite) if measure.data]
        if not readers:
            return known
        return f"{known}, on {data}" if data else f"{known}; --data takes {readers[0].data}"

    def chosen(self, setting: Setting) -> Sequence[Measure]:
        """Return the measures for this setting: `suite` if data is given, else `measures`."""
        return self.suite if self.suite and setting.data else self.measures

    def lengths(self, setting: Setting) -> list[int]:
        """Return the text lengths in tokens: the setting's, or else the paper's; [0] if the entry has no lengths."""
        if not self.multiples:
            return [0]
        return list(setting.lengths or (round(multiple * setting.window) for multiple in self.multiples))

    def commands(self, setting: Setting) -> list[str]:
        """Return the commands that measure all rows, each command once."""
        lengths = self.lengths(setting)
        found = [m.commands(row, lengths, setting) for row in self.rows for m in self.chosen(setting)]
        return list(dict.fromkeys(command for commands in found for command in commands))

    def check(self, setting: Setting) -> None:
        """Raise `UsageError` for knobs that no row has or that do not fit the window, or for unused data or lengths."""
        if setting.data and not self.suite and not any(measure.data for measure in self.measures):
            raise UsageError(f"{self.id} reads no data; leave --data {setting.data[0]} out")
        if setting.lengths and not self.multiples:
            raise UsageError(f"{self.id} has no lengths; leave --lengths out")
        names = {row.method for row in self.rows}
        known = {name: {each.name for each in lce.methods.knobs_of(lce.methods.find(name))} for name in names}
        for key in setting.knobs:
            name, dot, knob = key.partition(".")
            if dot and name not in names:
                raise UsageError(f"-o {key}: {self.id} does not run {name!r}; {nearest(name, names)}")
            if not any((knob if dot else key) in known[each] for each in ([name] if dot else names)):
                valid = sorted(set().union(*known.values()))
                raise UsageError(f"-o {key}: no row of {self.id} has this knob; {nearest(knob or key, valid)}")
        for row in self.rows:
            setting.method(row)

    def run(self, setting: Setting, run: Run) -> Iterator[Cell]:
        """Yield measured cells with the paper's numbers, row by row. Cells of `full` within the window come first."""
        found = list[Cell]()
        for cell in self._measured(setting, run):
            found.append(cell)
            yield self._beside_paper(cell, setting)
        if self.average and self.chosen(setting) is self.suite:
            yield from (self._beside_paper(mean, setting) for mean in self._averages(found))

    def _averages(self, cells: Sequence[Cell]) -> Iterator[Cell]:
        """Yield each row's mean over tasks, one for each length to which prompts were cut."""
        for row, length in dict.fromkeys((cell.row, cell.length) for cell in cells):
            own = [(x.value or 0.0, x.low or 0.0, x.high or 0.0) for x in cells if (x.row, x.length) == (row, length)]
            mean = sum(value for value, _, _ in own) / len(own)
            below = hypot(*(value - low for value, low, _ in own)) / len(own)
            above = hypot(*(high - value for value, _, high in own)) / len(own)
            yield Cell(row, self.average, length, mean, mean - below, mean + above, len(own))

    def _beside_paper(self, cell: Cell, setting: Setting) -> Cell:
        if cell.row == WITHIN:
            return cell
        numbers = {x.of: x.number(cell.row, cell.label, cell.length / setting.window) for x in self.printed}
        return replace(cell, paper={of: number for of, number in numbers.items() if number is not None})

    def judged(self, cells: Sequence[Cell], setting: Setting) -> list[Cell]:
        """Return the cells with verdicts. A task that stands in for the paper's is compared with its average."""
        bases = {(cell.label, cell.length): cell for cell in cells if cell.row == self.baseline}
        judged = []
        for cell in cells:
            base, multiple = bases.get((cell.label, cell.length)), cell.length / setting.window
            if base is not None and cell.row not in (WITHIN, self.baseline):
                average = self.average if multiple > 1 else ""
                sign = printed_sign(self.printed, cell.row, self.baseline, cell.label, multiple, average)
                cell = cell if sign is None else replace(cell, verdict=verdict(sign, cell, base))
            judged.append(cell)
        return judged

    def _measured(self, setting: Setting, run: Run) -> Iterator[Cell]:
        lengths, measured = self.lengths(setting), set[Measure]()
        for row, measure in product(self.rows, self.chosen(setting)):
            for command in measure.commands(row, lengths, setting):
                tokens = measure.text_tokens(lengths, setting)
                is_known = isinstance(measure, Answers) and measure in measured  # measure `full` within the window once
                try:
                    found = run(f"{command} --no-ceiling" if is_known else command, tokens)
                except UsageError as error:
                    if not any("--no-ceiling" in note for note in getattr(error, "__notes__", [])):
                        raise
                    assert isinstance(measure, Answers)
                    label = measure.label(str(error).partition(":")[0])
                    yield Cell(WITHIN, label, setting.window, None, note=f"not within the window: {error}")
                    found = run(f"{command} --no-ceiling", tokens)
                if isinstance(measure, Answers):
                    measured.add(measure)
                yield from measure.cells(row, found, setting)


def read_entries() -> Iterator[Entry]:
    """Read the entries of the papers' files."""
    for paper in ("longheads", "dca", "esa"):
        text = Path(__file__).with_name(f"{paper}.toml").read_text(encoding="utf-8")
        for entry in tomllib.loads(text)["entry"]:
            entry["rows"] = tuple(Row(**row) for row in entry.get("rows", ()))
            entry["printed"] = tuple(Printed.read(**table) for table in entry.get("printed", ()))
            entry["multiples"] = tuple(entry.get("multiples", ()))
            for name in ("measures", "suite"):
                entry[name] = tuple(_measure(**table) for table in entry.get(name, ()))
            yield Entry(**entry)


def _measure(kind: str, **given: Any) -> Measure:
    """Return the measure that a TOML table describes. `kind` is the name of a class of `lce_lab.papers.measures`."""
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
    made: Measure = getattr(measures, kind.capitalize())(**values)
    return made


def printed_sign(
    printed: Sequence[Printed], row: str, baseline: str, label: str, multiple: float, average: str
) -> float | None:
    """Return 1 or -1 if the row's number is larger or smaller in all printed tables, 0 if unclear, None if in none."""
    signs = set()
    for table in printed:
        has_label = table.has(label)
        if has_label or average:
            found = table.difference(row, baseline, *((label, multiple) if has_label else (average, table.at or 0)))
            signs |= set() if found is None else {copysign(1, found) if found else 0.0}
    return None if not signs else signs.pop() if len(signs) == 1 else 0.0


def interval(cell: Cell, baseline: Cell) -> tuple[float, float] | None:
    """Return the 95% interval of `cell` minus `baseline`, of windows' losses in nats if known; None without one."""
    if cell.losses and len(cell.losses) == len(baseline.losses) > 1:
        differences = [own - other for own, other in zip(cell.losses, baseline.losses, strict=True)]
        mean, spread = fmean(differences), student(len(differences) - 1) * stdev(differences) / sqrt(len(differences))
        return mean - max(spread, SHOWN), mean + max(spread, SHOWN)
    known = [x for each in (cell, baseline) for x in (each.low, each.value, each.high) if x is not None]
    if len(known) < 6 or cell.low == cell.high or baseline.low == baseline.high:
        return None
    low, mean, high, low_0, mean_0, high_0 = known
    return mean - mean_0 - hypot(mean - low, high_0 - mean_0), mean - mean_0 + hypot(high - mean, mean_0 - low_0)


def verdict(sign: float, cell: Cell, baseline: Cell) -> str:
    """Return whether the difference of two cells has the paper's sign."""
    found = interval(cell, baseline)
    ours = 0.0 if found is None else 1.0 if found[0] > 0 else -1.0 if found[1] < 0 else 0.0
    if not sign or not ours:
        return UNKNOWN
    return SAME if ours == sign else OPPOSITE
