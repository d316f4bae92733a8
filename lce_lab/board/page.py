"""Writes boards as one HTML file, which needs no network and no scripts, and is legible on a phone.

Records may be a stranger's, so every text is escaped, and the page forbids itself to load or run anything.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from lce_lab.board import grids
from lce_lab.board.grids import Cell, Grid
from lce_lab.board.ranking import Board

STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; background: #fff; color: #1b1d22;
  font: 16px/1.5 -apple-system, "Segoe UI", Roboto, "Noto Sans", Arial, sans-serif; }
h1, h2, h3 { line-height: 1.25; overflow-wrap: anywhere; }
h3 { margin: 1.5rem 0 0.25rem; font-size: 1rem; }
img { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid #dcdad3; text-align: right; white-space: nowrap; }
th:first-child { position: sticky; left: 0; max-width: 11rem; padding-left: 0; background: #fff; text-align: left;
  white-space: normal; overflow-wrap: anywhere; }
thead th { color: #5a5f69; font-weight: 600; white-space: normal; }
tbody th { font-weight: 600; }
.grey { background: #efede7; color: #5a5f69; }
p, li { max-width: 44rem; color: #5a5f69; font-size: 0.9rem; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(boards: Sequence[Board], picture: bytes | None) -> str:
    """Return the page's HTML, with a PNG picture of the boards, if given."""
    image = base64.b64encode(picture).decode() if picture else ""
    alt = "Quality of each method by the bytes that it reads for a token; the tables below have the numbers."
    body = ["<h1>Leaderboard</h1>", f'<img alt="{alt}" src="data:image/png;base64,{image}">' if image else ""]
    for board in boards:
        body += ["<section>", f"<h2>{escape(board.model)}</h2>", _table(grids.ranking(board)), "<ul>"]
        body += [*(f"<li>{escape(line)}</li>" for line in grids.legend(board)), "</ul>"]
        for grid in grids.tasks(board):
            body += [f"<h3>{escape(grid.title)}</h3>", _table(grid)]
        body += [f'<p>A <span class="grey">grey</span> cell {grids.GREY}.</p>', "</section>"]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>lce: leaderboard</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, body))
        + "\n</body>\n</html>\n"
    )


def _table(grid: Grid) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in grid.head)
    rows = "\n".join(f"<tr>{_name(first)}{''.join(map(_cell, cells))}</tr>" for first, *cells in grid.rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'


def _name(cell: Cell) -> str:
    return f'<th scope="row">{escape(cell.text)}</th>'


def _cell(cell: Cell) -> str:
    mark = ' class="grey"' if cell.grey else ""
    return f"<td{mark}>{escape(cell.text)}</td>"
