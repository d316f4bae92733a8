"""Tables of a board, the sentences that say how to read them, and both as one HTML file for a browser or a phone.

The file needs no network and no scripts. Records may be a stranger's, so every text in it is escaped, and the page
forbids itself to load or run anything. `lce_lab.terminal.leaderboard` writes the tables as Markdown.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from lce.sizes import size_text
from lce_lab.board.ranking import Board, Standing
from lce_lab.eval.naming import range_text
from lce_lab.eval.report import HOLDS, Table

UNKNOWN = "–"
STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; background: #fff; color: #1b1d22;
  font: 16px/1.5 -apple-system, "Segoe UI", Roboto, "Noto Sans", Arial, sans-serif; }
h1, h2, h3 { line-height: 1.25; overflow-wrap: anywhere; }
h3 { margin: 1.5rem 0 0.25rem; font-size: 1rem; }
img { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid #dcdad3; text-align: right; white-space: nowrap; }
th:first-child { position: sticky; left: 0; max-width: 11rem; padding-left: 0; background: #fff; text-align: left;
  white-space: normal; overflow-wrap: anywhere; }
thead th { color: #5a5f69; font-weight: 600; white-space: normal; }
tbody th { font-weight: 600; }
.grey { background: #efede7; color: #5a5f69; }
p, li { max-width: 44rem; color: #5a5f69; font-size: 0.9rem; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
GREY = "does not tell methods apart and does not count"


class Cell(NamedTuple):
    text: str
    grey: bool = False  # whether the cell does not tell methods apart


class Grid(NamedTuple):
    """A table: its title, its head, and rows of cells. The first cell of a row is a name."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def ranking(board: Board) -> Grid:
    """Return the table of a board's methods, with a column of quality for each length at which some task counts."""
    lengths = [n for n in board.lengths if any(n in each.quality for each in board.standings)]
    head = ["method", "rank", "reach", *(f"quality at {n:,}" for n in lengths), "read a token", "prefill"]
    return Grid(board.model, head, [_row(each, lengths) for each in board.standings])


def _row(each: Standing, lengths: Sequence[int]) -> list[Cell]:
    rank = UNKNOWN if each.rank is None else f"{each.rank}{' =' if each.tied else ''}"
    reach = UNKNOWN if each.reach is None else f"{each.reach:,}" if each.reach else f"< {each.first:,}"
    spans = [each.quality.get(n) for n in lengths]
    qualities = [UNKNOWN if x is None else f"{x[0]:.2f} ({x[1]:.2f}–{x[2]:.2f})" for x in spans]
    read = UNKNOWN if each.read_bytes is None else size_text(round(each.read_bytes))
    prefill = UNKNOWN if each.prefill is None else f"{each.prefill:.2f}x"
    return [Cell(text) for text in (each.method, rank, reach, *qualities, read, prefill)]


def tasks(board: Board) -> list[Grid]:
    """Return a table for each length, with a row for each method and a column for each task."""
    grids = []
    for length in board.lengths:
        tables, counted = [table for table in board.tables if length in table.lengths], board.counted(length)
        about, names = _named(tables)
        rows = []
        for each in board.standings:
            if board.asked(each.method, length):
                cells = [(table.cells.get((each.method, length)), table not in counted) for table in tables]
                scores = [Cell(UNKNOWN) if x is None else Cell(f"{x.score.mean:.2f}", grey) for x, grey in cells]
                rows.append([Cell(each.method), *scores])
        tops = [table.ceiling_at(length) for table in tables]
        rows.append([Cell("ceiling"), *(Cell(UNKNOWN if top is None else f"{top.mean:.2f}") for top in tops)])
        grids.append(Grid(f"{length:,} tokens{about}", ["method", *names], rows))
    return grids


def _named(tables: Sequence[Table]) -> tuple[str, list[str]]:
    """Return what all tasks have in common, for a title, and a short name for each task."""
    parts = [table.task.rpartition(": ") for table in tables]
    common = {(first, table.way) for (first, _, _), table in zip(parts, tables, strict=True)}
    if len(common) > 1:
        return "", [table.title for table in tables]
    return "".join(f", {text}" for text in common.pop() if text), [last for _, _, last in parts]


def legend(board: Board) -> list[str]:
    """Return sentences that say what the columns are and how methods are ranked."""
    ranked = [each.method for each in board.standings if each.rank is not None]
    within = sorted({table.ceiling[0] for table in board.tables if table.ceiling})
    if not ranked:
        why = "`full` fails every task within the window" if within else "`full` was not asked within the window"
        return [f"Nothing is ranked: {why}."]
    at = range_text(within)
    most = "all" if all(board.asked(method, board.length) for method in ranked) else "most"
    sizes = [cell.score.samples for table in board.tables for cell in table.cells.values()]
    return [
        f"Rank: by reach, then by quality at {board.length:,} tokens, the longest length that {most} were asked at. A "
        "method is tied with the best (=) if the 95% interval of their paired difference holds 0, at the longest "
        "length that both were asked at, and at the longest of these within the best's reach.",
        f"Reach: the longest length up to which a method has {HOLDS:.0%} of the ceiling, as a mean over the tasks that "
        f"the model can do. The ceiling is full attention within the window, at {at} tokens. A method that "
        "fails at the first length asked (<) is ranked as if it held just below.",
        "Quality: the mean score over the tasks that tell methods apart at the length, with its 95% interval. If some "
        "methods were asked fewer tasks, those count that leave no gap among most answers; who lacks one has no "
        f"quality there. A cell of a task has {range_text(sizes)} answers.",
        f"Read a token: bytes of keys, values and summaries that a decode step reads at {board.length:,} tokens. "
        "Prefill: the median time to read so long a text, over that of `full`; only times of one "
        "machine compare.",
    ]


def page(boards: Sequence[Board], picture: bytes | None) -> str:
    """Return the page's HTML, with a PNG picture of the boards, if given."""
    image = base64.b64encode(picture).decode() if picture else ""
    alt = "Quality of each method by the bytes that it reads for a token; the tables below have the numbers."
    body = ["<h1>Leaderboard</h1>", f'<img alt="{alt}" src="data:image/png;base64,{image}">' if image else ""]
    for board in boards:
        body += ["<section>", f"<h2>{escape(board.model)}</h2>", _table(ranking(board)), "<ul>"]
        body += [*(f"<li>{escape(line)}</li>" for line in legend(board)), "</ul>"]
        for grid in tasks(board):
            body += [f"<h3>{escape(grid.title)}</h3>", _table(grid)]
        body += [f'<p>A <span class="grey">grey</span> cell {GREY}.</p>', "</section>"]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>lce: leaderboard</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, body))
        + "\n</body>\n</html>\n"
    )


def _table(grid: Grid) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in grid.head)
    rows = "\n".join(f"<tr>{_name(first)}{''.join(map(_cell, cells))}</tr>" for first, *cells in grid.rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'


def _name(cell: Cell) -> str:
    return f'<th scope="row">{escape(cell.text)}</th>'


def _cell(cell: Cell) -> str:
    mark = ' class="grey"' if cell.grey else ""
    return f"<td{mark}>{escape(cell.text)}</td>"
