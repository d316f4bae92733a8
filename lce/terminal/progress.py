"""Progress bars on stderr; hidden where stderr is not a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self


class Bar:
    """A bar with speed and time left; call it with the units done and their total."""

    def __init__(self, label: str, unit: str, *, shown: bool = True) -> None:
        from tqdm import tqdm

        hidden = not (shown and sys.stderr.isatty())
        self._bar = tqdm(desc=label, unit=unit, leave=False, dynamic_ncols=True, disable=hidden)

    def __call__(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


class Bars:
    """One `Bar` after another, one a stage; call it with the stage, the units done and their total."""

    def __init__(self, *, shown: bool = True) -> None:
        self._shown = shown
        self._stage = ""
        self._bar = Bar("", "", shown=False)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._bar.__exit__(None, None, None)
            self._stage, self._bar = stage, Bar(stage, "", shown=self._shown)
        self._bar(done, total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)
