"""Reports of work that has stages: one bar on stderr after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from lce.progress import Progress, check_progress, reported

StageProgress = Callable[[str, int, int], None]  # called with the stage's name, the units done and the total


@contextmanager
def bars(bar: Callable[[str, str], AbstractContextManager[Progress]]) -> Iterator[StageProgress]:
    """Show one bar per stage, opened by `bar(stage, unit)`; yield the function that advances the bars."""
    with ExitStack() as current:
        shown: dict[str, Progress] = {}  # the current stage and its bar's function

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in shown:
                current.close()
                shown.clear()
                shown[stage] = current.enter_context(bar(stage, ""))
            shown[stage](done, total)

        yield advance


@contextmanager
def stages(progress: StageProgress | bool | None) -> Iterator[StageProgress]:
    """Yield the function for a user's option `progress`. For True it draws one bar per stage."""
    check_progress(progress)
    with bars(lambda stage, unit: reported(progress is True, stage, unit)) as drawn:
        yield progress if callable(progress) else drawn
