"""Progress bars on stderr; hidden where stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def bar(label: str, unit: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar with speed and time left; call it with the units done and their total."""
    from tqdm import tqdm

    hidden = not (shown and sys.stderr.isatty())
    with tqdm(desc=label, unit=unit, leave=False, dynamic_ncols=True, disable=hidden) as drawn:

        def advance(done: int, total: int) -> None:
            drawn.total = total
            drawn.update(done - drawn.n)
            if done >= total:
                drawn.close()

        yield advance


@contextmanager
def bars(*, shown: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """One bar after another, one a stage; call it with the stage, the units done and their total."""
    with ExitStack() as current:
        advance: dict[str, Callable[[int, int], None]] = {}  # of the current stage

        def advance_stage(stage: str, done: int, total: int) -> None:
            if stage not in advance:
                current.close()
                advance.clear()
                advance[stage] = current.enter_context(bar(stage, "", shown=shown))
            advance[stage](done, total)

        yield advance_stage
