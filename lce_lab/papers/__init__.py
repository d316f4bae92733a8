"""The tables and figures of three papers. `ENTRIES` has the entries of the papers' files by id."""

from __future__ import annotations

from lce.errors import UsageError, nearest
from lce_lab.papers.entry import Entry, read_entries
from lce_lab.papers.setting import Cell, Printed, Row, Setting

PAPERS = {"longheads": "LongHeads, arXiv:2402.10685", "dca": "DCA, arXiv:2402.17463", "esa": "ESA, arXiv:2502.14477"}
ENTRIES: dict[str, Entry] = {entry.id: entry for entry in read_entries()}

__all__ = ["ENTRIES", "PAPERS", "Cell", "Entry", "Printed", "Row", "Setting", "find"]


def find(id: str) -> Entry:
    """Return the table or figure with this id. Raises `UsageError`, which names the nearest valid id."""
    if id not in ENTRIES:
        raise UsageError(f"unknown table or figure {id!r}; {nearest(id, ENTRIES)}")
    return ENTRIES[id]
