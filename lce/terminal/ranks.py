"""Commands under torchrun: with --ranks each process runs the same command, and the first alone reads and prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TextIO, TypeVar

import click

from lce.errors import DataError, ModelError, RankError, UsageError

T = TypeVar("T")
FLAG = "--ranks"
_is_quiet = False  # whether another rank prints for this process


def quieten(args: Sequence[str]) -> None:
    """Drop what this process prints if another rank prints the same. `args` are those of the command line."""
    if FLAG in args and os.environ.get("RANK", "0") != "0":
        global _is_quiet
        _is_quiet = True
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # it lives as long as the process


def join(_ctx: click.Context, _param: click.Parameter, value: bool) -> str | None:
    """Join the other ranks, and return the option `ranks` of `lce.load`: the callback of --ranks."""
    if not value:
        return None
    from lce.engine.dividing import ranks_of

    ranks_of("all")
    return "all"


def from_first(work: Callable[[], T]) -> T:
    """Return what `work` returns on the first rank; all ranks raise its error. Without --ranks, return `work()`."""
    context = click.get_current_context(silent=True)
    if context is None or not context.params.get("ranks"):
        return work()
    from lce.engine.dividing import ranks_of

    ranks = ranks_of("all")
    found = ranks.together(lambda: None if ranks.rank else work())
    return ranks.exchange(found)[0]  # type: ignore[return-value]  # the first rank's is no None


def error_stream(error: BaseException) -> TextIO | None:
    """Return the stream for a failed command's line. A rank that is not the first tells what the first cannot know."""
    known = isinstance(error, UsageError | ModelError | DataError | RankError) or getattr(error, "told", False)
    others = _is_quiet and not known and isinstance(error, Exception)
    return sys.__stderr__ if others else sys.stderr
