"""Where a command's output goes: the result to stdout, as text or JSON; progress and figures to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from lce.engine.stream import Stream


@dataclass(frozen=True)
class Output:
    """The options --json and --quiet, and how to write under them."""

    json: bool = False
    quiet: bool = False

    @contextmanager
    def bar(self, label: str, unit: str) -> Iterator[Callable[[int, int], None]]:
        """A progress bar with speed and time left, where stderr is a terminal; call it with units done and in all."""
        from tqdm import tqdm

        hidden = self.quiet or not sys.stderr.isatty()
        with tqdm(desc=label, unit=unit, leave=False, dynamic_ncols=True, disable=hidden) as drawn:

            def advance(done: int, total: int) -> None:
                drawn.total = total
                drawn.update(done - drawn.n)
                if done >= total:
                    drawn.close()

            yield advance

    @contextmanager
    def bars(self) -> Iterator[Callable[[str, int, int], None]]:
        """One bar after another, one a stage; call it with the stage, units done and in all."""
        with ExitStack() as current:
            advance: dict[str, Callable[[int, int], None]] = {}  # of the current stage

            def advance_stage(stage: str, done: int, total: int) -> None:
                if stage not in advance:
                    current.close()
                    advance.clear()
                    advance[stage] = current.enter_context(self.bar(stage, ""))
                advance[stage](done, total)

            yield advance_stage

    def object(self, content: Any) -> None:
        """Writes a result to stdout as JSON, under --json only."""
        if self.json:
            click.echo(json.dumps(content))

    def text(self, *lines: str) -> None:
        """Writes a result to stdout as lines, except under --json."""
        if lines and not self.json:
            click.echo("\n".join(lines))

    def figures(self, line: str) -> None:
        """Writes a line of figures to stderr, except under --quiet."""
        if not self.quiet:
            click.echo(line, err=True)

    def generation(self, stream: Stream) -> None:
        """Runs a generation to its end and writes its text as it comes, except under --json.

        A line break follows the text, even where the generation is interrupted.
        """
        if self.json:
            for _ in stream:
                pass
            return
        written = False
        try:
            for piece in stream:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
                written = True
        except BaseException:
            if written:
                sys.stdout.write("\n")
            raise
        click.echo()
