"""The output of `lce plan --operations`: counted operations and bytes of prefill and decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lce.sizes import size_text
from lce.terminal.output import aligned, plain

if TYPE_CHECKING:
    from lce.engine.operations import Operations
    from lce.methods.costs import PaperFigure

COUNTED = {  # the fields of `OperationCount`, with their names in the table
    "projections": "projections around attention",
    "mlp": "MLP",
    "head": "head",
    "attention": "attention",
    "scores": "selection: scores",
    "summaries": "selection: summaries",
    "low_dim": "selection: low-dim maps",
}
READ = {"weight_bytes": "weights", "key_bytes": "keys and values", "state_bytes": "what the method keeps"}
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def operations_object(counted: Operations) -> dict[str, Any]:
    """Return counted operations and their sums as JSON. Numbers are null if a method does not tell its cost."""
    sums = ("selection", "operations", "flops", "bytes_read", "share")
    works = {"prefill": counted.prefill, "decode": counted.decode}
    phases = {phase: plain(work) | {name: getattr(work, name) for name in sums} for phase, work in works.items()}
    return {**plain(counted), **phases}


def operations_lines(counted: Operations) -> list[str]:
    """Return a table of operations and bytes per token: a row for each kind, columns for prefill and decode."""

    def row(text: str, name: str, shown: Callable[[float], str], *, whole: bool = False) -> list[str]:
        found = [(getattr(work, name), 1 if whole else work.tokens) for work in (counted.prefill, counted.decode)]
        return [text, *("not counted" if n is None else shown(n / tokens) for n, tokens in found)]

    def size(n_bytes: float) -> str:
        return size_text(round(n_bytes))

    rows = [
        ["a token", "prefill", "decode"],
        *(row(text, name, count_text) for name, text in COUNTED.items()),
        row("multiply-adds", "operations", count_text),
        row("FLOPs, 2 a multiply-add", "flops", count_text),
        row("share of causal attention", "share", "{:.2%}".format, whole=True),
        *(row(f"read: {text}", name, size) for name, text in READ.items()),
        row("bytes read", "bytes_read", size),
    ]
    steps = counted.decode.tokens
    last = "the last token's decode" if steps == 1 else f"the decode of the last {steps:,}"
    asked = f"Counted for {counted.tokens:,} tokens: the prefill in blocks of {counted.block:,}, and {last}."
    return [asked, "", *aligned(rows), *map(_paper_line, counted.paper_figures)]


def count_text(n: float) -> str:
    """Format a count to three digits, such as `13.3 G`."""
    n = float(f"{n:.3g}")
    size, prefix = next(((size, prefix) for size, prefix in PREFIXES if n >= size), (1, ""))
    return f"{n / size:g} {prefix}".strip()


def _paper_line(figure: PaperFigure) -> str:
    value = f"{figure.value:.2%}" if figure.is_share else f"{figure.value:,.0f}"
    return f"In the paper{f', {figure.where}' if figure.where else ''}: {figure.text}: {value}"
