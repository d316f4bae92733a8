"""Verdicts: whether a difference that lce measured has the direction of the paper's.

The paper's difference is between a row and the entry's baseline, in every printed table that has both. If no column has
what was measured, the table's average stands in. The measured difference has a 95% interval that is made of the two
cells' intervals (Newcombe, 1998, method 10; for means MOVER, Zou and Donner, 2008). Both cells have the same samples,
so the interval is rather too wide. If the interval holds 0, or the printed tables disagree, nothing can be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import copysign, hypot

from lce.lab.papers.printed import Printed
from lce.lab.papers.setting import Cell

SAME, OPPOSITE, UNKNOWN = "same direction", "opposite", "cannot tell"


def printed_sign(
    printed: Sequence[Printed], row: str, baseline: str, label: str, multiple: float, average: str
) -> float | None:
    """Return 1 if the row's number is the larger in all printed tables, -1 if it is the smaller in all, 0 if unclear.

    Return None if no table has both rows.
    """
    signs = set()
    for table in printed:
        has_label = table.has(label)
        if has_label or average:
            found = table.difference(row, baseline, *((label, multiple) if has_label else (average, table.at or 0)))
            signs |= set() if found is None else {copysign(1, found) if found else 0.0}
    return None if not signs else signs.pop() if len(signs) == 1 else 0.0


def interval(cell: Cell, baseline: Cell) -> tuple[float, float] | None:
    """Return the 95% interval of `cell` minus `baseline`; None if one has no interval, or one of a single timed run."""
    known = [x for each in (cell, baseline) for x in (each.low, each.value, each.high) if x is not None]
    if len(known) < 6 or cell.low == cell.high or baseline.low == baseline.high:
        return None
    low, mean, high, low_0, mean_0, high_0 = known
    return mean - mean_0 - hypot(mean - low, high_0 - mean_0), mean - mean_0 + hypot(high - mean, mean_0 - low_0)


def verdict(sign: float, cell: Cell, baseline: Cell) -> str:
    """Return whether the difference of two cells has the paper's sign."""
    found = interval(cell, baseline)
    ours = 0.0 if found is None else 1.0 if found[0] > 0 else -1.0 if found[1] < 0 else 0.0
    if not sign or not ours:
        return UNKNOWN
    return SAME if ours == sign else OPPOSITE
