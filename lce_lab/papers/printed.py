"""The cells that a paper prints in a table or figure, by row and column."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose, isnan

Number = float | str  # a number in a paper, or a text such as ">100" or "OOM"


@dataclass(frozen=True)
class Printed:
    """The cells of a table for one model or data set, called `of`.

    `window` is the paper's model's, in tokens: with 4,096 the column `hit@1 16k` has hit@1 at 4 times the window.
    `label` is what columns that are mere lengths measure. A table with `at` holds at this multiple of the window alone.
    """

    of: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[Number, ...]]
    window: int = 0
    label: str = ""
    at: float | None = None

    @classmethod
    def read(cls, cells: str, **fields: object) -> Printed:
        """Return the table in the text `cells`: a line for each row, cells between bars, the columns' names first."""
        head, *lines = [[cell.strip() for cell in line.split("|")] for line in cells.strip().splitlines()]
        rows = {line[0]: tuple(map(_number, line[1:])) for line in lines}
        return cls(columns=tuple(head[1:]), rows=rows, **fields)  # type: ignore[arg-type]

    def has(self, label: str) -> bool:
        """Return whether a column measures `label`."""
        return any(name == label for name, _ in map(self._measured, self.columns))

    def number(self, row: str, label: str, multiple: float) -> Number | None:
        """Return a row's cell for `label` at a multiple of the window; None if the table has none."""
        if row not in self.rows or (self.at is not None and not isclose(self.at, multiple, rel_tol=0.01)):
            return None
        for (name, where), cell in zip(map(self._measured, self.columns), self.rows[row], strict=True):
            if name == label and (where is None or isclose(where, multiple, rel_tol=0.01)) and cell not in ("-", "?"):
                return cell
        return None

    def difference(self, row: str, baseline: str, label: str, multiple: float) -> float | None:
        """Return a row's cell minus the baseline's; None if the table lacks one of them, or their order is unknown."""
        both = [self.number(name, label, multiple) for name in (row, baseline)]
        if None in both:
            return None
        (low, high), (low_0, high_0) = map(_range, both)
        found = max(low - high_0, 0.0) or min(high - low_0, 0.0)
        return None if isnan(found) or (not found and (low, high) != (low_0, high_0)) else found

    def _measured(self, column: str) -> tuple[str, float | None]:
        """Return what a column measures, and the multiple of the window that it is of; None if it names no length."""
        found = re.fullmatch(r"(?:(.+) )?(\d+)k", column)
        if found is None:
            return column, None
        return found[1] or self.label, int(found[2]) * 1024 / self.window


def _number(text: str) -> Number:
    try:
        return float(text)
    except ValueError:
        return text


def _range(cell: Number | None) -> Sequence[float]:
    """Return the least and the largest number that a cell can stand for: ">100" is any number above 100."""
    if isinstance(cell, float):
        return cell, cell
    found = re.fullmatch(r"([<>])([\d.]+)", str(cell))
    if found is None:
        return float("nan"), float("nan")
    return (float(found[2]), float("inf")) if found[1] == ">" else (0.0, float(found[2]))
