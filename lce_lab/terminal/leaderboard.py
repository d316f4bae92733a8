"""The commands `lce leaderboard add` and `show`. Heavy modules are imported in the functions, so `--help` is fast."""

from __future__ import annotations

from typing import Any

import click
from click import argument

from lce.terminal import options
from lce.terminal.options import flag
from lce.terminal.output import Output
from lce_lab.terminal.options import methods_options

folder_argument = argument("folder", metavar="FOLDER")


@click.group("leaderboard")
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
def add(**how: Any) -> None:
    """Add a model or a method to the records in FOLDER, which is made if missing.

    Asks the questions of `lce eval run --task medley --mode shared --questions 40`: seven tasks in one text, which is
    read once. `full` is always asked at 15/16 of the window; that is the ceiling. The same command resumes an
    interrupted one, and asks nothing twice. With --rope KIND and no --rope-factor, lengths beyond the window are asked,
    each with the length over the window as the factor.
    """
    from lce_lab.terminal import boards

    boards.add(**how)


@leaderboard.command()
@folder_argument
@flag("--page FILE.html", "Also write a page for a browser, which needs no network; needs lce[plot].")
@flag("--picture FILE.png", "Also draw quality by bytes read; needs lce[plot].")
@options.FORCE
@options.json_options
def show(folder: str, page: str | None, picture: str | None, force: bool, output: Output) -> None:
    """Rank the methods in all records of FOLDER, *.jsonl, as Markdown: a table for each model.

    By reach, the longest length up to which a method has 90% of the ceiling; then by quality. Tasks that do not tell
    methods apart do not count. Any record of `lce eval run --record` can be in FOLDER.
    """
    from lce_lab.terminal import boards

    boards.show(folder, page, picture, force, output)
