"""Entries: tables and figures of papers, with the paper's numbers and the commands that measure them with lce."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import lce
from lce.errors import UsageError, nearest
from lce.lab.papers import measures
from lce.lab.papers.measures import WITHIN, Answers, Measure
from lce.lab.papers.setting import Cell, Number, Row, Setting

Run = Callable[[str, int], Any]  # (command, number of tokens of prose for the command's FILE) -> the command's JSON


@dataclass(frozen=True)
class Entry:
    """A table or figure that lce can reproduce.

    `paper` says what the paper measured, on which data and model, and `claim` what the paper concludes. `measures` do
    not need the paper's data. If the user has the paper's data, `suite`, if set, is used instead. `same` says that
    `measures` measure what the paper measured, though on another model or text. `multiples` are the text lengths as
    multiples of the model's window.
    """

    id: str
    title: str
    paper: str
    rows: tuple[Row, ...]
    measures: tuple[Measure, ...]
    multiples: tuple[float, ...] = ()
    claim: str = ""
    samples: int = 20
    suite: Measure | None = None
    same: bool = False
    note: str = ""

    def is_same(self, setting: Setting) -> bool:
        """Return whether the run measures what the paper measured, perhaps on another model or text."""
        return self.same or (self.suite is not None and bool(setting.data))

    def difference(self, setting: Setting) -> str:
        """Return a text that says how the run differs from the paper's measurement, and which data --data takes."""
        data = ", ".join(setting.data)
        if self.suite is not None and data:
            return f"the paper's data, in {data}"
        known = "the paper's measurement" if self.same else "another measurement than the paper's: tasks made here"
        readers = [measure for measure in (*self.measures, self.suite) if measure is not None and measure.data]
        if not readers:
            return known
        return f"{known}, on {data}" if data else f"{known}; --data takes {readers[0].data}"

    def chosen(self, setting: Setting) -> Sequence[Measure]:
        """Return the measures for this setting: `suite` if data is given, else `measures`."""
        return (self.suite,) if self.suite is not None and setting.data else self.measures

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

    def unmatched(self, setting: Setting) -> dict[str, dict[str, Number]]:
        """Return the paper's numbers that this run does not measure, by row and label."""
        shown = {label for measure in self.chosen(setting) for label in measure.labels}
        rows: dict[str, Any] = {row.name: row.paper or {} for row in self.rows}
        rows = {name: {label: x[label] for label in x if label not in shown} for name, x in rows.items()}
        return {name: numbers for name, numbers in rows.items() if numbers}

    def check(self, setting: Setting) -> None:
        """Raise `UsageError` for knobs that no row has or that do not fit the window, or for unused data or lengths."""
        if setting.data and self.suite is None and not any(measure.data for measure in self.measures):
            raise UsageError(f"{self.id} reads no data; leave --data {setting.data[0]} out")
        if setting.lengths and not self.multiples:
            raise UsageError(f"{self.id} has no lengths; leave --lengths out")
        names = {row.method for row in self.rows}
        known = {name: {field.name for field in dataclasses.fields(lce.methods.find(name))} for name in names}
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
                for cell in measure.cells(row, found, setting):
                    multiple = cell.length / setting.window
                    paper = None if cell.row == WITHIN else row.number(cell.label, multiple, self.multiples)
                    yield replace(cell, paper=paper)


def read_entries() -> Iterator[Entry]:
    """Read the entries of `tables.toml`."""
    text = Path(__file__).with_name("tables.toml").read_text(encoding="utf-8")
    for entry in tomllib.loads(text)["entry"]:
        printed = entry.pop("printed", None)
        rows = tuple(Row(**row) for row in entry.pop("rows"))
        measures = [dict(each) for each in entry.pop("measures")]
        if printed:
            measures[0]["printed"] = {name: tuple(text.splitlines()) for name, text in printed.items()}
        suite = _measure(entry.pop("suite")) if "suite" in entry else None
        multiples = tuple(entry.pop("multiples", ()))
        yield Entry(**entry, rows=rows, measures=tuple(map(_measure, measures)), multiples=multiples, suite=suite)


def _measure(given: Mapping[str, Any]) -> Measure:
    """Return the measure that a TOML table describes. `kind` is the name of a class of `lce.lab.papers.measures`."""
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items() if name != "kind"}
    made: Measure = getattr(measures, given["kind"].capitalize())(**values)
    return made
