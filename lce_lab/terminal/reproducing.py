"""The output of `lce reproduce`: the list of papers' tables and figures, or the measured cells of one, as text or JSON.

An entry is a table or figure. Its numbers come from `lce` commands, which run in this process with `--json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shlex
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import click

import lce
from lce.terminal.output import Output, markdown
from lce_lab.eval.prose import sentences
from lce_lab.papers import ENTRIES, PAPERS, Cell, Entry, Setting, find
from lce_lab.papers.entry import OPPOSITE, SAME, UNKNOWN
from lce_lab.terminal.methods import check_capacity

VERDICTS = (SAME, OPPOSITE, UNKNOWN)
COLUMNS = ("row", "measured", "length", "the paper", "here", "95% interval", "of")


def list_entries(output: Output) -> None:
    """Print a line for each table or figure that can be measured, paper by paper."""
    output.object([{"id": entry.id, "title": entry.title, "paper": entry.paper} for entry in ENTRIES.values()])
    width = max(map(len, ENTRIES))
    for paper, about in PAPERS.items():
        output.text(
            about, *(f"  {e.id:{width}}  {e.title}" for e in ENTRIES.values() if e.id.startswith(f"{paper}:")), ""
        )
    output.text("`lce reproduce ID` runs one; docs/reproduce.md says where every equation, table and figure is.")


def reproduce(id: str, output: Output, *, dry_run: bool, samples: int | None, **options: Any) -> None:
    """Measure the table or figure `id` and print its cells; if `dry_run`, only print the commands that would run."""
    entry = find(id)
    setting = Setting(**options, samples=samples or entry.samples, limit=samples)
    entry.check(setting)
    if dry_run:
        output.text(*about(entry, setting))
        return output.object({**described(entry, setting), "cells": None})
    methods = [setting.method(row) for row in entry.rows]
    check_capacity(setting.model, methods, max(1, *entry.lengths(setting)), setting.loading)
    cells: list[Cell] = []
    with Commands(setting, output) as commands:
        for cell in entry.run(setting, commands.run):  # wrong options raise here, before anything is printed
            output.text(*([] if cells else [*about(entry, setting), "", *markdown(COLUMNS, [])]), line(cell))
            cells.append(cell)
    cells = entry.judged(cells, setting)
    output.text(*([] if cells else about(entry, setting)), *verdict_lines(entry, cells))
    if entry.on_demo and setting.model == "demo":
        output.text("", f"on the demo: {entry.on_demo}")
    notes = dict.fromkeys(f"{cell.label}: {cell.note}" for cell in cells if cell.note)
    output.text(*(["", *notes] if notes else []))
    output.object({**described(entry, setting), "cells": [dataclasses.asdict(cell) for cell in cells]})


class Commands(contextlib.ExitStack):
    """A context manager that runs `lce` commands in this process. It deletes the commands' files of prose on exit."""

    def __init__(self, setting: Setting, output: Output) -> None:
        super().__init__()
        self.setting, self.output = setting, output
        self.context = click.get_current_context().find_root()
        self.texts: dict[int, str] = {}

    def run(self, command: str, tokens: int) -> Any:
        """Run a command line and return its JSON output. The word FILE becomes a file of `tokens` tokens of prose."""
        words = [self._file(tokens) if word == "FILE" else word for word in shlex.split(command)[1:]]
        words += ["--json", *(["-"] if words[0] == "bench" else [])]
        words += ["--quiet"] * (self.output.quiet and words[0] not in ("plan", "explain"))
        root = self.context.command
        assert isinstance(root, click.Group)
        name, found, rest = root.resolve_command(self.context, words)
        assert found is not None
        context = found.make_context(name, rest, parent=self.context)
        with contextlib.redirect_stdout(io.StringIO()) as printed, context:
            found.invoke(context)
        return json.loads(printed.getvalue())

    def _file(self, tokens: int) -> str:
        if tokens not in self.texts:
            folder = self.enter_context(tempfile.TemporaryDirectory())
            path = Path(folder) / "prose.txt"
            path.write_text(_prose(self.setting, tokens), encoding="utf-8")
            self.texts[tokens] = str(path)
        return self.texts[tokens]


def _prose(setting: Setting, tokens: int) -> str:
    tokenizer = lce.load(setting.model).tokenizer
    prose, text, ids = sentences(Random(setting.seed)), "", list[int]()
    while len(ids) < tokens:  # the text grows by a tenth per step, so a token is encoded about ten times
        text = " ".join([text, *(next(prose) for _ in range(100 + len(text) // 1000))]).strip()
        ids = tokenizer.encode(text, bos=False)
    return tokenizer.decode(ids[:tokens])


def described(entry: Entry, setting: Setting) -> dict[str, Any]:
    """Return an entry (a paper's table or figure) and the setting of its measurement as a JSON object."""
    found = {name: getattr(entry, name) for name in ("id", "title", "paper", "claim", "note")}
    found["same_measurement"] = entry.is_same(setting)
    found |= {name: getattr(setting, name) for name in ("model", "window", "seed", "samples")}
    printed = [dataclasses.asdict(table) for table in entry.printed]
    return {**found, "commands": entry.commands(setting), "baseline": entry.baseline, "printed": printed}


def about(entry: Entry, setting: Setting) -> Iterable[str]:
    """Yield lines about how the paper measured, how lce measures, and the commands that lce runs."""
    yield f"{entry.id}: {entry.title}"
    yield f"the paper ({PAPERS[entry.id.partition(':')[0]]}): {entry.paper}"
    if entry.claim:
        yield f"it says: {entry.claim}"
    if entry.note:
        yield f"note: {entry.note}"
    for table in entry.printed:
        rows = [[name, *(x if isinstance(x, str) else f"{x:g}" for x in cells)] for name, cells in table.rows.items()]
        columns = [f"{table.label} {name}".strip() for name in table.columns]
        yield from ("", *markdown([f"the paper: {table.of}", *columns], rows))
    if not entry.rows:
        return
    yield from ("", f"here: {setting.model}, window {setting.window:,}; {entry.difference(setting)}", "commands:")
    yield from (f"  {command}" for command in entry.commands(setting))


def line(cell: Cell) -> str:
    """Return one measured number as a row of a Markdown table whose columns are `COLUMNS`."""
    span = "" if cell.low is None or cell.high is None else f"{number(cell.low)} to {number(cell.high)}"
    length, n = (f"{x:,}" if x else "" for x in (cell.length, cell.n))
    paper = "; ".join(number(x) if len(cell.paper) == 1 else f"{of} {number(x)}" for of, x in cell.paper.items())
    texts = (cell.row, cell.label, length, paper or "-", number(cell.value), span, n)
    return f"| {' | '.join(texts)} |"


def verdict_lines(entry: Entry, cells: Sequence[Cell]) -> Iterable[str]:
    """Yield a table of verdicts: one line for each row and label, with the lengths of each verdict."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for cell in cells:
        if cell.verdict:
            lengths = found.setdefault((cell.row, cell.label), {}).setdefault(cell.verdict, [])
            lengths.append(f"{cell.length:,}" if cell.length else "")
    if found:
        names = [each for each in VERDICTS if any(each in by for by in found.values())]
        rows = [
            [*key, *("; ".join(by.get(name, [])) or "yes" * (name in by) for name in names)]
            for key, by in found.items()
        ]
        yield from ("", f"Beside {entry.baseline}, is the difference that of the paper?", "")
        yield from markdown(["row", "measured", *(f"{name}, at" for name in names)], rows)


def number(x: float | str | None) -> str:
    """Format a number with about three digits, None as -; return text unchanged."""
    if x is None or isinstance(x, str):
        return x or "-"
    if abs(x) >= 100:
        return f"{x:,.0f}"
    return f"{x:.4f}" if 0 < abs(x) < 0.1 else f"{x:.2f}"
