"""`lce eval report`: records as Markdown tables and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lce.lab.eval.losses import LossTable
from lce.lab.eval.perplexity import Perplexity
from lce.lab.eval.report import HOLDS, Place, Report, Table
from lce.lab.eval.scores import Score
from lce.lab.eval.selections import SelectionTable
from lce.sizes import size_text
from lce.terminal.perplexity import number
from lce.terminal.tables import markdown


def report_lines(report: Report) -> list[str]:
    """Return a report as Markdown: all tasks side by side, then each task's scores, bytes read, depths and notes."""
    lines = _side_by_side(report)
    for table in report.tables:
        lines += [f"## {table.group.title}: {table.group.model}", "", *_scores(table), ""]
        lines += [*_bytes(table), *_depths(table), *(f"- {note}" for note in _notes(table)), ""]
    for losses in report.perplexities:
        lines += [f"## {losses.title}: {losses.model}", "", *_losses(losses), ""]
    for selection in report.selections:
        lines += [f"## {selection.title}: {selection.model}", "", *_selection(selection), ""]
    if report.conflicts:
        lines += [f"{report.conflicts:,} samples have different scores in several files; the first file counts.", ""]
    return lines[:-1]


def _side_by_side(report: Report) -> list[str]:
    """Return a table for each model and each length with several tasks: a row a task, a column a method."""
    lines: list[str] = []
    for model in dict.fromkeys(table.group.model for table in report.tables):
        tables = [table for table in report.tables if table.group.model == model]
        for length in sorted({length for table in tables for length in table.lengths}):
            asked = [table for table in tables if length in table.lengths]
            if len(asked) > 1:
                lines += [f"## {len(asked)} tasks at {length:,} tokens: {model}", "", *_tasks(asked, length), ""]
    return lines


def _tasks(tables: Sequence[Table], length: int) -> list[str]:
    """Return mean scores at one length, and means over the tasks that the model can do within its window."""
    methods = list(dict.fromkeys(method for table in tables for method, own in table.cells if own == length))
    rows, told = [], []
    for table in tables:
        found = [table.cells.get(Place(method, length)) for method in methods]
        if table.discriminates and all(found):
            told.append([cell.score.mean for cell in found if cell])
        scores = ["" if x is None else "-" if table.discriminates is False else f"{x.score.mean:.2f}" for x in found]
        top = "" if table.ceiling is None else f"{table.ceiling[1].mean:.2f}"
        rows.append([f"`{table.group.title}`", top, *scores])
    if len(told) > 1:
        rows.append(
            [f"mean of {len(told)}", "", *(f"{sum(column) / len(told):.2f}" for column in zip(*told, strict=True))]
        )
    return markdown(["task", "`full` within the window", *(f"`{method}`" for method in methods)], rows)


def _scores(table: Table) -> list[str]:
    rows, tells = [], bool(table.discriminates)
    for method in table.methods:
        found = [table.cells.get(place) for place in table.places(method)]
        hidden = table.discriminates is False
        scores = ["" if cell is None else "-" if hidden else _score(cell.score) for cell in found]
        rows.append([f"`{method}`", *scores, *([_length(table.holds_to(method))] if tells else [])])
    if table.ceiling is not None:
        length, top = table.ceiling
        cells = [_score(top) if i == 0 else "" for i in range(len(table.lengths))]
        rows.append([f"ceiling: `full` at {length:,}", *cells, *([""] if tells else [])])
    return markdown(["method", *(f"{length:,}" for length in table.lengths), *(["holds to"] if tells else [])], rows)


def _length(tokens: int | None) -> str:
    return f"{tokens:,}" if tokens else "-"


def _losses(table: LossTable) -> list[str]:
    """Return perplexities by length or position, with an explanation of the numbers."""
    columns = table.columns
    names = [f"{column.first:,}-{column.length:,}" if column.first else f"{column.length:,}" for column in columns]
    rows = []
    for method in table.methods:
        found = [table.cells.get((method, column)) for column in columns]
        rows.append([f"`{method}`", *("" if each is None else _perplexity(each) for each in found)])
    windows = " and ".join(f"{window:,}" for window in table.windows)
    notes = [f"The window has {windows} tokens."] if windows else []
    return [*markdown(["method", *names], rows), "", *(f"- {note}" for note in [*notes, *table.notes])]


def _selection(table: SelectionTable) -> list[str]:
    """Return methods' selections and reads, a row a method and length, with an explanation of the numbers."""
    names = ("method", "length", "tokens", "reads", "of full", "recall", "hit@1", "hit@5", "fact", "cover", "Gini")
    rows = []
    for row in table.rows:
        one = row.selection
        shares = (one.recall, one.hit1, one.hit5, one.fact, one.cover, one.gini, one.found, one.right)
        reads = [size_text(round(row.read_bytes)), f"{row.read_bytes / one.full_bytes:.0%}"]
        numbers = ["" if x is None else f"{x:.2f}" for x in shares]
        rows.append([f"`{row.method}`", f"{row.length:,}", f"{one.tokens:,.0f}", *reads, *numbers])
    texts = sorted({row.selection.samples for row in table.rows})
    counted = f"{texts[0]:,}" if len(texts) == 1 else f"{texts[0]:,} to {texts[-1]:,}"
    notes = [f"Means over the queries of {counted} texts, layers and heads; bytes are of all layers.", *table.notes]
    return [*markdown([*names, "found", "score"], rows), "", *(f"- {note}" for note in notes)]


def _perplexity(found: Perplexity) -> str:
    ends = "" if found.low is None else f" ({number(found.low)}–{number(found.high)})"
    return f"{number(found.perplexity)}{ends}"


def _bytes(table: Table) -> list[str]:
    """Return the bytes that a decode step reads of keys, values and their summaries."""
    rows = []
    for method in table.methods:
        cells = [table.cells.get(place) for place in table.places(method)]
        read = [None if cell is None else cell.score.read_bytes for cell in cells]
        if any(value is not None for value in read):
            rows.append([f"`{method}`", *("" if value is None else size_text(round(value)) for value in read)])
    if not rows:
        return []
    return [*markdown(["read by a decode step", *(f"{length:,}" for length in table.lengths)], rows), ""]


def _depths(table: Table) -> list[str]:
    """Return scores by depth, for samples at requested depths."""
    lines = []
    for method in table.methods:
        depths = sorted({depth for place in table.places(method) for depth in table.depths(place)})
        if not depths:
            continue
        rows = []
        for depth in depths:
            scores = [table.at_depth(place, depth) for place in table.places(method)]
            rows.append([f"{depth:.0%}", *("" if score is None else f"{score.mean:.2f}" for score in scores)])
        lines += [*markdown([f"`{method}`: depth", *(f"{length:,}" for length in table.lengths)], rows), ""]
    return lines


def _notes(table: Table) -> list[str]:
    """Return notes on the numbers: sample counts, kinds of intervals, and what does not discriminate."""
    scores = [cell.score for cell in table.cells.values()]
    if not scores:
        return table.notes
    least, most = min(score.samples for score in scores), max(score.samples for score in scores)
    count = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    kinds = " and ".join(sorted({score.interval for score in scores}))
    holds = [f"A method holds to the longest length up to which it has {HOLDS:.0%} of the ceiling's score."]
    told = holds if table.discriminates else []
    return [f"{count} samples a cell; 95% intervals ({kinds}).", *told, *table.notes]


def _score(score: Score) -> str:
    """Format a score, such as `0.95 (0.76–0.99)`."""
    return f"{score.mean:.2f} ({score.low:.2f}–{score.high:.2f})"


def report_object(report: Report) -> dict[str, Any]:
    """Return a report for JSON: every cell with its score, in numbers."""
    return {
        "tables": [_table_object(table) for table in report.tables], "conflicts": report.conflicts,
        "perplexities": [table.as_object() for table in report.perplexities],
        "selections": [table.as_object() for table in report.selections],
    }  # fmt: skip


def _table_object(table: Table) -> dict[str, Any]:
    ceiling = None if table.ceiling is None else {"length": table.ceiling[0], **dataclasses.asdict(table.ceiling[1])}
    return {
        **dataclasses.asdict(table.group),
        "ceiling": ceiling,
        "discriminates": table.discriminates,
        "notes": table.notes,
        "holds_to": {method: table.holds_to(method) for method in table.methods},
        "cells": [
            {**place._asdict(), **dataclasses.asdict(cell.score), "discriminates": table.tells(place.length)}
            for place, cell in table.cells.items()
        ],
    }
