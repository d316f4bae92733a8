"""The tables and figures of three papers, one entry each: `ENTRIES` has them by id."""

from __future__ import annotations

from lce.errors import UsageError, nearest
from lce.lab.papers import dca, esa, longheads
from lce.lab.papers.entry import Arm, Cell, Entry, Measure
from lce.lab.papers.setting import Setting

ENTRIES: dict[str, Entry] = {entry.id: entry for paper in (longheads, dca, esa) for entry in paper.ENTRIES}

PAPERS = {"longheads": "LongHeads, arXiv:2402.10685", "dca": "DCA, arXiv:2402.17463", "esa": "ESA, arXiv:2502.14477"}

__all__ = ["ENTRIES", "PAPERS", "Arm", "Cell", "Entry", "Measure", "Setting", "find"]


def find(id: str) -> Entry:
    """The entry with this id. Raises `UsageError` with the nearest one."""
    if id not in ENTRIES:
        raise UsageError(f"unknown table or figure {id!r}; {nearest(id, ENTRIES)}")
    return ENTRIES[id]
