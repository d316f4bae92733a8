"""Draws pictures: the distances of an `Explanation`, and the chunks that some queries of a recorded run chose."""

from __future__ import annotations

import textwrap
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lce.errors import UsageError, nearest
from lce.files import path_of, write_whole
from lce_lab.study.explain import Explanation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = (".pdf", ".png", ".svg")
NUMBERED = 32  # With this many tokens or fewer, each cell shows its distance as a number.
BEYOND = "crimson"  # The colour of distances beyond the window, on which the model was not trained.
MOST_PANELS = 4  # The most queries in a picture of chosen chunks, one panel each.
MISSED, MARKED = "#D55E00", "#E69F00"  # vermilion and orange of Okabe and Ito's colour-blind-safe palette


def drawable(path: str | Path) -> Path:
    """Check a picture's path, and return it. Raises `UsageError` for an unknown suffix, or without matplotlib."""
    path = path_of(path)
    if path.suffix.lower() not in KINDS:
        raise UsageError(f"{path}: unknown kind of picture {path.suffix!r}; {nearest(path.suffix, KINDS)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("a picture needs the matplotlib package: pip install 'lce[plot]'") from None
    return path


def _save(figure: Figure, path: Path, force: bool) -> None:
    picture = BytesIO()
    figure.savefig(picture, format=path.suffix.lower()[1:], dpi=150)
    write_whole(path, picture.getvalue(), force=force)


def draw_distances(explanation: Explanation, path: str | Path, *, force: bool = False) -> None:
    """Draw distances as colours, with a row per query and a column per key, to a PNG, SVG or PDF file.

    Keys that are not attended are white, and distances beyond the window have a colour of their own. The file's
    suffix sets the format. Needs matplotlib, but no display. The file appears whole or not at all.
    """
    path = drawable(path)
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    n, last = explanation.tokens, explanation.window - 1
    side = min(2.5 + 0.3 * n, 12.0)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.add_subplot()
    colours = colormaps["viridis_r"].with_extremes(bad="white", over=BEYOND)
    distance = explanation.distance.double().masked_fill(~explanation.attended, torch.nan).numpy()
    farthest = int(explanation.distance.max())
    top = max(min(farthest, last), 1)
    image = axes.imshow(distance, cmap=colours, vmin=0, vmax=top)
    figure.colorbar(image, label=f"distance (window: up to {last})", extend="max" if farthest > last else "neither")
    if n <= NUMBERED:
        for i, j in explanation.attended.nonzero().tolist():
            d = int(explanation.distance[i, j])
            colour = "black" if d <= top / 2 else "white"
            axes.text(j, i, str(d), ha="center", va="center", color=colour, fontsize="small")
        axes.set_xticks(range(n))
        axes.set_yticks(range(n))
    axes.tick_params(labelsize="small", labeltop=True, labelbottom=False, top=True, bottom=False)
    axes.xaxis.set_label_position("top")
    axes.set(xlabel="key j", ylabel="query i")
    title = textwrap.fill(explanation.title, int(7 * side))
    axes.set_title(f"{title}\n{explanation.setting}", fontsize="medium", parse_math=False)
    _save(figure, path, force)


def draw_choices(recording: dict[str, Any], path: str | Path, *, force: bool = False) -> None:
    """Draw the chunks that the last analysed queries of a recording's first run chose, as in LongHeads' Figure 5.

    Each query has a panel with one row per head and one column per chunk. A filled cell is a chunk that the head chose,
    darker with more weight under full attention. A ring is a chunk that was not attended although it is among the
    three that full attention weighs most, with 2% or more. Coloured bands are the marked texts. A head's label is the
    share of full attention's weight on attended keys. The file appears whole or not at all. Raises `UsageError` without
    matplotlib, or if nothing is chosen.
    """
    path, run = drawable(path), recording["runs"][0]
    if not run["choosing"]:
        raise UsageError(f"{run['label']} chooses nothing in this text, so there is no picture of its choices")
    from matplotlib.figure import Figure

    queries = run["looked"][-MOST_PANELS:]
    heads = len(run["choosing"]) * recording["model"]["heads"]
    figure = Figure(figsize=(9, (1.2 + 0.13 * heads) * len(queries) + 0.5), layout="constrained")
    looks = {query: look for segment in run["segments"] for query, look in segment["looks"].items()}
    panels = figure.subplots(len(queries), 1, squeeze=False)[:, 0]
    for axes, query in zip(panels, queries, strict=True):
        _panel(axes, recording, query, looks[str(query)])
    figure.suptitle(run["label"], parse_math=False)
    _save(figure, path, force)


def _panel(axes: Axes, recording: dict[str, Any], query: int, look: dict[str, Any]) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    run, n_heads = recording["runs"][0], recording["model"]["heads"]
    first, size = run["first"], run["chunk_size"]
    cells = np.full((len(run["choosing"]) * n_heads, max(1, -(-(query + 1 - first) // size))), np.nan)
    rings, labels = [], []
    for at, layer in enumerate(run["choosing"]):
        there = look["layers"][layer]
        always = [] if there["always"] is None else look["always"][there["always"]]
        for head, found in enumerate(there["heads"]):
            own = there["chosen"][head * len(there["chosen"]) // n_heads] if there["chosen"] else []
            row = at * n_heads + head
            cells[row, own] = found["mass"]
            labels.append("" if found["recall"] is None else f"{found['recall']:.0%}")
            for c, mass, _, is_chosen in found["best"][:3]:
                start = first + c * size
                attended = is_chosen or any(a < start + size and start < b for a, b, *_ in always)
                if mass >= 0.02 and not attended:
                    rings.append((c, row))
    blues = ListedColormap(colormaps["Blues"](np.linspace(0.3, 1, 64)))  # pale blue, not white, for attention 0
    axes.imshow(cells, aspect="auto", interpolation="nearest", cmap=blues, vmin=0, vmax=0.2)
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
