"""What `lce leaderboard add` and `show` do, and their output: Markdown, JSON, a page and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lce
from lce.errors import DataError, UsageError
from lce.files import named, write_whole
from lce.terminal.options import new_file
from lce.terminal.output import Output, markdown
from lce_lab.board import grids
from lce_lab.board.grids import Grid
from lce_lab.board.page import page as page_of
from lce_lab.board.picture import draw
from lce_lab.board.questions import TASK, StandardSuite, record_of, records, rounds
from lce_lab.board.ranking import Board, read_boards
from lce_lab.terminal.suites import SuiteRun


def add(
    folder: str,
    model: str,
    methods: Sequence[lce.Method],
    lengths: Sequence[int] | None,
    suite: dict[str, Any],
    loading: dict[str, Any],
    output: Output,
) -> None:
    """Ask a model the standard questions with some methods, and keep the answers in the model's record of a folder."""
    records(folder)  # raises an error before the model is loaded
    questions = StandardSuite(**suite)
    engine = lce.load(model, **{**loading, "rope": None, "rope_factor": None})
    asked = rounds(engine, loading, lengths or questions.usual_lengths(engine))
    record, objects = record_of(folder, model, engine.setup.fingerprint), list[dict[str, Any]]()
    for how, some in asked:
        run = SuiteRun(model, methods, questions, [TASK], how, output, some, ceiling=True, sharing=engine)
        run.ask_all(str(record))
        objects += run.objects
    output.object(objects)
    output.figures(f"lce: the answers are in {named(record)}; `lce leaderboard show {named(folder)}` ranks them")


def show(folder: str, page: str | None, picture: str | None, force: bool, output: Output) -> None:
    """Print the rankings of a folder's records, and write them as a page and as a picture, if files are named."""
    if page is not None and page == picture:
        raise UsageError(f"--page and --picture are both {named(page)}; expected two files")
    files = {name: new_file(name, force).path for name in (page, picture)}
    boards = read_boards(folder)
    image = draw(boards) if any(files.values()) else None
    if picture is not None and image is None:
        raise DataError("there is nothing to draw: no method has a quality; add methods, or remove --picture")
    written = {page: page_of(boards, image).encode() if page else b"", picture: image or b""}
    for name, path in files.items():
        if path is not None:
            write_whole(Path(path), written[name], force=force)
    output.object([board_object(board) for board in boards])
    output.text(*board_lines(boards))
    for path in filter(None, files.values()):
        output.figures(f"lce: wrote {named(path)}")


def board_lines(boards: Sequence[Board]) -> list[str]:
    """Return boards as Markdown. Cells that do not count are in parentheses."""
    lines: list[str] = []
    for board in boards:
        lines += [f"## {board.model}", "", *_table(grids.ranking(board)), ""]
        lines += [*(f"- {sentence}" for sentence in grids.legend(board)), ""]
        for grid in grids.tasks(board):
            lines += [f"### {grid.title}", "", *_table(grid), ""]
        lines += [f"A score in parentheses {grids.GREY}.", ""]
    return lines[:-1]


def _table(grid: Grid) -> list[str]:
    rows = [
        [f"`{first.text}`", *(f"({cell.text})" if cell.grey else cell.text for cell in cells)]
        for first, *cells in grid.rows
    ]
    return markdown(grid.head, rows)


def board_object(board: Board) -> dict[str, Any]:
    """Return a board as a JSON object."""
    cells = [
        {
            "task": table.title,
            "length": length,
            "method": method,
            "score": cell.score.mean,
            "samples": cell.score.samples,
            "counts": table in board.counted(length),
        }
        for table in board.tables
        for (method, length), cell in table.cells.items()
    ]
    ranking = [dataclasses.asdict(each) for each in board.standings]
    return {"model": board.model, "length": board.length, "ranking": ranking, "cells": cells}
