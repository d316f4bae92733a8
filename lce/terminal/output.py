"""Where a command's output goes: the result to stdout, as text or JSON; progress and figures to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from lce.terminal import progress

if TYPE_CHECKING:
    from lce.engine.decode import Stream


@dataclass(frozen=True)
class Output:
    """The options --json and --quiet, and how to write under them."""

    json: bool = False
    quiet: bool = False

    def bar(self, label: str, unit: str) -> AbstractContextManager[Callable[[int, int], None]]:
        """The progress bar of one stage."""
        return progress.bar(label, unit, shown=not self.quiet)

    def bars(self) -> AbstractContextManager[Callable[[str, int, int], None]]:
        """The progress bars of a task with several stages."""
        return progress.bars(shown=not self.quiet)

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
