"""`lce eval selection` and `lce eval why`: methods' selections, and why methods miss, as tables or as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import lce
from lce.lab.eval.meter import States
from lce.lab.eval.record import Record
from lce.lab.eval.selection import Selection, measure, measure_text
from lce.lab.eval.suite import MadeSuite
from lce.lab.eval.tasks import MadeTask
from lce.lab.eval.why import CAUSES, Causes, Verdict, check_selects, explain
from lce.methods.mass import Judge
from lce.sizes import size_text
from lce.terminal.methods import check_capacity
from lce.terminal.output import Output

HEADER = (
    f"{'method':<12}{'length':>8}{'tokens':>8}{'reads':>11}{'of full':>9}{'recall':>8}"
    f"{'hit@1':>7}{'hit@5':>7}{'fact':>6}{'cover':>7}{'Gini':>6}{'found':>7}{'score':>7}"
)
WHY_HEADER = f"{'method':<12}{'length':>8}" + "".join(f"{cause:>11}" for cause in CAUSES)


def show_selection(
    model: str, methods: Sequence[lce.Method], lengths: Sequence[int], asked: tuple[MadeTask, MadeSuite],
    text: str | None, queries: int, judge: Judge, states: States, by_layer: bool, record: str | None,
    loading: dict[str, Any], output: Output,
) -> None:  # fmt: skip
    """Measure each method at each length; print each row when measured."""
    check_capacity(model, methods, max(lengths), loading)
    found: list[Selection] = []
    task, suite = asked
    how: dict[str, Any] = {"judge": judge, "states": states, "record": None if record is None else Record(record)}
    for method in methods:
        for length in lengths:
            how["length"] = length
            with output.noting(), output.bar(f"{method.name} at {length:,}:", " samples") as bar:
                if text is None:
                    made, setting = partial(suite.make, task=task, length=length), suite.setting(task, length)
                    one = measure(model, method, made, setting=setting, progress=bar, **how, **loading)
                else:
                    one = measure_text(model, method, text, queries=queries, **how, **loading)
            output.text(*([] if found else [HEADER]), row(one), *(layer_rows(one) if by_layer else ()))
            found.append(one)
    output.object([dataclasses.asdict(one) for one in found])


def row(one: Selection) -> str:
    """Return a line of the table."""
    share = (one.read_bytes + one.scored_bytes) / one.full_bytes
    cells = [(one.recall, 8), (one.hit1, 7), (one.hit5, 7), (one.fact, 6), (one.cover, 7), (one.gini, 6)]
    numbers = "".join(_number(value, width) for value, width in [*cells, (one.found, 7), (one.right, 7)])
    reads = size_text(round(one.read_bytes + one.scored_bytes))
    return f"{one.method:<12}{one.length:>8,}{one.tokens:>8,.0f}{reads:>11}{share:>9.0%}{numbers}"


def layer_rows(one: Selection) -> list[str]:
    """Return a line a layer: means over the layer's heads, and the least and largest recall of a head."""
    lines = []
    for layer, recall in enumerate(one.by_layer["recall"]):
        means = {name: table[layer] for name, table in one.by_layer.items() if table[layer]}
        parts = ", ".join(f"{name} {sum(x) / len(x):,.2f}" for name, x in means.items() if name != "recall")
        lines.append(
            f"  layer {layer}: recall {sum(recall) / len(recall):.2f} ({min(recall):.2f} to {max(recall):.2f}), {parts}"
        )
    return lines


def _number(value: float | None, width: int) -> str:
    return f"{'-' if value is None else f'{value:.2f}':>{width}}"


def show_causes(
    model: str, methods: Sequence[lce.Method], lengths: Sequence[int], asked: tuple[MadeTask, MadeSuite], each: bool,
    record: str | None, loading: dict[str, Any], output: Output,
) -> None:  # fmt: skip
    """Explain each method's misses at each length; print each row when known."""
    found: list[Causes] = []
    task, suite = asked
    known = None if record is None else Record(record)
    for method in methods:
        check_selects(method)
    check_capacity(model, methods, max(lengths), loading)
    for method in methods:
        for length in lengths:
            with output.noting(), output.bars() as bars:
                made, setting = partial(suite.make, task=task, length=length), suite.setting(task, length)
                how: dict[str, Any] = {"length": length, "setting": setting, "record": known, "progress": bars}
                one = explain(model, method, made, **how, **loading)
            counts = "".join(f"{one.counts[cause]:>11}" for cause in CAUSES)
            output.text(*([] if found else [WHY_HEADER]), f"{one.method:<12}{one.length:>8,}{counts}")
            if each:
                output.text(*(line for verdict in one.verdicts for line in verdict_lines(verdict)))
            found.append(one)
    output.object([{**dataclasses.asdict(one), "counts": one.counts} for one in found])


def verdict_lines(verdict: Verdict) -> list[str]:
    """Return the answers to a sample, change by change."""
    depth = "" if verdict.depth is None else f" at depth {verdict.depth:.2f}"
    by = "" if verdict.by is None or verdict.cause == "answered" else f", answered by {verdict.by}"
    lines = [f"  sample {verdict.index}{depth}: {verdict.cause}{by}; expected {verdict.expected!r}"]
    return lines + [f"    {label}: {answer!r}" for label, answer in verdict.answers.items()]
