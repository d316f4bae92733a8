"""Cells that a paper prints, rows and cells of reproduced tables, and a run's setting: model, data, user's options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose, isnan
from typing import Any

import lce
from lce.errors import UsageError
from lce.system import default_threads

Number = float | str  # a number in a paper, or a text such as ">100" or "OOM"


@dataclass(frozen=True)
class Printed:
    """The cells of a table for one model or data set, called `of`.

    `window` is the window of the paper's model in tokens: with 4,096, the column `hit@1 16k` is at 4 times the window.
    `label` says what columns measure whose names are only lengths. With `at`, the table is of this multiple alone.
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


@dataclass(frozen=True)
class Row:
    """A row that lce runs: a method with its knobs and RoPE scaling.

    A knob such as `"3W/4"` is a fraction of the window. `rope` is the kind of RoPE scaling. `factor` is its factor at
    every length; without `factor`, it is length / window.
    """

    name: str
    method: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    rope: str | None = None
    factor: float | None = None


def fraction(value: Any, window: int) -> Any:
    """Return a text such as `"3W/4"` as a number of tokens, and other values unchanged."""
    part = re.fullmatch(r"(\d*)W/(\d+)", str(value))
    return value if part is None else max(1, int(part[1] or 1) * window // int(part[2]))


@dataclass(frozen=True)
class Cell:
    """A number that lce measured, with its 95% interval, if any, beside the paper's numbers.

    `length` is in tokens, 0 for a measure without lengths. `n` is the number of samples, windows or tokens. If `value`
    is None, `note` says why. `paper` has the paper's numbers by model or data set. `verdict` says whether the
    difference from the entry's baseline has the direction of the paper's; it is empty if the paper has none. `losses`
    has each window's mean loss, for a perplexity: rows read the same windows.
    """

    row: str
    label: str
    length: int
    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    paper: Mapping[str, Number] = field(default_factory=dict)
    note: str = ""
    verdict: str = ""
    losses: Sequence[float] = ()


@dataclass
class Setting:
    """The user's options of a run. `knobs` are by `METHOD.KEY` or `KEY`. `loading` are options of `lce.load`."""

    model: str = "demo"
    window: int = 0  # 0 stands for the model's own window
    sizes: int | None = None  # the window that rows' knobs are fractions of; None stands for `window`
    lengths: Sequence[int] = ()
    samples: int = 20  # the number of samples, windows or timed runs per cell
    limit: int | None = None  # the largest number of samples per task of the paper's data
    seed: int = 0
    data: Sequence[str] = ()
    record: str | None = None
    knobs: Mapping[str, Any] = field(default_factory=dict)
    loading: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = lce.info(self.model)
        if not isinstance(found, lce.ModelInfo):
            expected = "a model: a folder, a .gguf file, a hub id, or demo"
            raise UsageError(f"--model {self.model} is a context file; expected {expected}")
        self.window = self.loading.get("window") or self.window or found.config.window

    def method(self, row: Row) -> lce.Method:
        """Return the row's method, with the user's knobs where the row sets none."""
        fields, prefix = {each.name for each in lce.methods.knobs_of(lce.methods.find(row.method))}, f"{row.method}."
        own = {key: value for key, value in self.knobs.items() if key in fields}
        own |= {key.removeprefix(prefix): x for key, x in self.knobs.items() if key.startswith(prefix)}
        sized = {name: fraction(value, self.sizes or self.window) for name, value in row.knobs.items()}
        return lce.methods.make(row.method, {**own, **sized})

    def scaling(self, row: Row, length: int) -> dict[str, Any]:
        """Return the options of `lce.load` for the row's RoPE scaling of a text of this length."""
        factor = row.factor or length / self.window
        if row.rope is None or (row.factor is None and factor <= 1):
            return {}
        return {"rope": row.rope, "rope_factor": factor}

    def options(self, row: Row, length: int, only: Sequence[str] | None = None) -> list[str]:
        """Return a command's options for model, method, knobs and loading (or `only` some), without default values."""
        method, words = self.method(row), ["--model", shlex.quote(self.model), "--method", row.method]
        usual = lce.methods.settings(type(method)())
        for name, value in lce.methods.settings(method).items():
            if name not in usual or value != usual[name]:
                words += ["-o", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
        usual = {"threads": default_threads()}
        for name, value in {**self.loading, **self.scaling(row, length)}.items():
            if value not in (None, "auto", usual.get(name)) and (only is None or name in only):
                words += [f"--{name.replace('_', '-')}", shlex.quote(str(value))]
        return words

    def recorded(self, suffix: str) -> list[str]:
        """Return the option that records a command's results in a file with this suffix."""
        return [] if self.record is None else ["--record", shlex.quote(self.record + suffix)]
