"""`lce eval perplexity`: every method at every length, as a table that grows line by line or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import lce
from lce.errors import UsageError
from lce.lab.eval.perplexity import Perplexity, Text, check, ends, stream, windows
from lce.lab.eval.record import Record
from lce.terminal.capacity import check_capacity
from lce.terminal.output import Output
from lce.terminal.reading import read_text
from lce.terminal.tables import markdown

HEADER = f"{'method':<14}{'tokens':>16}{'samples':>9}{'scored':>10}{'perplexity':>12}  95% interval"


@dataclass(frozen=True)
class PerplexityTable:
    """A measurement: a model with some methods at some lengths, over the texts of some files."""

    model: str
    methods: Sequence[lce.Method]
    lengths: Sequence[int]
    files: Sequence[str]
    streams: bool
    stride: int
    scored: str
    most: int | None
    longest: int | None
    loading: Mapping[str, Any]

    def measure(self, record: str | None, output: Output) -> None:
        """Measure and print the table. Refusals come before the first line."""
        check(self.stride, self.scored)
        if min(self.lengths) < 2:
            raise UsageError(f"a length is {min(self.lengths)}; expected 2 or more tokens")
        losses = None if record is None else Record(record)
        contents = [(name, read_text(name)) for name in self._files()]
        check_capacity(self.model, self.methods, max(self.lengths), self.loading)
        texts: list[Text] = []
        found: list[Perplexity] = []
        objects = []
        for method in self.methods:
            engine = lce.load(self.model, method, **self.loading)
            if not texts:
                texts = [Text.of(engine, *content) for content in contents]
                ends(texts, 2 if self.streams else self._longest, self.stride)
            for length in [max(self.lengths)] if self.streams else self.lengths:
                noting = output.noting(engine.beyond(length))
                unit = " tok" if self.streams else " windows"
                with noting as notes, output.bar(f"{method.name} at {length:,}:", unit) as bar:
                    got = self._measured(engine, texts, length, losses, bar)
                output.text(*([] if found else [HEADER]), *map(row, got))
                found += got
                objects += [{**asdict(each), "warning": next(iter(notes), None)} for each in got]
        output.object(objects)
        if len(self.methods) > 1 and len(self.lengths) > 1:
            output.text("", *table(found))

    def _measured(self, engine: lce.Engine, texts: list[Text], length: int, losses: Record | None, bar: Any) -> Any:
        about = {"checkpoint": self.model}
        if self.streams:
            return stream(
                engine, texts, lengths=self.lengths, stride=self.stride, record=losses, about=about, progress=bar
            )
        return [
            windows(
                engine, texts, length=length, longest=self._longest, stride=self.stride, scored=self.scored,
                most=self.most, record=losses, about=about, progress=bar,
            )
        ]  # fmt: skip

    @property
    def _longest(self) -> int:
        """The length of the windows whose ends all other windows share."""
        return max(*self.lengths, self.longest or 0)

    def _files(self) -> list[str]:
        if list(self.files).count("-") > 1:
            raise UsageError("--text is stdin twice; give it once")
        return list(self.files)


def row(found: Perplexity) -> str:
    """Return one line of the table under `HEADER`."""
    tokens = f"{found.first:,}-{found.length:,}" if found.setting == "stream" else f"{found.length:,}"
    interval = "" if found.low is None else f"  {number(found.low)} to {number(found.high)}"
    figures = f"{found.samples:>9,}{found.tokens:>10,}{number(found.perplexity):>12}"
    return f"{found.method:<14}{tokens:>16}{figures}{interval}"


def number(x: float | None) -> str:
    """Return a perplexity to four digits."""
    return "" if x is None else f"{x:,.0f}" if 1000 <= x < 1e9 else f"{x:.4g}"


def table(found: Sequence[Perplexity]) -> list[str]:
    """Return perplexities as a Markdown table: a row a method, a column a length."""
    columns = list(dict.fromkeys((each.first, each.length) for each in found))
    values = {(each.method, each.first, each.length): number(each.perplexity) for each in found}
    names = [f"{length:,}" if found[0].setting == "windows" else f"{first:,}-{length:,}" for first, length in columns]
    methods = dict.fromkeys(each.method for each in found)
    rows = [[f"`{method}`", *(values.get((method, *column), "") for column in columns)] for method in methods]
    return markdown(["method", *names], rows)
