"""Reports of the progress of long calls, to a callback or as a bar on stderr."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from lce.errors import UsageError, shown

Progress = Callable[[int, int], None]  # called with the tokens done and the total; an exception in it ends the call
Label = str | Callable[[], str]  # a bar's label, or a function that returns the present one

STEPS_S = 5.0  # the seconds of work between two notices of `StepNotices`

_n_silencers = 0  # contexts of `silenced` that are open, in any thread


@contextmanager
def silenced() -> Iterator[None]:
    """Make `notice` print nothing within the context, in all threads."""
    global _n_silencers
    _n_silencers += 1
    try:
        yield
    finally:
        _n_silencers -= 1


def is_silent() -> bool:
    """Return whether `notice` prints nothing."""
    return _n_silencers > 0


def notice(text: str, level: int = logging.INFO) -> None:
    """Tell the user in a line what takes time: by the logger `lce` where a program has set it up, else on stderr."""
    log = logging.getLogger("lce")
    if is_silent() or (log.level or logging.INFO) > level:
        return
    if log.isEnabledFor(level) and log.hasHandlers():
        log.log(level, text)
    else:
        with bars_cleared():
            print(f"lce: {text}", file=sys.stderr)


@contextmanager
def bars_cleared() -> Iterator[None]:
    """Clear the bars on the terminal, and draw them again below what is printed within the context."""
    imported = getattr(sys.modules.get("tqdm"), "tqdm", None)  # None, too, while another thread imports it
    with imported.external_write_mode() if imported else nullcontext():
        yield


@dataclass
class StepNotices:
    """Notices of steps that take time, the first and every `STEPS_S` seconds: `compiling kernels: 3 done in 15 s`."""

    what: str
    n_done: int = 0
    spent: float = 0.0  # the seconds of the steps that are done
    told: float = 0.0  # those at the last notice
    begun: float = 0.0  # the time at which the present step began

    def begin(self, text: str) -> None:
        """Begin a step. Print `text` if it is the first."""
        if not self.n_done:
            notice(text)
        self.begun = time.monotonic()

    def end(self) -> None:
        """End the step. Print a notice if it is due."""
        self.spent, self.n_done = self.spent + time.monotonic() - self.begun, self.n_done + 1
        if self.spent >= self.told + STEPS_S:
            self.told = self.spent
            notice(f"{self.what}: {self.n_done} done in {self.told:.0f} s")


def label_now(label: Label) -> str:
    return label if isinstance(label, str) else label()


def reported(progress: Progress | bool | None, label: Label, unit: str = " tok") -> AbstractContextManager[Progress]:
    """Return the context of the callback for a user's option `progress`; True draws a bar, or in Jupyter a widget."""
    check_progress(progress)
    return _bar(label, unit) if progress is True else nullcontext(progress or (lambda done, total: None))


@contextmanager
def _bar(label: Label, unit: str) -> Iterator[Progress]:
    """Draw a bar on stderr, which stays a single line when the terminal's size changes; in Jupyter, a widget."""
    import tqdm.auto

    class Bar(tqdm.auto.tqdm):  # type: ignore[type-arg]  # its base depends on where it runs
        @staticmethod
        def status_printer(file: Any) -> Callable[[str], None]:
            # The cursor stays at the line's beginning. Where a terminal that became narrower wraps the line, the cursor
            # is then above all of its parts, and erasing the rest of the screen leaves none.
            return lambda text: print(f"\r\x1b[J{text}", end="\r", file=file, flush=True)

    is_plain = tqdm.auto.tqdm.status_printer is not tqdm.tqdm.status_printer
    draw = tqdm.auto.tqdm if is_plain or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb" else Bar
    with draw(desc=label_now(label).removesuffix(":"), unit=unit, leave=False, dynamic_ncols=True) as drawn:

        def advance(done: int, total: int) -> None:
            drawn.total, drawn.desc = total, label_now(label).removesuffix(":")
            drawn.update(done - drawn.n)
            if done >= total:
                drawn.refresh()
                drawn.close()  # so that later output starts on a new line

        yield advance


def check_progress(progress: object) -> None:
    """Raise `UsageError` unless the value is a callback, True, False or None."""
    if not isinstance(progress, bool | None) and (isinstance(progress, type) or not callable(progress)):
        raise UsageError(f"progress is {shown(progress)}; expected True, or a function of units done and in all")
