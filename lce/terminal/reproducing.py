"""`lce reproduce`: the list of tables and figures, and one of them as a table that grows row by row, or as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from lce.lab.papers import ENTRIES, PAPERS, Cell, Entry, Setting, find
from lce.terminal.capacity import check_capacity
from lce.terminal.output import Output

HEADER = ["| row | measured | length | the paper | here | 95% interval | of |", "|---|---|---:|---:|---:|---:|---:|"]


def list_entries(output: Output) -> None:
    """One line each, paper by paper."""
    output.object([{"id": entry.id, "title": entry.title, "paper": entry.paper} for entry in ENTRIES.values()])
    width = max(map(len, ENTRIES))
    for paper, about in PAPERS.items():
        output.text(
            about, *(f"  {e.id:{width}}  {e.title}" for e in ENTRIES.values() if e.id.startswith(f"{paper}:")), ""
        )
    output.text("`lce reproduce ID` runs one; docs/reproduce.md says where every equation, table and figure is.")


def reproduce(id: str, output: Output, *, dry_run: bool, samples: int | None, **options: Any) -> None:
    """Run an entry, or with `dry_run` say what it would run, and print it."""
    from lce.lab.bench import bench
    from lce.lab.study.explain import explain
    from lce.terminal.reading import read_text

    entry = find(id)
    setting = Setting(
        **options,
        samples=samples or entry.samples,
        limit=samples,
        bar=lambda what: output.bar(f"{what}:", ""),
        tools={"bench": bench, "explain": explain, "read_text": read_text},
    )
    setting.check(entry)
    if not dry_run:
        _check(entry, setting)
    output.text(*about(entry, setting))
    if dry_run:
        return output.object({**described(entry, setting), "cells": None})
    output.text("", *HEADER)
    cells = []
    with output.noting():
        for cell in entry.run(setting):
            cells.append(cell)
            output.text(row(cell))
    notes = dict.fromkeys(f"{cell.label}: {cell.note}" for cell in cells if cell.note)
    output.text(*(["", *notes] if notes else []))
    output.object({**described(entry, setting), "cells": [dataclasses.asdict(cell) for cell in cells]})


def _check(entry: Entry, setting: Setting) -> None:
    """Raise for what cannot run, before any output; before texts of such lengths are made."""
    methods = [setting.method(arm) for arm in entry.arms]
    check_capacity(setting.model, methods, max(1, *entry.lengths(setting)), setting.loading)
    entry.check(setting)


def described(entry: Entry, setting: Setting) -> dict[str, Any]:
    """An entry and its setting as JSON."""
    return {
        "id": entry.id, "title": entry.title, "paper": entry.paper, "claim": entry.claim, "note": entry.note,
        "same_measurement": entry.is_same(setting), "model": setting.model, "window": setting.window,
        "seed": setting.seed, "samples": setting.samples, "commands": entry.commands(setting),
    }  # fmt: skip


def about(entry: Entry, setting: Setting) -> Iterable[str]:
    """What the paper measured, what is measured here, and the commands that measure the same."""
    yield f"{entry.id}: {entry.title}"
    yield f"the paper ({PAPERS[entry.id.partition(':')[0]]}): {entry.paper}"
    if entry.claim:
        yield f"it says: {entry.claim}"
    if entry.note:
        yield f"note: {entry.note}"
    for name, numbers in entry.unmatched(setting).items():
        yield f"its numbers, {name}: {', '.join(f'{label} {x}' for label, x in numbers.items())}"
    yield f"here: {setting.model}, window {setting.window:,}; {entry.difference(setting)}"
    yield "commands:"
    yield from (f"  {command}" for command in entry.commands(setting))


def row(cell: Cell) -> str:
    """A cell as a line of the table."""
    span = "" if cell.low is None or cell.high is None else f"{number(cell.low)} to {number(cell.high)}"
    length, n = (f"{x:,}" if x else "" for x in (cell.length, cell.n))
    texts = (cell.row, cell.label, length, number(cell.paper), number(cell.value), span, n)
    return f"| {' | '.join(texts)} |"


def number(x: float | str | None) -> str:
    """Two or three figures; text as it is, - for none."""
    if x is None or isinstance(x, str):
        return x or "-"
    if abs(x) >= 100:
        return f"{x:,.0f}"
    return f"{x:.4f}" if 0 < abs(x) < 0.1 else f"{x:.2f}"
