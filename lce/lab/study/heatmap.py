"""Draws the choices of some queries of a run: a row a head, a column a chunk (as LongHeads' Figure 5)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lce.errors import UsageError
from lce.lab.study.picture import checked, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_PANELS = 4
MISSED, MARKED = "#D55E00", "#E69F00"  # Okabe and Ito's vermilion and orange


def draw(recording: dict[str, Any], path: str | Path) -> None:
    """Draw the last looked-at queries of a recording's first run; the file appears whole or not at all.

    A cell is a chunk that a head chose, darker with more true attention. A ring is a chunk that was not attended, is
    among the three with most true attention, and has a fiftieth of it or more. Bands are the marked places. Each head's
    label has its attended share of true attention. Raises `UsageError` without matplotlib, or if nothing is chosen.
    """
    path, run = checked(path), recording["runs"][0]
    if not run["choosing"]:
        raise UsageError(f"{run['label']} chooses nothing in this text, so there is no picture of its choices")
    from matplotlib.figure import Figure

    queries = run["looked"][-MOST_PANELS:]
    heads = len(run["choosing"]) * recording["model"]["heads"]
    figure = Figure(figsize=(9, (1.2 + 0.13 * heads) * len(queries) + 0.5), layout="constrained")
    looks = {query: look for segment in run["segments"] for query, look in segment["looks"].items()}
    panels = figure.subplots(len(queries), 1, squeeze=False)[:, 0]
    for axes, query in zip(panels, queries, strict=True):
        _panel(axes, recording, run, query, looks[str(query)])
    figure.suptitle(run["label"], parse_math=False)
    save(figure, path)


def _panel(axes: Axes, recording: dict[str, Any], run: dict[str, Any], query: int, look: dict[str, Any]) -> None:
    """Draw the heads of one query."""
    import numpy as np

    first, size, n_heads = run["first"], run["chunk_size"], recording["model"]["heads"]
    n_chunks = max(1, -(-(query + 1 - first) // size))
    cells = np.full((len(run["choosing"]) * n_heads, n_chunks), np.nan)
    rings, labels = [], []
    for at, layer in enumerate(run["choosing"]):
        there = look["layers"][layer]
        always = [] if there["always"] is None else look["always"][there["always"]]

        def attended(c: int, head: int, there: Any = there, always: Any = always) -> bool:
            own = there["chosen"][head * len(there["chosen"]) // n_heads] if there["chosen"] else []
            return c in own or any(a < first + (c + 1) * size and first + c * size < b for a, b, *_ in always)

        for head, found in enumerate(there["heads"]):
            row = at * n_heads + head
            labels.append("" if found["recall"] is None else f"{found['recall']:.0%}")
            if there["chosen"]:
                cells[row, there["chosen"][head * len(there["chosen"]) // n_heads]] = found["mass"]
            rings += [(c, row) for c, mass, _, _ in found["best"][:3] if mass >= 0.02 and not attended(c, head)]
    colours = _colours()
    axes.imshow(cells, aspect="auto", interpolation="nearest", cmap=colours, vmin=0, vmax=0.2)
    if rings:
        across, down = zip(*rings, strict=True)
        axes.scatter(across, down, s=14, facecolors="none", edgecolors=MISSED, linewidths=0.9)
    for mark in recording["marks"]:
        if first <= mark["start"] <= query:
            last = (min(mark["stop"] - 1, query) - first) // size
            axes.axvspan((mark["start"] - first) // size - 0.5, last + 0.5, color=MARKED, alpha=0.35, zorder=0)
    axes.set_yticks(range(0, len(cells), n_heads), [f"layer {layer}" for layer in run["choosing"]])
    for edge in range(n_heads, len(cells), n_heads):
        axes.axhline(edge - 0.5, color="gray", linewidth=0.4)
    beside = axes.secondary_yaxis("right")
    beside.set_yticks(range(len(labels)), labels, fontsize=4)
    beside.tick_params(length=0)
    token = recording["tokens"][query] if query < len(recording["tokens"]) else "a generated token"
    axes.set_title(f"query {query:,}, {token!r}", fontsize="medium", parse_math=False)
    axes.set_xlabel(f"chunk of {size}" if size > 1 else "token")


def _colours() -> Any:
    """Return blues that are visible on white, so that a chosen chunk without attention is not blank."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["Blues"]([0.3 + 0.7 * x / 63 for x in range(64)]))
