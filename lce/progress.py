"""Progress of long calls: a callback, or a bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from lce.errors import UsageError, shown

Progress = Callable[[int, int], None]  # takes the tokens done and all tokens; an exception in it ends the call
StageProgress = Callable[[str, int, int], None]  # takes the stage, the units done and all units

_silent = False


def silence(silent: bool = True) -> None:
    """Print no notices from now on; with `silent` False, print them again."""
    global _silent
    _silent = silent


def notice(text: str) -> None:
    """Print one line on stderr that says what takes time."""
    if not _silent:
        print(f"lce: {text}", file=sys.stderr)


@contextmanager
def reported(progress: Progress | bool | None, label: str, unit: str = " tok") -> Iterator[Progress]:
    """Yield the callback for a user's `progress=`. For True it draws a bar on stderr, in Jupyter a widget."""
    check_progress(progress)
    if progress is not True:
        yield progress or (lambda done, total: None)
        return
    from tqdm.auto import tqdm

    with tqdm(desc=label, unit=unit, leave=False, dynamic_ncols=True) as drawn:

        def advance(done: int, total: int) -> None:
            drawn.total = total
            drawn.update(done - drawn.n)
            if done >= total:
                drawn.refresh()
                drawn.close()  # later output starts on a new line

        yield advance


def stages(progress: StageProgress | bool | None) -> StageProgress:
    """Return the callback for a user's `progress=` of work in stages. For True it draws a bar for each stage."""
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
