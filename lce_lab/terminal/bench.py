"""The output of `lce bench`: the report as Markdown tables and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lce.errors import UsageError, WindowWarning
from lce.files import named, write_whole
from lce.sizes import size_text
from lce.terminal.options import new_file
from lce.terminal.output import Output, markdown, note

if TYPE_CHECKING:
    from lce_lab.bench import Report, Row, Spread, StepTimes


def show_bench(json_file: str | None, force: bool, loading: dict[str, Any], output: Output, **what: Any) -> None:
    """Run a benchmark and write its report, even a partial one after an error or Ctrl-C.

    The report is Markdown on stdout and JSON in `json_file`, or JSON alone on stdout if `json_file` is "-".
    """
    from lce_lab.bench import Bench

    if json_file == "":
        raise UsageError("--json needs a file, or - for stdout")
    if json_file != "-":
        new_file(json_file, force)
    output, bench = replace(output, json=json_file == "-"), Bench(**what, **loading)
    longest = max(bench.lengths)
    beyond = next((line for each in bench.subjects.values() if (line := each.engine.setup.beyond(longest))), None)
    try:
        if beyond is not None:
            note(beyond)
        with output.noting(WindowWarning), output.bar("bench", " runs") as bar:
            bench.run(bar)
    finally:
        if (report := bench.report).rows:
            content = asdict(report)
            output.object(content)
            output.text(*report_lines(report))
            if json_file not in (None, "-"):
                write_whole(Path(json_file), json.dumps(content, indent=1).encode() + b"\n", force=force)
                output.figures(f"lce: wrote {named(json_file)}")


def report_lines(report: Report) -> list[str]:
    """Return a report as lines of Markdown."""
    best, runs = report.ceilings, f"{report.repeats} run{'s' if report.repeats > 1 else ''}"
    setting = f"{report.model}, {report.dtype} on {report.device}, window {report.window:,}; lce {report.version}"
    unit = {name: "GOP" if name == "int8" else "GFLOP" for name in best.products}  # no floating-point operations
    names = "method, length, prefill tok/s, of products, decode tok/s, of reading, read a token, first token s"
    lines = [
        report.machine,
        "",
        f"{setting}. Medians of {runs} (lowest to highest); decode over {report.new_tokens} tokens.",
        "",
        "| the machine | |",
        "|---|---:|",
        f"| reading memory | {best.reading / 1e9:.1f} GB/s |",
        f"| copying memory, read and written | {best.copying / 1e9:.1f} GB/s |",
        *(f"| products of {best.rows} rows, {x} | {y / 1e9:,.0f} {unit[x]}/s |" for x, y in best.products.items()),
        "",
        f"Prefill is compared with products in {best.fastest}, the fastest, and decode with reading memory.",
        "",
        *markdown(names.split(", "), map(_row, report.rows)),
    ]
    if report.profile:
        head = ["method", "length", "step", "ms", *report.profile[0].seconds]
        lines += ["", *markdown(head, map(_step, report.profile))]
    return lines


def _row(row: Row) -> list[str]:
    speeds = _spread(row.prefill), f"{row.prefill_share:.2f}", _spread(row.decode), f"{row.decode_share:.2f}"
    read = size_text(row.weight_bytes + row.cache_bytes)
    return [f"`{row.method}`", f"{row.length:,}", *speeds, read, _spread(row.first_token)]


def _spread(spread: Spread) -> str:
    """Format a median with its lowest and highest value, such as `101 (98.2 to 103)`."""
    if spread.low == spread.high:
        return _number(spread.median)
    return f"{_number(spread.median)} ({_number(spread.low)} to {_number(spread.high)})"


def _number(x: float) -> str:
    """Format a number to three digits, such as `40.7`, but show all digits of large ones: `1,622`."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:#.3g}".rstrip(".")


def _step(times: StepTimes) -> list[str]:
    what = f"{times.step}, {times.tokens:,} token{'s' if times.tokens > 1 else ''}"
    shares = [f"{s / times.total_s:.0%}" for s in times.seconds.values()]
    return [f"`{times.method}`", f"{times.length:,}", what, _number(1000 * times.total_s), *shares]
