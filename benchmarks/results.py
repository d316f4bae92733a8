"""Writes benchmarks/RESULTS.md from records: what was measured, by which command, on which machine.

    python benchmarks/results.py

`RESULTS.md.in` has the page's prose. A line `{{NAME}}` of it becomes tables: the runs of `record/tables/NAME.toml`,
newest first, or what a function of `MADE` adds up from the answers in `record/`. To add a figure, add a `[[run]]` to a
file of `record/tables`.
"""

from __future__ import annotations

import argparse
import datetime
import re
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import study_tables

from lce.terminal.output import markdown
from lce_lab.board.grids import ranking
from lce_lab.board.ranking import read_boards
from lce_lab.eval.report import Report
from lce_lab.terminal.reporting import report_lines

HERE = Path(__file__).parent
PAGE, PROSE, RECORD = HERE / "RESULTS.md", HERE / "RESULTS.md.in", HERE / "record"
TABLES = RECORD / "tables"
WIDTH = 140  # of a line of the page's prose
ENOUGH = 48  # questions that a row of the study must have been asked to stand on the page
MACHINES: dict[str, dict[str, str]] = tomllib.loads((TABLES / "machines.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Run:
    """A table that one command, or a few, printed on one machine."""

    date: datetime.date
    machine: str  # a key of machines.toml
    command: str  # a line for each command
    columns: Sequence[str]
    rows: Sequence[Sequence[str | int]]  # fractions are text, so that 1.30 stays 1.30
    setting: str = ""  # what a reader must know beside the command
    commit: str = ""

    def text(self) -> str:
        """Return the run as Markdown: machine, date and setting; the command; the table."""
        commit = f", commit {self.commit}" if self.commit else ""
        about = f"**{MACHINES[self.machine]['name']}, {self.date}{commit}.** {self.setting}"
        about = textwrap.fill(about, WIDTH, break_on_hyphens=False, break_long_words=False)
        rows = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in self.rows]
        return "\n".join([about, "", "```", self.command, "```", "", *markdown(self.columns, rows)])


def runs(name: str) -> list[Run]:
    """Return the runs of `record/tables/NAME.toml`, newest first."""
    found = tomllib.loads((TABLES / f"{name}.toml").read_text(encoding="utf-8"), parse_float=str)
    return sorted((Run(**run) for run in found["run"]), key=lambda run: run.date, reverse=True)


class Table(NamedTuple):
    """A table of a report: its head, and rows of cells. The first cell of a row is its name."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def column(self, name: str, *, intervals: bool = False) -> dict[str, str]:
        """Return the cells of a column by the names of the rows; without `intervals`, means alone."""
        cells = {row[0]: row[self.head.index(name)] for row in self.rows}
        return cells if intervals else {row: re.sub(r" \(.*–.*\)$", "", cell) for row, cell in cells.items()}


def reported(record: str, heading: str, nth: int = 0) -> Table:
    """Return what `lce eval report` prints of a record: the nth table below the heading that begins with `heading`."""
    lines = "\n".join(report_lines(Report.read([RECORD / record])))
    section = lines.partition(f"## {heading}")[2].partition("\n## ")[0]
    table = re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE)[nth]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return Table(head, rows)


def machines() -> str:
    """Return the machines that the runs name."""
    return "\n".join(f"- **{machine['name']}**: {machine['what']}." for machine in MACHINES.values())


def leaderboard() -> str:
    """Return the ranking of `lce leaderboard show`, with perplexities behind the window."""
    (board,) = read_boards(RECORD / "smollm2")
    grid = ranking(board)
    table = Table(grid.head, [[f"`{row[0].text}`", *(cell.text for cell in row[1:])] for row in grid.rows])
    lengths = ["7,680", "16,384", "32,768"]
    columns = [table.column(f"quality at {length}", intervals=length == "16,384") for length in lengths]
    losses = reported("smollm2/perplexity.jsonl", "perplexity, by position").column("8,192-16,384")
    columns += [table.column("prefill"), losses]
    head = ["method", *lengths, "prefill", "perplexity"]
    return "\n".join(markdown(head, [[name, *(each[name] for each in columns)] for name in table.column("rank")]))


def demo() -> str:
    """Return pass keys by length, means of the tasks that tell methods apart, and bytes read, for each method."""
    lengths = ["512", "2,048", "8,192", "32,768"]
    keys, read = (reported("passkeys.jsonl", "passkey: demo ", nth) for nth in (0, 1))
    columns = [keys.column(length) for length in lengths]
    for length in lengths[1:3]:
        tasks = reported("tasks.jsonl", f"18 tasks at {length}")
        columns.append(dict(zip(tasks.head, next(row for row in tasks.rows if row[0] == "mean of 14"), strict=True)))
    columns.append(read.column("8,192"))
    head = ["method", *(f"keys, {length}" for length in lengths), "tasks, 2,048", "tasks, 8,192", "read a token"]
    return "\n".join(markdown(head, [[name, *(each.get(name, "") for each in columns)] for name in read.column("512")]))


def study() -> str:
    """Return what each row of the study found of facts in words, and its share of the cache, for each model."""
    parts = list[str]()
    for folder in ("smollm2", "qwen"):
        for model, asked in study_tables.read(RECORD / "study" / folder, ["many_facts"]).items():
            rows = list[list[str]]()
            for length in asked.lengths:
                for name in asked.ranked(length):
                    if len(answers := asked.answers[name, length]) >= ENOUGH:
                        share = study_tables.reading(asked, name, length)[1]
                        rows.append([f"{length:,}", f"`{name}`", study_tables.found(answers), share])
            table = markdown(["tokens", "row", "found/asked", "of the cache"], rows)
            parts.append("\n".join([f"### {model}", "", *table]))
    return "\n\n".join(parts)


MADE: dict[str, Callable[[], str]] = {"machines": machines, "leaderboard": leaderboard, "demo": demo, "study": study}


def tables(name: str) -> str:
    """Return what stands for a line `{{NAME}}` of the prose."""
    return MADE[name]() if name in MADE else "\n\n".join(run.text() for run in runs(name))


def page() -> str:
    """Return the page as the records make it."""
    prose = PROSE.read_text(encoding="utf-8")
    made = re.sub(r"^\{\{(\w+)\}\}$", lambda found: tables(found[1]), prose, flags=re.MULTILINE)
    return made.replace("| --- |", "|---|").replace(" ---: |", "---:|")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
