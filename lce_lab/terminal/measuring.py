"""The output of `lce eval selection`, `why` and `perplexity`: JSON, or a line as soon as it is measured."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import lce
from lce.errors import UsageError, WindowWarning
from lce.sizes import size_text
from lce.terminal.output import Output, markdown, note
from lce.terminal.reading import read_text
from lce_lab.eval.perplexity import Perplexity, check, ends, stream, windows
from lce_lab.eval.record import Record
from lce_lab.eval.selection import Selection, measure, measure_text
from lce_lab.eval.suite import MadeSuite
from lce_lab.eval.why import CAUSES, Verdict, explain
from lce_lab.stages import bars
from lce_lab.terminal.methods import check_capacity

WIDTHS = {"recall": 8, "hit@1": 7, "hit@5": 7, "fact": 6, "cover": 7, "Gini": 6, "found": 7, "score": 7}
SELECTION_HEADER = f"{'method':<12}{'length':>8}{'tokens':>8}{'reads':>11}{'of full':>9}"
SELECTION_HEADER += "".join(f"{name:>{width}}" for name, width in WIDTHS.items())
CAUSES_HEADER = f"{'method':<12}{'task':<16}{'length':>8}" + "".join(f"{cause:>11}" for cause in CAUSES)
LOSS_HEADER = f"{'method':<14}{'tokens':>16}{'samples':>9}{'scored':>10}{'perplexity':>12}  95% interval"


@dataclasses.dataclass
class Compared:
    """The options that all comparisons of methods have. `record` is the file of a record, or None."""

    model: str
    methods: Sequence[lce.Method]
    lengths: Sequence[int]
    record: str | None
    loading: dict[str, Any]
    output: Output

    def check(self) -> None:
        """Raise `CapacityError` if the longest text does not fit into memory with one of the methods."""
        check_capacity(self.model, self.methods, max(self.lengths), self.loading)


def show_selection(
    asked: tuple[Any, MadeSuite], text: str | None, queries: int, judge: str, states: str, by_layer: bool, **given: Any
) -> None:
    """Measure what each method selects at each length. Print each line of the table as soon as it is measured."""
    on, (task, suite), found = Compared(**given), asked, list[Selection]()
    on.check()
    how: dict[str, Any] = {"judge": judge, "states": states, "record": Record(on.record), **on.loading}
    for method, length in itertools.product(on.methods, on.lengths):
        how["length"] = length
        with on.output.noting(), on.output.bar(f"{method.name} at {length:,}:", " samples") as bar:
            if text is None:
                made, setting = partial(suite.make, task=task, length=length), suite.setting(task, length)
                one = measure(on.model, method, made, setting=setting, progress=bar, **how)
            else:
                one = measure_text(on.model, method, text, queries=queries, **how)
        on.output.text(*([] if found else [SELECTION_HEADER]), row(one), *(layer_rows(one) if by_layer else ()))
        found.append(one)
    on.output.object([dataclasses.asdict(one) for one in found])


def row(one: Selection) -> str:
    """Return a line of the table under `SELECTION_HEADER`."""
    texts = {name: "-" if value is None else f"{value:.2f}" for name, value in one.shares.items()}
    numbers = "".join(f"{texts[name]:>{width}}" for name, width in WIDTHS.items())
    reads, share = size_text(round(one.all_bytes)), one.all_bytes / one.full_bytes
    return f"{one.method:<12}{one.length:>8,}{one.tokens:>8,.0f}{reads:>11}{share:>9.0%}{numbers}"


def layer_rows(one: Selection) -> list[str]:
    """Return one line per layer: the means over heads, and the smallest and largest recall of a head."""
    lines = []
    for layer, recall in enumerate(one.by_layer["recall"]):
        means = {name: table[layer] for name, table in one.by_layer.items() if table[layer]}
        parts = ", ".join(f"{name} {sum(x) / len(x):,.2f}" for name, x in means.items() if name != "recall")
        lines.append(
            f"  layer {layer}: recall {sum(recall) / len(recall):.2f} ({min(recall):.2f} to {max(recall):.2f}), {parts}"
        )
    return lines


def show_causes(suite: dict[str, Any], kind: str, each: bool, **given: Any) -> None:
    """Find why each method misses answers of each task and length. Print each line of the table as soon as known."""
    on, made, found = Compared(**given), suite["suite"], list[dict[str, Any]]()
    known = Record(on.record)
    on.check()
    for method, task, length in itertools.product(on.methods, suite["tasks"], on.lengths):
        with on.output.noting(), bars(on.output.bar) as progress:
            how = {"length": length, "setting": made.setting(task, length), "asking": made.asking, "kind": kind}
            samples = partial(made.make, task=task, length=length)
            one = explain(on.model, method, samples, **how, record=known, progress=progress, **on.loading)
        counts = "".join(f"{one.counts[cause]:>11}" for cause in CAUSES)
        line = f"{one.method:<12}{kind or task.name:<16}{length:>8,}{counts}"
        on.output.text(*([] if found else [CAUSES_HEADER]), line)
        if each:
            on.output.text(*(line for verdict in one.verdicts for line in verdict_lines(verdict)))
        found.append({"task": task.name, "kind": kind or None, **dataclasses.asdict(one), "counts": one.counts})
    on.output.object(found)


def verdict_lines(verdict: Verdict) -> list[str]:
    """Return lines with the cause of a missed answer, and the answer under each change of the method."""
    depth = "" if verdict.depth is None else f" at depth {verdict.depth:.2f}"
    by = "" if verdict.by is None or verdict.cause == "answered" else f", answered by {verdict.by}"
    lines = [f"  sample {verdict.index}{depth}: {verdict.cause}{by}; expected {verdict.expected!r}"]
    return lines + [f"    {label}: {answer!r}" for label, answer in verdict.answers.items()]


def show_perplexities(
    files: Sequence[str], streams: bool, stride: int, scored: str, most: int | None, longest: int | None, **given: Any
) -> None:
    """Measure each method's perplexity at each length over the texts of some files. Errors come before output."""
    check(stride, scored)
    on = Compared(**given)
    lengths, output = on.lengths, on.output
    if min(lengths) < 2:
        raise UsageError(f"a length is {min(lengths)}; expected 2 or more tokens")
    if list(files).count("-") > 1:
        raise UsageError("--text is stdin twice; give it once")
    losses = Record(on.record)
    contents = [read_text(name) for name in files]
    on.check()
    longest = max(*lengths, longest or 0)
    texts: list[list[int]] = []
    found: list[Perplexity] = []
    objects = []
    for method in on.methods:
        engine = lce.load(on.model, method, **on.loading)
        if not texts:
            texts = [engine.tokenizer.encode(content, bos=False) for content in contents]
            ends(texts, 2 if streams else longest, stride)
        for length in [max(lengths)] if streams else lengths:
            unit, beyond = " tok" if streams else " windows", engine.setup.beyond(length)
            if beyond is not None:
                note(beyond)
            with output.noting(WindowWarning), output.bar(f"{method.name} at {length:,}:", unit) as bar:
                how: dict[str, Any] = {"stride": stride, "record": losses, "about": {"checkpoint": on.model}}
                if streams:
                    got = stream(engine, texts, lengths=lengths, progress=bar, **how)
                else:
                    how |= {"longest": longest, "scored": scored, "most": most}
                    got = [windows(engine, texts, length=length, progress=bar, **how)]
            output.text(*([] if found else [LOSS_HEADER]), *map(loss_row, got))
            found += got
            objects += [{**dataclasses.asdict(each), "warning": beyond} for each in got]
    output.object(objects)
    if len(on.methods) > 1 and len(lengths) > 1:
        output.text("", *loss_table(found))


def loss_row(found: Perplexity) -> str:
    """Return a line of the table under `LOSS_HEADER`."""
    tokens = f"{found.first:,}-{found.length:,}" if found.setting == "stream" else f"{found.length:,}"
    interval = "" if found.low is None else f"  {number(found.low)} to {number(found.high)}"
    figures = f"{found.samples:>9,}{found.tokens:>10,}{number(found.perplexity):>12}"
    return f"{found.method:<14}{tokens:>16}{figures}{interval}"


def number(x: float | None) -> str:
    """Format a perplexity with about four digits; None becomes an empty text."""
    return "" if x is None else f"{x:,.0f}" if 1000 <= x < 1e9 else f"{x:.4g}"


def loss_table(found: Iterable[Perplexity], *, intervals: bool = False) -> list[str]:
    """Return perplexities as a Markdown table: one row per method, one column per length or range of positions."""
    texts = {}
    for each in found:
        ends = f" ({number(each.low)}–{number(each.high)})" if intervals and each.low is not None else ""
        texts[each.method, each.length, each.first] = f"{number(each.perplexity)}{ends}"
    columns = sorted({(length, first) for _, length, first in texts})
    names = [f"{first:,}-{length:,}" if first else f"{length:,}" for length, first in columns]
    methods = dict.fromkeys(method for method, _, _ in texts)
    rows = [[f"`{method}`", *(texts.get((method, *column), "") for column in columns)] for method in methods]
    return markdown(["method", *names], rows)
