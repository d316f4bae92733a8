"""Draws boards as a PNG picture: quality by bytes read a token, one panel per model, one labelled point per method."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lce.errors import UsageError
from lce_lab.board.ranking import Board, Standing
from lce_lab.eval.plots import DPI, MARK, STYLE, WIDTH, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[Standing, float, float]  # a method, the MiB that it reads, and its quality
LINE, LETTERS = 0.19, 26  # the height of a label in inches, and its most letters
LEADER: Any = {"arrowstyle": "-", "color": "0.85", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4}


def draw(boards: Sequence[Board]) -> bytes | None:
    """Return a PNG file with a panel for each board that has a quality at its length; None if no board has."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("pictures need the matplotlib package: pip install 'lce[plot]'") from None
    shown = [(board, found) for board in boards if (found := _points(board))]
    if not shown:
        return None
    heights = [max(2.8, 1.2 * LINE * len(points)) for _, points in shown]
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, sum(heights) + len(heights)))
        panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (board, points), height in zip(panels, shown, heights, strict=True):
            _draw(axes, board, points, height)
        picture = BytesIO()
        figure.savefig(picture, format="png", dpi=DPI)
    return picture.getvalue()


def _points(board: Board) -> list[Point]:
    known = [(each, each.quality.get(board.length), each.read_bytes) for each in board.standings]
    return sorted(((each, read / 2**20, span[0]) for each, span, read in known if span and read), key=lambda x: -x[2])


def _draw(axes: Axes, board: Board, points: Sequence[Point], height: float) -> None:
    """Draw a panel. Labels stand at its right, in the order of quality, each with a line to its point."""
    tops = [table.ceiling[1].mean for table in board.counted(board.length) if table.ceiling]
    ceiling, values = sum(tops) / len(tops), [y for _, _, y in points]
    low, high = min(values), max(*values, ceiling)
    low, high = low - 0.08 * (high - low) - 0.01, high + 0.08 * (high - low) + 0.01
    axes.axhline(ceiling, **MARK)
    axes.annotate("ceiling", (0, ceiling), (3, 3), xycoords=("axes fraction", "data"), textcoords="offset points")
    steps = _apart([(high - y) / (high - low) for y in values], LINE / height)
    for number, ((each, x, y), step) in enumerate(zip(points, steps, strict=True)):
        axes.plot(x, y, markersize=7, zorder=3, **look(number))
        axes.plot(1.06, 1 - step, markersize=5, transform=axes.transAxes, clip_on=False, **look(number))
        name = each.method if len(each.method) <= LETTERS else f"{each.method[: LETTERS - 3]}..."
        axes.text(1.09, 1 - step, name, transform=axes.transAxes, va="center")
        axes.annotate("", (x, y), (1.05, 1 - step), textcoords="axes fraction", arrowprops=LEADER)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.3g}")
    axes.set(ylim=(low, high), ylabel="quality", xlabel="MiB that a decode step reads")
    axes.set_title(f"{board.model}, {board.length:,} tokens", loc="left")


def _apart(places: Sequence[float], gap: float) -> list[float]:
    """Move ascending places by as little as leaves `gap` between them, and the last at 1 or below."""
    moved, limit = list(accumulate(places, lambda before, place: max(place, before + gap))), 1.0
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - gap
    return moved
