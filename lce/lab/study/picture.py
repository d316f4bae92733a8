"""Draws an explanation: distances as colours, a row a query, a column a key."""

from __future__ import annotations

import textwrap
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lce.errors import UsageError, nearest
from lce.files import write_whole
from lce.lab.study.explain import Explanation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".pdf", ".png", ".svg")
NUMBERED = 32  # tokens; up to this many, cells show numbers
BEYOND = "crimson"  # distances that the model was not trained on


def checked(path: str | Path) -> Path:
    """Return the path of a picture. Raises `UsageError` for an unknown suffix, or without matplotlib."""
    path = Path(path)
    if path.suffix.lower() not in KINDS:
        raise UsageError(f"{path}: unknown kind of picture {path.suffix!r}; {nearest(path.suffix, KINDS)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("a picture needs the matplotlib package: pip install 'lce[plot]'") from None
    return path


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the suffix's format; the file appears whole or not at all."""
    picture = BytesIO()
    figure.savefig(picture, format=path.suffix.lower()[1:], dpi=150)
    write_whole(path, picture.getvalue())


def draw(explanation: Explanation, path: str | Path) -> None:
    """Draw the matrix to `path`, a PNG, SVG or PDF file by its suffix; the file appears whole or not at all.

    Keys that are not attended are white; distances beyond the window have a colour of their own. Needs matplotlib, but
    no display.
    """
    path = checked(path)
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
        for i, row in enumerate(explanation.rows()):
            for j, d in enumerate(row):
                if d is not None:
                    colour = "black" if d <= top / 2 else "white"
                    axes.text(j, i, str(d), ha="center", va="center", color=colour, fontsize="small")
        axes.set_xticks(range(n))
        axes.set_yticks(range(n))
    axes.tick_params(labelsize="small", labeltop=True, labelbottom=False, top=True, bottom=False)
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("key j")
    axes.set_ylabel("query i")
    title = textwrap.fill(explanation.title, int(7 * side))
    axes.set_title(f"{title}\n{explanation.setting}", fontsize="medium", parse_math=False)
    save(figure, path)
