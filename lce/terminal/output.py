"""Writes a command's output: the result to stdout, as text, tables or JSON, and progress and figures to stderr."""

import json
import os
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from lce.errors import WindowWarning
from lce.progress import Label, Progress, bars_cleared, label_now, reported, silenced
from lce.sizes import size_text
from lce.system import peak_memory

if TYPE_CHECKING:
    from lce.cache.tier import Traffic
    from lce.engine.stream import Stats, Stream
    from lce.tokenizer.thinking import Thinking
    from lce.tokenizer.tokenizer import Tokenizer


FIRST_LINE_S = 5.0  # Seconds before the first line of progress, where stderr is no terminal.
NEXT_LINE_S = 10.0  # Seconds between two lines of progress.


def tell(text: str) -> None:
    """Write to stderr; at a terminal, break lines between words, so that they fit its width."""
    with suppress(OSError):
        width = os.get_terminal_size(sys.stderr.fileno()).columns or len(text) + 1
        fill = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
        text = "\n".join(map(fill, text.split("\n")))
    with bars_cleared():
        click.echo(text, err=True)


def note(text: str) -> None:
    """Write a note to stderr, even under --quiet."""
    tell(f"lce: note: {text}")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table; all columns except the first are right-aligned, for numbers."""
    return [f"| {' | '.join(line)} |" for line in [head, ["---", *["---:"] * (len(head) - 1)], *rows]]


def plain(value: Any) -> Any:
    """Return what JSON has for a value: the fields of a dataclass, the entries of a mapping, or the text of a path."""
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return dict(value) if isinstance(value, Mapping) else os.fspath(value)


def aligned(rows: Collection[Sequence[str]], rest: Callable[[str, int], str] = str.rjust) -> list[str]:
    """Return rows of cells as columns of text; the first column is left-aligned, others as `rest` says."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(rest, row[1:], widths[1:])]).rstrip() for row in rows]


@dataclass
class ProgressLines:
    """A function that writes, where stderr is no terminal, `prefill 8,192 of 32,000, 1,504 tok/s, 16 s left`."""

    label: Label
    unit: str
    clock: Callable[[], float] = time.monotonic
    due: float = field(default_factory=lambda: time.monotonic() + FIRST_LINE_S)  # the time of the next line
    begin: tuple[float, int] | None = None  # the time and the units done at the first call

    def __call__(self, done: int, total: int) -> None:
        now = self.clock()
        began, before = self.begin = self.begin or (now, done)  # a resumed job does not begin at 0
        if now < self.due or done >= total:
            return
        self.due = now + NEXT_LINE_S
        line = f"{label_now(self.label)} {done:,} of {total:,}"
        if now > began and done > before:
            speed = (done - before) / (now - began)
            rate = f", {speed:{',.0f' if speed >= 10 else '.2g'}}{self.unit}/s" if self.unit else ""
            line += f"{rate}, {(total - done) / speed:,.0f} s left"
        click.echo(line, err=True)


@dataclass(frozen=True)
class Output:
    """A writer of a command's output, which follows the options --json and --quiet."""

    json: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        command = click.get_current_context(silent=True)
        if self.quiet and command is not None:
            command.with_resource(silenced())  # until the command ends: its process may go on

    def bar(self, label: Label, unit: str) -> AbstractContextManager[Progress]:
        """Show progress on stderr: a bar, or a line now and then. Return the context of the function to report to."""
        is_bar = not self.quiet and sys.stderr.isatty()
        return reported(is_bar or (None if self.quiet else ProgressLines(label, unit)), label, unit)

    @contextmanager
    def noting(self, *dropped: type[Warning]) -> Iterator[list[str]]:
        """Show the first warning of each lce warning class as a note on stderr. Append the note to the yielded list."""
        kinds, texts = {*dropped}, list[str]()
        with warnings.catch_warnings():
            shown = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
                if not category.__module__.startswith("lce"):
                    shown(message, category, *where, **more)
                elif category not in kinds:
                    kinds.add(category)
                    texts.append(str(message))
                    note(str(message))

            warnings.simplefilter("always", WindowWarning)
            warnings.showwarning = show
            yield texts

    def object(self, content: Any) -> None:
        """Write a result to stdout as JSON, only under --json."""
        if self.json:
            click.echo(json.dumps(content, default=plain))

    def text(self, *lines: str) -> None:
        """Write a result to stdout as lines, except under --json."""
        if lines and not self.json:
            with bars_cleared():
                click.echo("\n".join(lines))

    def figures(self, line: str) -> None:
        """Write a line of figures to stderr, except under --quiet."""
        if not self.quiet:
            tell(line)

    def generation(self, stream: "Stream", thinking: "Thinking | None" = None) -> None:
        """Run a generation; except under --json write its text to stdout, with a line break. Terminals dim thoughts."""
        ends_line, is_dim = False, thinking is not None and sys.stdout.isatty()
        try:
            for text in _dimmed(stream, thinking) if thinking and is_dim else map(str, stream):
                if not self.json:
                    sys.stdout.write(text)
                    sys.stdout.flush()
                    ends_line = True
            ends_line = not self.json
        finally:
            if ends_line:
                click.echo()


def _dimmed(stream: "Stream", thinking: "Thinking") -> Iterator[str]:
    """Yield an answer's text for a terminal: a dim thought, an empty line, and the answer itself."""
    reader, gap = thinking.reader(), ""
    for text, last in chain(((piece.text, False) for piece in stream), [("", True)]):
        thought, answer = reader(text, last=last)
        gap = "\n\n" if thought else gap
        yield click.style(thought, dim=True) if thought else ""
        yield gap + answer if answer else ""
        gap = "" if answer else gap


def generation_line(stats: "Stats") -> str:
    """Return the line of speeds and sizes that is printed after a generation."""
    speed = stats.decode_tokens_per_s  # 0 for fewer than two tokens
    first = f"first token {stats.first_token_s:.2f} s"
    return prefill_line(stats, first, *([f"decode {speed:,.1f} tok/s"] if speed else []))


def prefill_line(stats: "Stats", *more: str) -> str:
    """Return the line of speeds and sizes that is printed after a prefill, with `more` parts."""
    before = f" ({stats.read_before:,} read before)" if stats.read_before else ""
    prefill = f"{stats.read_before + stats.prompt_tokens:,} prompt tokens{before}"
    spent = [f"{name} {seconds:.2f} s" for name, seconds in stats.more_s.items()]
    speed = f"prefill {stats.prefill_tokens_per_s:,.1f} tok/s"
    return " | ".join([prefill, speed, *spent, *more, memory_text(stats)])


def memory_text(stats: "Stats", peaks: Mapping[str, int] | None = None) -> str:
    """Return a text with the cache's size in each tier, the peak memory, and the traffic of each tier."""
    held = {tier: size for tier, size in stats.memory.items() if size} or stats.memory
    cache = ", ".join(f"{tier} {size_text(size)}" for tier, size in held.items())
    peak = ", ".join(f"{where} {size_text(size)}" for where, size in (peaks or peak_memory()).items())
    traffic = "".join(f" | {tier} {_traffic_text(t)}" for tier, t in stats.traffic.items())
    return f"cache: {cache} | peak memory: {peak}{traffic}"


def _traffic_text(traffic: "Traffic") -> str:
    """Return the traffic of one tier, such as `93% of 1,024 page requests met, 12.0 MiB read in, 1.5 GiB moved out`."""
    requests = traffic.hits + traffic.misses
    hits = f"{traffic.hits / requests:.0%} of {requests:,} page requests met, " if requests else ""
    early = f" ({traffic.early:,} ahead of need)" if traffic.early else ""
    return f"{hits}{size_text(traffic.bytes_in)} read in, {size_text(traffic.bytes_out)} moved out{early}"


def unasked(prompt: str | list[Any], tokenizer: "Tokenizer") -> str:
    """Return a hint if a prompt does not use the model's chat template; else ""."""
    template = isinstance(prompt, str) and tokenizer.chat_template is not None and not tokenizer.has_control(prompt)
    return "lce: the prompt is continued as it stands; --chat asks this model to answer it" if template else ""
