"""Diagrams as SVG from text: `python docs/diagrams/draw.py` draws each NAME.toml of this folder to NAME.svg.

A source has a `title` and a `description` (for screen readers), the `size` of the picture, and lists of things to draw.
All numbers are in units of 10 pixels, from the upper left corner.

- `[[box]]`: `at = [x, y]`, `size = [width, height]`, `text`, and a `kind`: `plain`, `data` (a tensor), `step`
  (something that is computed), `store` (memory, a file), `choice` (what a method decides). `id` is what arrows call it.
- `[[arrow]]`: `from` and `to` are `id.side`, with a side `l r t b`, and where on it as a share: `cache.r`,
  `cache.t:0.25`. `text` stands beside its middle, moved by `shift = [x, y]`; `dashed = true` for what does not always
  happen. An arrow between two left or two right sides goes around the outside.
- `[[note]]`: `at`, `text`, `align` `start`, `middle` or `end`.
- `[[cells]]`: `at`, the `cell` size, and `rows` of letters, a square each: a kind's first letter, `.` for an empty one.

Words in backticks are set as code. Colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SVG = "http://www.w3.org/2000/svg"
UNIT = 10  # pixels
LINE = 1.7  # units between two lines of text
KINDS = {  # of boxes: fill and line in light, fill and line in dark
    "plain": ("#f4f6f8", "#8a99a5", "#262b31", "#7d8b96"),
    "data": ("#e5f0fa", "#3f7fbf", "#16304a", "#6aa9e6"),
    "step": ("#e6f4ec", "#2f8f5f", "#143527", "#5cc392"),
    "store": ("#fcf0da", "#b97a12", "#3d2d10", "#e0aa4a"),
    "choice": ("#f2e7fa", "#8650b5", "#33214a", "#b98ce2"),
}
LETTERS = {kind[0] if kind != "store" else "m": kind for kind in KINDS}  # `m`, memory: `s` is a step


def style() -> str:
    """The picture's style sheet."""
    light = [f".{kind}{{fill:{fill};stroke:{line}}}" for kind, (fill, line, _, _) in KINDS.items()]
    dark = [f".{kind}{{fill:{fill};stroke:{line}}}" for kind, (_, _, fill, line) in KINDS.items()]
    return (
        "text{font:13px system-ui,sans-serif;fill:#1c262d}.code{font:12px ui-monospace,monospace}"
        ".first,.first .code{font-weight:600}.note{fill:#52606a}.ground{fill:#fff}.empty{fill:none;stroke:#d5dce1}"
        ".arrow{fill:none;stroke:#52606a;stroke-width:1.4}.head{fill:#52606a}.dashed{stroke-dasharray:5 4}"
        + "".join(light)
        + "@media (prefers-color-scheme:dark){text{fill:#e8edf1}.note{fill:#a9b6bf}.ground{fill:#1a1e23}"
        ".empty{stroke:#3a434b}.arrow{stroke:#a9b6bf}.head{fill:#a9b6bf}" + "".join(dark) + "}"
    )


def px(units: float) -> str:
    return f"{units * UNIT:g}"


def line_of(text: str, x: float, y: float, css: str, align: str) -> str:
    """A line of text, its baseline at y; words in backticks are code."""
    parts = re.split(r"`([^`]*)`", text)
    spans = [f'<tspan class="code">{escape(part)}</tspan>' if i % 2 else escape(part) for i, part in enumerate(parts)]
    return f'<text x="{px(x)}" y="{px(y)}" class="{css}" text-anchor="{align}">{"".join(spans)}</text>'


def box(entry: dict[str, Any]) -> Iterator[str]:
    (x, y), (width, height) = entry["at"], entry["size"]
    kind = entry.get("kind", "plain")
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}; expected one of {', '.join(KINDS)}")
    yield f'<rect x="{px(x)}" y="{px(y)}" width="{px(width)}" height="{px(height)}" rx="6" class="{kind}"/>'
    lines = entry["text"].splitlines()
    top = y + height / 2 - (len(lines) - 1) * LINE / 2 + 0.45
    for i, text in enumerate(lines):
        css = "first" if i == 0 and (len(lines) > 1 or " " not in text) else "text"
        yield line_of(text, x + width / 2, top + i * LINE, css, "middle")


def anchor(boxes: dict[str, dict[str, Any]], name: str) -> tuple[float, float, bool]:
    """Where an arrow ends, `id.side:share`, and whether that side is left or right."""
    match = re.fullmatch(r"(\w+)\.([lrtb])(?::([\d.]+))?", name)
    if not match or match[1] not in boxes:
        raise ValueError(f"no end {name!r}; expected ID.SIDE, with an ID of {', '.join(boxes)}")
    (x, y), (width, height) = boxes[match[1]]["at"], boxes[match[1]]["size"]
    side, share = match[2], float(match[3] or 0.5)
    if side in "lr":
        return x + width * (side == "r"), y + height * share, True
    return x + width * share, y + height * (side == "b"), False


def arrow(entry: dict[str, Any], boxes: dict[str, dict[str, Any]]) -> Iterator[str]:
    x0, y0, flat0 = anchor(boxes, entry["from"])
    x1, y1, flat1 = anchor(boxes, entry["to"])
    middle_x, middle_y = (x0 + x1) / 2, (y0 + y1) / 2
    if flat0 and entry["from"].partition(".")[2][0] == entry["to"].partition(".")[2][0]:  # around the outside
        middle_x = max(x0, x1) + 2.5 if ".r" in entry["to"] else min(x0, x1) - 2.5
    if flat0 and flat1:
        corners = [(middle_x, y0), (middle_x, y1)]
    elif not flat0 and not flat1:
        corners = [(x0, middle_y), (x1, middle_y)]
    else:
        corners = [(x1, y0)] if flat0 else [(x0, y1)]
    points = [(x0, y0), *corners, (x1, y1)]
    path = "M" + " L".join(f"{px(x)} {px(y)}" for x, y in dict.fromkeys(points))
    css = "arrow dashed" if entry.get("dashed") else "arrow"
    yield f'<path d="{path}" class="{css}" marker-end="url(#head)"/>'
    if "text" in entry:
        dx, dy = entry.get("shift", (0, -0.7))
        lines = entry["text"].splitlines()
        for i, text in enumerate(lines):
            yield line_of(text, middle_x + dx, middle_y + dy + i * LINE, "note", entry.get("align", "middle"))


def note(entry: dict[str, Any]) -> Iterator[str]:
    x, y = entry["at"]
    for i, text in enumerate(entry["text"].splitlines()):
        yield line_of(text, x, y + i * LINE, entry.get("css", "note"), entry.get("align", "start"))


def cells(entry: dict[str, Any]) -> Iterator[str]:
    (x, y), side = entry["at"], entry["cell"]
    for i, row in enumerate(entry["rows"]):
        for j, letter in enumerate(row):
            css = LETTERS.get(letter, "empty")
            at = f'x="{px(x + j * side)}" y="{px(y + i * side)}" width="{px(side)}" height="{px(side)}"'
            yield f'<rect {at} class="{css}"/>' if letter != " " else ""


def drawn(source: dict[str, Any]) -> str:
    """The SVG of a source. Raises `ValueError` for an unknown kind or end."""
    width, height = source["size"]
    boxes = {entry["id"]: entry for entry in source.get("box", []) if "id" in entry}
    pieces = [
        f'<svg xmlns="{SVG}" viewBox="0 0 {px(width)} {px(height)}" width="{px(width)}" role="img">',
        f"<title>{escape(source['title'])}</title><desc>{escape(' '.join(source['description'].split()))}</desc>",
        f"<style>{style()}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" class="head"/></marker></defs>',
        f'<rect width="{px(width)}" height="{px(height)}" class="ground"/>',
        *(piece for entry in source.get("cells", []) for piece in cells(entry)),
        *(piece for entry in source.get("box", []) for piece in box(entry)),
        *(piece for entry in source.get("arrow", []) for piece in arrow(entry, boxes)),
        *(piece for entry in source.get("note", []) for piece in note(entry)),
        "</svg>",
    ]
    return "\n".join(piece for piece in pieces if piece) + "\n"


def main() -> None:
    for path in sorted(FOLDER.glob("*.toml")):
        try:
            picture = drawn(tomllib.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            sys.exit(f"{path.name}: {error}")
        path.with_suffix(".svg").write_text(picture, encoding="utf-8")
        print(path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
