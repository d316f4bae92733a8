"""Draws a report, as PNG files of 1,000 pixels for a phone; colours (Okabe and Ito's), markers and lines differ."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lce.errors import UsageError
from lce.files import write_whole
from lce_lab.eval.perplexity import LossTable
from lce_lab.eval.report import Cell, Report, Table
from lce_lab.eval.running import make_folder
from lce_lab.eval.selection import SelectionTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI, LETTERS = 5.0, 200, 11  # width in inches, pixels per inch, font size in points
STYLE: Any = dict.fromkeys(("axes.titlesize", "axes.labelsize", "figure.titlesize"), LETTERS)
STYLE |= dict.fromkeys(("font.size", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), LETTERS - 1)
STYLE |= {"legend.frameon": False, "axes.grid": True, "grid.color": "0.9", "axes.xmargin": 0.12}
STYLE |= {"figure.constrained_layout.use": True}
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito without yellow
MARKERS, LINES = "osD^vPX*<>", ("-", "--", ":", "-.")
MARK: dict[str, Any] = {"color": "0.4", "linestyle": (0, (6, 3)), "linewidth": 1.2, "zorder": 0}
# Methods' points at one length are moved apart on the logarithmic axis, so that equal scores stay visible: neighbours
# by a factor of at most 2**APART, the first and the last method by a factor of at most 2**MOST_APART.
APART, MOST_APART = 0.06, 0.5
BINS = 5  # columns of a heat map (ranges of depth), if the user asked for no depths
MOST_PANELS, MOST_COLUMNS, MOST_DEPTHS = 12, 3, 10  # the largest number of each in one picture
Span = tuple[float, float, float]  # a value, and the low and the high end of its interval


def draw_all(report: Report, folder: str | Path) -> list[Path]:
    """Draw every table of a report as PNG files in `folder`, which is made if missing; return the files' paths."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("pictures need the matplotlib package: pip install 'lce[plot]'") from None
    folder = Path(folder)
    make_folder(folder, "pictures")
    written: list[Path] = []
    for name, figure in figures(report):
        picture = BytesIO()
        figure.savefig(picture, format="png", dpi=DPI)
        written.append(folder / f"{name}.png")
        write_whole(written[-1], picture.getvalue())
    return written


def figures(report: Report) -> Iterator[tuple[str, Figure]]:
    """Yield a unique name and the figure of each picture of a report."""
    from matplotlib import rc_context

    used: set[str] = set()
    for draw, table, *parts in _drawings(report):
        with rc_context(STYLE):
            figure = draw(table)
        if figure is not None:
            text = re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")[:80]
            name = next(each for each in (text, *(f"{text}-{n}" for n in range(2, 1 << 20))) if each not in used)
            used.add(name)
            yield name, figure


def _drawings(report: Report) -> Iterator[tuple[Any, ...]]:
    for table in report.tables:
        for kind, draw in (("length", by_length), ("bytes", by_bytes), ("depth", by_depth)):
            yield draw, table, table.model, table.title, kind
    for model in dict.fromkeys(table.model for table in report.tables):
        tables = [table for table in report.tables if table.model == model and table.cells]
        for first in range(0, len(tables), MOST_PANELS):
            yield side_by_side, tables[first : first + MOST_PANELS], model, "methods"
    for losses in report.perplexities:
        yield perplexities, losses, losses.model, losses.title
    for selection in report.selections:
        yield recall_by_bytes, selection, selection.model, selection.title


def by_length(table: Table) -> Figure | None:
    """Draw scores with intervals by length: a line per method, and a horizontal line for `full` within the window."""
    if not table.cells:
        return None
    figure, axes = _figure(table)
    apart = min(APART, MOST_APART / len(table.methods))
    for number, method in enumerate(table.methods):
        shift = 2 ** (apart * (number - (len(table.methods) - 1) / 2))
        cells = table.row(method)
        _line(axes, method, number, [length * shift for length in cells], [_span(cell) for cell in cells.values()])
    _by_tokens(axes, table.lengths)
    return _with_scores(figure, axes, table)


def by_bytes(table: Table) -> Figure | None:
    """Draw scores by the bytes that a decode step reads: one line per method, labelled at the longest length."""
    figure, axes = _figure(table)
    for number, method in enumerate(table.methods):
        known = {length: cell for length, cell in table.row(method).items() if cell.score.read_bytes}
        if known:
            sizes = [(cell.score.read_bytes or 0) / 2**20 for cell in known.values()]
            _line(axes, method, number, sizes, [_span(cell) for cell in known.values()])
            length, cell = list(known.items())[-1]
            axes.annotate(_short(length), (sizes[-1], cell.score.mean), (6, 4), textcoords="offset points")
    _by_size(axes, "MiB of keys and values that a decode step reads")
    return _with_scores(figure, axes, table) if axes.containers else None


def perplexities(table: LossTable) -> Figure:
    """Draw perplexities with intervals by length or position, and the model's window as a vertical line."""
    figure, axes = _figure(table)
    for number, method in enumerate(table.methods):
        found = {column: table.cells[method, column] for column in table.columns if (method, column) in table.cells}
        spans = [(x.perplexity, x.low or x.perplexity, x.high or x.perplexity) for x in found.values()]
        _line(axes, method, number, [column.length for column in found], spans)
    for window in table.windows:
        axes.axvline(window, label="window", **MARK)
    _by_tokens(axes, [column.length for column in table.columns])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.3g}")
    axes.yaxis.set_minor_formatter(lambda y, _: f"{y:,.3g}")
    return _labelled(figure, axes, "perplexity", f"{table.title}: {table.model}")


def recall_by_bytes(table: SelectionTable) -> Figure:
    """Draw recall of true attention by the bytes that a query reads: one panel per length, one line per method."""
    lengths = table.lengths[:MOST_PANELS]
    figure, panels = _panels(f"{table.title}: {table.model}", 0.9 + 0.25 * len(table.lines), [2.6] * len(lengths))
    for axes, length in zip(panels, lengths, strict=True):
        for number, (method, line) in enumerate(table.lines.items()):
            points = sorted((one.all_bytes / 2**20, one.recall) for one in line if one.length == length)
            if points:
                _line(axes, method, number, [x for x, _ in points], [(recall,) * 3 for _, recall in points])
        _by_size(axes, "")
        axes.set(title=f"{_short(length)} tokens", ylim=(-0.05, 1.09), ylabel="recall")
    panels[-1].set_xlabel("MiB that a query reads in all layers")
    handles = {label: h for axes in panels for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
    return figure


def by_depth(table: Table) -> Figure | None:
    """Draw a task's mean scores by method and by depth of the fact in the text: one heat map per length, best first."""
    from matplotlib import colormaps

    asked = sorted({depth for cell in table.cells.values() for depth in cell.depths})
    edges = [(n / BINS, (n + 1) / BINS) for n in range(BINS)]
    bands = [(depth, depth) for depth in asked] if 0 < len(asked) <= MOST_DEPTHS else edges
    names = [f"{low:.0%}" if low == high else f"{100 * low:.0f}–{high:.0%}" for low, high in bands]
    maps: dict[int, dict[str, list[float]]] = {}
    for (method, length), cell in sorted(table.cells.items(), key=lambda each: -each[1].score.mean):
        scores = [cell.between(low, high) for low, high in bands]
        if any(scores):
            maps.setdefault(length, {})[method] = [score.mean if score else float("nan") for score in scores]
    if not maps:
        return None
    maps = dict(sorted(maps.items()))
    figure, panels = _panels(_title(table), 0.6, [0.7 + 0.3 * len(rows) for rows in maps.values()])
    colours = colormaps["cividis"].with_extremes(bad="0.85")
    for axes, (length, rows) in zip(panels, maps.items(), strict=True):
        axes.imshow(list(rows.values()), cmap=colours, vmin=0, vmax=1, aspect="auto")
        for i, row in enumerate(rows.values()):
            for j, mean in enumerate(row):
                if mean == mean:  # not NaN
                    axes.text(j, i, f"{mean:.2f}", ha="center", va="center", color="white" if mean < 0.5 else "black")
        axes.set_title(f"{length:,} tokens")
        axes.set_xticks(range(len(names)), names)
        axes.set_yticks(range(len(rows)), list(map(_wrapped, rows)))
        axes.grid(visible=False)
    panels[-1].set_xlabel("depth of the fact, from the beginning")
    return figure


def side_by_side(tables: Sequence[Table]) -> Figure:
    """Draw a panel per task, at the length at which most methods were measured, or the longest of several such."""
    from matplotlib.figure import Figure

    columns = min(MOST_COLUMNS, len(tables))
    rows = [tables[first : first + columns] for first in range(0, len(tables), columns)]
    heights = [1.2 + 0.28 * max(len(table.methods) for table in row) for row in rows]
    figure = Figure(figsize=(WIDTH * columns, 0.6 + sum(heights)))
    panels = figure.subplots(len(rows), columns, squeeze=False, sharex=True, height_ratios=heights).flatten()
    figure.suptitle(f"{tables[0].model}: score, 95% interval, ceiling", wrap=True)
    for axes in panels[len(tables) :]:
        axes.remove()
    for axes, table in zip(panels[: len(tables)], tables, strict=True):
        length = max(table.lengths, key=lambda length: (sum(own == length for _, own in table.cells), length))
        found = [(m, table.cells[m, length]) for m in table.methods if (m, length) in table.cells]
        for y, (_, cell) in enumerate(found):
            errors = _errors([_span(cell)])
            axes.errorbar(cell.score.mean, y, xerr=errors, color=COLOURS[1], marker="o", capsize=3)
        if table.ceiling is not None:
            axes.axvline(table.ceiling[1].mean, label="ceiling", **MARK)
        axes.set_yticks(range(len(found)), [_wrapped(method) for method, _ in found])
        axes.set_title(f"{_title(table, model=False)}, {_short(length)} tokens", wrap=True)
        axes.set(xlim=(-0.03, 1.03), ylim=(len(found) - 0.5, -0.5))
        axes.grid(visible=False, axis="y")
        axes.tick_params(labelbottom=True)
    return figure


def _span(cell: Cell) -> Span:
    return cell.score.mean, cell.score.low, cell.score.high


def _panels(title: str, margin: float, heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels, one below the other. `margin` and the `heights` of the panels are in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, margin + sum(heights)))
    figure.suptitle(title, wrap=True)
    return figure, list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])


def _figure(table: Table | LossTable) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    lines = sum(_wrapped(method).count("\n") + 1 for method in table.methods) + 1
    figure = Figure(figsize=(WIDTH, 4.6 + 0.12 * lines))
    return figure, figure.add_subplot()


def _line(axes: Axes, method: str, number: int, x: Sequence[float], spans: Sequence[Span]) -> None:
    """Draw a method's values with intervals. The method's `number` determines the colour, marker and line style."""
    sizes: Any = {"capsize": 3, "linewidth": 1.6, "elinewidth": 0.9, "markersize": 6}
    style = {**look(number), "linestyle": LINES[number // len(COLOURS) % len(LINES)], "label": _wrapped(method)}
    axes.errorbar(x, [value for value, _, _ in spans], yerr=_errors(spans), **sizes, **style)


def look(number: int) -> dict[str, Any]:
    """Return the colour and the marker of a method by its number."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def _errors(spans: Sequence[Span]) -> list[list[float]]:
    """Return the distances from values to the ends of their intervals, low and high; rounding errors below 0 are 0."""
    return [[max(0.0, value - low) for value, low, _ in spans], [max(0.0, high - value) for value, _, high in spans]]


def _by_tokens(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_short(length) for length in lengths])
    axes.xaxis.minorticks_off()
    axes.set_xlabel("tokens")


def _by_size(axes: Axes, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.3g}")
    axes.set_xlabel(label)


def _with_scores(figure: Figure, axes: Axes, table: Table) -> Figure:
    if table.ceiling is not None:
        axes.axhline(table.ceiling[1].mean, label="ceiling", **MARK)
    axes.set_ylim(-0.05, 1.09)
    return _labelled(figure, axes, "score", _title(table))


def _labelled(figure: Figure, axes: Axes, what: str, title: str) -> Figure:
    axes.set_ylabel(what)
    axes.set_title(title, wrap=True)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _title(table: Table, *, model: bool = True) -> str:
    text = f"{table.title}: {table.model}" if model else table.title
    return f"{text}\n(cannot rank methods)" if table.discriminates is False else text


def _wrapped(method: str, most: int = 22) -> str:
    """Break a method's name into lines of `most` letters or fewer, so that two names fit side by side in a legend."""
    return "\n".join(textwrap.wrap(method, most)[:5])


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}"
