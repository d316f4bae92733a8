"""`lce eval perplexity`: every method at every length, as a table that grows line by line or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import lce
from lce.errors import UsageError
from lce.lab.eval.perplexity import Perplexity, Text, check, ends, stream, windows
from lce.lab.eval.record import Record
from lce.terminal.methods import check_capacity
from lce.terminal.output import Output
from lce.terminal.reading import read_text
from lce.terminal.tables import markdown

HEADER = f"{'method':<14}{'tokens':>16}{'samples':>9}{'scored':>10}{'perplexity':>12}  95% interval"


def show_perplexities(
    model: str, methods: Sequence[lce.Method], lengths: Sequence[int], files: Sequence[str], streams: bool, stride: int,
    scored: str, most: int | None, longest: int | None, record: str | None, loading: Mapping[str, Any], output: Output,
) -> None:  # fmt: skip
    """Measure each method at each length over the texts of some files. Refusals come before the first line.

    Windows of all lengths end where windows of the largest length, or of `longest` tokens, end.
    """
    check(stride, scored)
    if min(lengths) < 2:
        raise UsageError(f"a length is {min(lengths)}; expected 2 or more tokens")
    if list(files).count("-") > 1:
        raise UsageError("--text is stdin twice; give it once")
    losses = None if record is None else Record(record)
    contents = [(name, read_text(name)) for name in files]
    check_capacity(model, methods, max(lengths), loading)
    longest = max(*lengths, longest or 0)
    texts: list[Text] = []
    found: list[Perplexity] = []
    objects = []
    for method in methods:
        engine = lce.load(model, method, **loading)
        if not texts:
            texts = [Text.of(engine, *content) for content in contents]
            ends(texts, 2 if streams else longest, stride)
        for length in [max(lengths)] if streams else lengths:
            unit, noting = " tok" if streams else " windows", output.noting(engine.beyond(length))
            with noting as notes, output.bar(f"{method.name} at {length:,}:", unit) as bar:
                how: dict[str, Any] = {"stride": stride, "record": losses, "about": {"checkpoint": model}}
                if streams:
                    got = stream(engine, texts, lengths=lengths, progress=bar, **how)
                else:
                    how |= {"longest": longest, "scored": scored, "most": most}
                    got = [windows(engine, texts, length=length, progress=bar, **how)]
            output.text(*([] if found else [HEADER]), *map(row, got))
            found += got
            objects += [{**asdict(each), "warning": next(iter(notes), None)} for each in got]
    output.object(objects)
    if len(methods) > 1 and len(lengths) > 1:
        output.text("", *table(found))


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
