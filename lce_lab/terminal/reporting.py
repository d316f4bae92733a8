"""The output of `lce eval report`: recorded results as Markdown tables and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from lce.sizes import size_text
from lce.terminal.output import markdown
from lce_lab.eval.naming import AGAIN, range_text
from lce_lab.eval.perplexity import LossTable
from lce_lab.eval.report import HOLDS, Cell, Report, Table, fails, paired
from lce_lab.eval.scores import Score
from lce_lab.eval.selection import SHARES, SelectionTable
from lce_lab.terminal.measuring import loss_table


def report_lines(report: Report) -> list[str]:
    """Return a report as Markdown: all tasks side by side, then the tables and notes of each task."""
    lines = _side_by_side(report)
    for table in report.tables:
        lines += [f"## {table.title}: {table.model}", "", *_scores(table), ""]
        lines += [*_bytes(table), *_depths(table), *(f"- {note}" for note in _notes(table)), ""]
    others: list[tuple[LossTable | SelectionTable, list[str]]] = [(x, _losses(x)) for x in report.perplexities]
    others += [(x, _selection(x)) for x in report.selections]
    for other, own in others:
        lines += [f"## {other.title}: {other.model}", "", *own, ""]
    if report.conflicts:
        lines += [f"{report.conflicts:,} samples have different scores in several files; the first file counts.", ""]
    return lines[:-1]


def _side_by_side(report: Report) -> list[str]:
    """Return a table of tasks by methods for each model and length at which several tasks were asked, but by `why`."""
    lines: list[str] = []
    for model in dict.fromkeys(table.model for table in report.tables):
        tables = [table for table in report.tables if table.model == model and AGAIN not in table.way]
        for length in sorted({length for table in tables for length in table.lengths}):
            asked = [table for table in tables if length in table.lengths]
            if len(asked) > 1:
                lines += [f"## {len(asked)} tasks at {length:,} tokens: {model}", "", *_tasks(asked, length), ""]
    return lines


def _tasks(tables: Sequence[Table], length: int) -> list[str]:
    """Return a table of mean scores at one length, means over telling tasks, and their differences from the best."""
    methods = list(dict.fromkeys(method for table in tables for method, own in table.cells if own == length))
    rows, told = [], list[Table]()
    for table in tables:
        found = [table.cells.get((method, length)) for method in methods]
        top = table.ceiling_at(length)
        says_little = top is not None and fails(top) is not None
        if top and not says_little and all(found):
            told.append(table)
        scores = ["" if x is None else f"{x.score.mean:.2f}" for x in found]
        title = f"`{table.title}`{' (cannot rank methods)' if says_little else ''}"
        rows.append([title, f"{top.mean:.2f}" if top else "", *scores])
    if len(told) > 1:
        means = {name: fmean(table.cells[name, length].score.mean for table in told) for name in methods}
        rows.append([f"mean of {len(told)}", "", *(f"{mean:.2f}" for mean in means.values())])
        best = max(means, key=means.__getitem__)
        behind = [paired(told, name, best, length) for name in methods]
        if all(behind):
            signed = "{:+.2f} ({:+.2f} to {:+.2f})".format
            texts = ("" if x is None or name == best else signed(*x) for name, x in zip(methods, behind, strict=True))
            rows.append([f"minus `{best}`, paired", "", *texts])
    return markdown(["task", "`full` within the window", *(f"`{method}`" for method in methods)], rows)


def _by_length(table: Table, name: str, rows: Sequence[Sequence[str]], *more: str) -> list[str]:
    return markdown([name, *(f"{length:,}" for length in table.lengths), *more], rows)


def _row(table: Table, method: str, text: Callable[[Cell], str]) -> list[str]:
    cells = table.row(method)
    return [text(cells[length]) if length in cells else "" for length in table.lengths]


def _scores(table: Table) -> list[str]:
    rows, tells = [], bool(table.discriminates)
    for method in table.methods:
        scores = _row(table, method, lambda cell: _score(cell.score))
        holds = table.holds_to(method)
        rows.append([f"`{method}`", *scores, *([f"{holds:,}" if holds else "-"] if tells else [])])
    if table.ceiling is not None:
        length, top = table.ceiling
        cells = [_score(top), *[""] * len(table.lengths)][: len(table.lengths)]
        rows.append([f"ceiling: `full` at {length:,}", *cells, *([""] if tells else [])])
    return _by_length(table, "method", rows, *(["holds to"] if tells else []))


def _losses(table: LossTable) -> list[str]:
    windows = " and ".join(f"{window:,}" for window in table.windows)
    notes = [f"The window has {windows} tokens."] if windows else []
    lines = loss_table(table.cells.values(), intervals=True)
    return [*lines, "", *(f"- {note}" for note in [*notes, *table.notes])]


def _selection(table: SelectionTable) -> list[str]:
    rows = []
    for one in table.rows:
        reads = [size_text(round(one.all_bytes)), f"{one.all_bytes / one.full_bytes:.0%}"]
        spans = [one.intervals.get(field) for field in SHARES.values()]
        numbers = ["" if x is None else _mean(x, span) for x, span in zip(one.shares.values(), spans, strict=True)]
        rows.append([f"`{one.method}`", f"{one.length:,}", f"{one.tokens:,.0f}", *reads, *numbers])
    texts = range_text([one.samples for one in table.rows])
    means = f"Means over the queries of {texts} texts, layers and heads; bytes are of all layers."
    about = ["In brackets: 95% intervals over texts."] if any(one.intervals for one in table.rows) else []
    lines = markdown(["method", "length", "tokens", "reads", "of full", *SHARES], rows)
    return [*lines, "", *(f"- {note}" for note in (means, *about, *table.notes))]


def _bytes(table: Table) -> list[str]:
    def read(cell: Cell) -> str:
        return "" if cell.score.read_bytes is None else size_text(round(cell.score.read_bytes))

    rows = [[f"`{method}`", *_row(table, method, read)] for method in table.methods]
    rows = [row for row in rows if any(row[1:])]
    return [*_by_length(table, "read by a decode step", rows), ""] if rows else []


def _depths(table: Table) -> list[str]:
    """Return for each method a table of scores by the fact's depth in the text; [] if no depths were asked for."""
    lines = []
    for method in table.methods:
        rows, cells = [], [table.row(method).get(length, Cell()) for length in table.lengths]
        for depth in sorted({depth for cell in cells for depth in cell.depths}):
            scores = [cell.between(depth, depth) for cell in cells]
            rows.append([f"{depth:.0%}", *("" if score is None else f"{score.mean:.2f}" for score in scores)])
        if rows:
            lines += [*_by_length(table, f"`{method}`: depth", rows), ""]
    return lines


def _notes(table: Table) -> list[str]:
    scores = [cell.score for cell in table.cells.values()]
    if not scores:
        return table.notes
    kinds = " and ".join(sorted({score.interval for score in scores}))
    holds = [f"A method holds to the longest length up to which it has {HOLDS:.0%} of the ceiling's score."]
    told, counts = holds if table.discriminates else [], range_text([score.samples for score in scores])
    return [f"{counts} samples a cell; 95% intervals ({kinds}).", *told, *table.notes]


def _score(score: Score) -> str:
    return _mean(score.mean, (score.low, score.high))


def _mean(mean: float, span: tuple[float, float] | None) -> str:
    """Format a mean with its interval, if it has one, such as `0.95 (0.76–0.99)`."""
    return f"{mean:.2f}" if span is None else f"{mean:.2f} ({span[0]:.2f}–{span[1]:.2f})"


def report_object(report: Report) -> dict[str, Any]:
    """Return a report as a JSON object."""

    def other(table: LossTable | SelectionTable, **cells: list[Any]) -> dict[str, Any]:
        return {"model": table.model, "setting": table.setting, "notes": table.notes, **cells}

    return {
        "tables": [_table_object(table) for table in report.tables],
        "conflicts": report.conflicts,
        "perplexities": [
            other(x, cells=[{**dataclasses.asdict(cell), "method": method} for (method, _), cell in x.cells.items()])
            for x in report.perplexities
        ],
        "selections": [other(x, rows=[dataclasses.asdict(one) for one in x.rows]) for x in report.selections],
    }


def _table_object(table: Table) -> dict[str, Any]:
    ceiling = None if table.ceiling is None else {"length": table.ceiling[0], **dataclasses.asdict(table.ceiling[1])}
    about = {"model": table.model, "task": table.task, "way": table.way, "ceiling": ceiling}
    told = {"discriminates": table.discriminates, "notes": table.notes}
    cells = [
        {"method": name, "length": length, **dataclasses.asdict(cell.score), "discriminates": table.tells(length)}
        for (name, length), cell in table.cells.items()
    ]
    return {**about, **told, "holds_to": {method: table.holds_to(method) for method in table.methods}, "cells": cells}
