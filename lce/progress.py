"""Reports of the progress of long calls, to a callback or as a bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from lce.errors import UsageError, shown

Progress = Callable[[int, int], None]  # called with the tokens done and the total; an exception in it ends the call
StageProgress = Callable[[str, int, int], None]  # called with the stage's name, the units done and the total
Label = str | Callable[[], str]  # a bar's label, or a function that returns the present one

_silent = False


def silence(silent: bool = True) -> None:
    """Make `notice` print nothing from now on; with `silent` False, make it print again."""
    global _silent
    _silent = silent


def notice(text: str) -> None:
    """Print on stderr a line that tells the user what takes time."""
    if not _silent:
        print(f"lce: {text}", file=sys.stderr)


def label_now(label: Label) -> str:
    """Return a bar's present label."""
    return label if isinstance(label, str) else label()


@contextmanager
def reported(progress: Progress | bool | None, label: Label, unit: str = " tok") -> Iterator[Progress]:
    """Yield the callback for a user's option `progress`. For True it draws a bar on stderr, or in Jupyter a widget."""
    check_progress(progress)
    if progress is not True:
        yield progress or (lambda done, total: None)
        return
    from tqdm.auto import tqdm

    with tqdm(desc=label_now(label).removesuffix(":"), unit=unit, leave=False, dynamic_ncols=True) as drawn:

        def advance(done: int, total: int) -> None:
            drawn.total, drawn.desc = total, label_now(label).removesuffix(":")
            drawn.update(done - drawn.n)
            if done >= total:
                drawn.refresh()
                drawn.close()  # so that later output starts on a new line

        yield advance


def stages(progress: StageProgress | bool | None) -> StageProgress:
    """Return the callback for the option `progress` of a call with stages. For True it draws one bar per stage."""
    check_progress(progress)
    if progress is not True:
        return progress or (lambda stage, done, total: None)
    from tqdm.auto import tqdm

    drawn: dict[str, tqdm[NoReturn]] = {}

    def advance(stage: str, done: int, total: int) -> None:
        bar = drawn.get(stage) or drawn.setdefault(stage, tqdm(desc=stage, total=total, dynamic_ncols=True))
        bar.update(done - bar.n)
        if done >= total:
            drawn.pop(stage).close()

    return advance


def check_progress(progress: object) -> None:
    """Raise `UsageError` unless the value is a callback, True, False or None."""
    if not isinstance(progress, bool | None) and (isinstance(progress, type) or not callable(progress)):
        raise UsageError(f"progress is {shown(progress)}; expected True, or a function of units done and in all")
