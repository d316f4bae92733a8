"""Tables of a board, and the sentences that say how to read them. A grey cell does not tell methods apart.

`lce_lab.board.page` writes them as HTML, `lce_lab.terminal.leaderboard` as Markdown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lce.sizes import size_text
from lce_lab.board.ranking import Board, Standing
from lce_lab.eval.naming import range_text
from lce_lab.eval.report import HOLDS, Table

UNKNOWN = "–"
GREY = "does not tell methods apart and does not count"


class Cell(NamedTuple):
    text: str
    grey: bool = False


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
