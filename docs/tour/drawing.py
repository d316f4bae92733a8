"""The tour's pictures: lines, bars, and tables as colours. SVG files, the same bytes for the same numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

STYLE = {"svg.hashsalt": "lce", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
         "axes.spines.right": False}  # fmt: skip
NUMBERED = 26  # columns: up to so many, each cell shows its number


def lines(
    path: str, series: Mapping[str, Sequence[float]], x: Sequence[float] | None = None, *, xlabel: str = "",
    ylabel: str = "", marks: Mapping[str, float] | None = None, log: bool = False,
) -> None:  # fmt: skip
    """One line for each of `series`, over `x` or 0, 1, ...; `marks` are named places on the x axis."""
    with _figure(path, (7, 3)) as (axes,):
        for label, y in series.items():
            places = list(x) if x is not None else list(range(len(y)))
            axes.plot(places, list(y), label=label, linewidth=1.4, marker="o" if len(places) < 24 else None, ms=3)
        for label, place in (marks or {}).items():
            axes.axvline(place, color="grey", linestyle="--", linewidth=1)
            axes.text(place, 1.0, f" {label}", color="grey", va="bottom", transform=axes.get_xaxis_transform())
        if log:
            axes.set_xscale("log", base=2)
            axes.set_xticks(places, [f"{place:,}" for place in places])
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        if len(series) > 1:
            axes.figure.legend(frameon=False, loc="outside right upper")


def bars(path: str, values: Mapping[str, float], *, ylabel: str = "") -> None:
    """One bar for each of `values`."""
    with _figure(path, (7, 2.6)) as (axes,):
        drawn = axes.bar(list(values), list(values.values()), color="#4477aa", width=0.6)
        axes.bar_label(drawn, fmt="%.2f")
        axes.set_ylabel(ylabel)


def tables(
    path: str, found: Mapping[str, Any], *, xlabel: str = "key j", ylabel: str = "query i", most: float | None = None,
    boxes: Iterable[tuple[float, float]] = (), rows: Sequence[str] | None = None, colours: str = "viridis_r",
) -> None:  # fmt: skip
    """Tables `[rows, columns]` side by side as colours, NaN white; values above `most` are red.

    `boxes` are ranges of columns, `start, stop`, that are outlined in each table; `rows` are the rows' names.
    """
    n_rows, columns = next(iter(found.values())).shape
    width = min(max(0.24 * columns, 5 / len(found)), 8 / len(found))
    height = min(max(0.3 * n_rows, width * n_rows / columns if n_rows > 6 else 0), 6)
    with _figure(path, (width * len(found) + 1.2, height + 0.9), len(found)) as all_axes:
        from matplotlib import colormaps
        from matplotlib.patches import Rectangle

        scale = colormaps[colours].with_extremes(bad="white", over="crimson")
        top = max(float(table.nan_to_num(0).max()) for table in found.values()) if most is None else most
        for axes, (title, table) in zip(all_axes, found.items(), strict=True):
            axes.imshow(table.double().numpy(), cmap=scale, vmin=0, vmax=top, aspect="auto")
            axes.set_title(title, fontsize=9)
            axes.set_xlabel(xlabel)
            axes.set_ylabel(ylabel)
            if rows is not None:
                axes.set_yticks(range(n_rows), rows)
            elif columns <= NUMBERED:
                axes.set_xticks(range(columns))
                axes.set_yticks(range(n_rows))
                axes.tick_params(labelsize=6)
            for start, stop in boxes:
                frame = Rectangle(
                    (start - 0.5, -0.5), stop - start, n_rows, fill=False, edgecolor="crimson", linewidth=1.5
                )
                axes.add_patch(frame)
            if columns <= NUMBERED:
                for row, values in enumerate(table.tolist()):
                    for column, value in enumerate(values):
                        if value == value:
                            colour = "black" if value <= top / 2 else "white"
                            number = f"{value:.0f}" if value == int(value) else f"{value:.2f}"
                            axes.text(column, row, number, ha="center", va="center", color=colour, fontsize=6)


class _figure:
    """A figure with axes side by side, written to `path` at the end."""

    def __init__(self, path: str, size: tuple[float, float], n_axes: int = 1) -> None:
        try:
            import matplotlib
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("pictures need the matplotlib package: pip install 'lce[tour]'") from None
        self.path, self.style = path, matplotlib.rc_context(STYLE)
        with matplotlib.rc_context(STYLE):
            self.figure = Figure(figsize=size, layout="constrained")
            self.axes = [self.figure.add_subplot(1, n_axes, i + 1) for i in range(n_axes)]

    def __enter__(self) -> list[Any]:
        self.style.__enter__()
        return self.axes

    def __exit__(self, kind: Any, *others: Any) -> None:
        if kind is None:
            self.figure.savefig(self.path, metadata={"Date": None})
        self.style.__exit__(kind, *others)
