"""The commands `lce leaderboard add` and `show`, and their output: Markdown, JSON, a page and a picture.

Heavy modules are imported in the functions, so that `--help` is fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import argument

import lce
from lce.errors import DataError, UsageError
from lce.files import named, write_whole
from lce.terminal import options
from lce.terminal.exits import Listing
from lce.terminal.options import flag
from lce.terminal.output import Output, markdown
from lce_lab.terminal.options import methods_options

if TYPE_CHECKING:
    from lce_lab.board.grids import Grid
    from lce_lab.board.ranking import Board

folder_argument = argument("folder", metavar="FOLDER")


@click.group("leaderboard", cls=Listing)
def leaderboard() -> None:
    """Rank methods on your models: ask them standard questions, and show who does best, up to which length."""


@leaderboard.command()
@folder_argument
@options.model_option
@methods_options
@flag("--lengths LIST", "Such as 2k,8k.  [default: 1/4, 15/16, 2 and 4 windows]", type=options.COUNTS)
@options.packed(
    "suite",
    dict,
    flag("--samples N", "Documents for each length, with 27 questions each.", type=options.COUNT, default=4),
    flag("--filler prose|noise|essays:DIR", "The text that facts are hidden in.", default="prose"),
)
@options.loading_options
@options.output_options
def add(
    folder: str, model: str, lengths: list[int] | None, suite: Any, loading: dict[str, Any], output: Output, **who: Any
) -> None:
    """Add a model or a method to the records in FOLDER, which is made if missing.

    Asks the questions of `lce eval run --task medley --mode shared --questions 40`: seven tasks in one text, which is
    read once. `full` is always asked at 15/16 of the window; that is the ceiling. The same command resumes an
    interrupted one, and asks nothing twice. With --rope KIND and no --rope-factor, lengths beyond the window are asked,
    each with the length over the window as the factor.
    """
    from lce_lab.board.questions import TASK, StandardSuite, record_of, records, rounds
    from lce_lab.terminal.suites import SuiteRun

    records(folder)  # raises an error before the model is loaded
    questions = StandardSuite(**suite)
    engine = lce.load(model, **{**loading, "rope": None, "rope_factor": None})
    asked = rounds(engine, loading, lengths or questions.usual_lengths(engine))
    record, objects = record_of(folder, model, engine.setup.fingerprint), list[dict[str, Any]]()
    for how, some in asked:
        what: dict[str, Any] = {"suite": questions, "tasks": [TASK], "loading": how, "lengths": some}
        run = SuiteRun(model, **who, **what, output=output, ceiling=True, sharing=engine)
        run.ask_all(str(record))
        objects += run.objects
    output.object(objects)
    output.figures(f"lce: the answers are in {named(record)}; `lce leaderboard show {named(folder)}` ranks them")


@leaderboard.command()
@folder_argument
@flag("--page FILE.html", "Also write a page for a browser, which needs no network; needs lce[plot].")
@flag("--picture FILE.png", "Also draw quality by bytes read; needs lce[plot].")
@options.FORCE
@options.json_options
def show(folder: str, page: str | None, picture: str | None, force: bool, output: Output) -> None:
    """Rank the methods in all records of FOLDER, *.jsonl, as Markdown: a table for each model.

    Methods are ranked by reach, the longest length up to which a method has 90% of the ceiling, and then by quality.
    Tasks that do not tell methods apart do not count. Any record of `lce eval run --record` can be in FOLDER.
    """
    from lce_lab.board.grids import page as page_of
    from lce_lab.board.picture import draw
    from lce_lab.board.ranking import read_boards

    if page is not None and page == picture:
        raise UsageError(f"--page and --picture are both {named(page)}; expected two files")
    files = {name: options.new_file(name, force).path for name in (page, picture)}
    boards = read_boards(folder)
    image = draw(boards) if any(files.values()) else None
    if picture is not None and image is None:
        raise DataError("there is nothing to draw: no method has a quality; add methods, or remove --picture")
    written = {page: page_of(boards, image).encode() if page else b"", picture: image or b""}
    for name, path in files.items():
        if path is not None:
            write_whole(Path(path), written[name], force=force)
    output.object([_object(board) for board in boards])
    output.text(*_lines(boards))
    for path in filter(None, files.values()):
        output.figures(f"lce: wrote {named(path)}")


def _lines(boards: Sequence[Board]) -> list[str]:
    from lce_lab.board import grids

    lines: list[str] = []
    for board in boards:
        lines += [f"## {board.model}", "", *_table(grids.ranking(board)), ""]
        lines += [*(f"- {sentence}" for sentence in grids.legend(board)), ""]
        for grid in grids.tasks(board):
            lines += [f"### {grid.title}", "", *_table(grid), ""]
        lines += [f"A score in parentheses {grids.GREY}.", ""]
    return lines[:-1]


def _table(grid: Grid) -> list[str]:
    rows = [[f"`{row[0].text}`", *(f"({x.text})" if x.grey else x.text for x in row[1:])] for row in grid.rows]
    return markdown(grid.head, rows)


def _object(board: Board) -> dict[str, Any]:
    cells = []
    for table in board.tables:
        for (method, length), cell in table.cells.items():
            about = {"task": table.title, "length": length, "method": method, "score": cell.score.mean}
            cells.append({**about, "samples": cell.score.samples, "counts": table in board.counted(length)})
    ranking = [dataclasses.asdict(each) for each in board.standings]
    return {"model": board.model, "length": board.length, "ranking": ranking, "cells": cells}
