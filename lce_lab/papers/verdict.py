"""Verdicts: whether a difference that lce measured has the direction of the paper's.

The paper's difference is between a row and the entry's baseline, in every printed table that has both. If no column has
what was measured, the table's average stands in. Of perplexities, the measured difference is the mean over windows of
the difference of losses, with Student's 95% interval: windows differ far more from each other than rows do in one of
them. Elsewhere it is that of the two cells, with an interval that is made of theirs (Newcombe, 1998, method 10; for
means MOVER, Zou and Donner, 2008), rather too wide, since both have the same samples. If the interval holds 0, or the
printed tables disagree, nothing can be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import copysign, hypot, sqrt
from statistics import fmean, stdev

from lce_lab.eval.perplexity import student
from lce_lab.papers.printed import Printed
from lce_lab.papers.setting import Cell

SAME, OPPOSITE, UNKNOWN = "same direction", "opposite", "cannot tell"
SHOWN = 0.001  # nats: papers print three digits of a perplexity, which show no smaller difference


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
    """Return the 95% interval of `cell` minus `baseline`; None if one has no interval, or one of a single timed run.

    If both have losses of windows, it is the interval of the mean difference of losses, in nats.
    """
    if cell.losses and len(cell.losses) == len(baseline.losses) > 1:
        differences = [own - other for own, other in zip(cell.losses, baseline.losses, strict=True)]
        mean, spread = fmean(differences), student(len(differences) - 1) * stdev(differences) / sqrt(len(differences))
        return mean - max(spread, SHOWN), mean + max(spread, SHOWN)
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
