"""Rows and cells of reproduced tables, and the setting of a run: the model, the data, and the user's options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lce
from lce.errors import UsageError
from lce.system import default_threads
from lce_lab.papers.printed import Number


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
            raise UsageError(
                f"--model {self.model} is a context file; expected a model: a folder, a .gguf file, a hub id, or demo"
            )
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
        """Return a command's options for model, method, knobs and loading, without those that have their default value.

        `only` has the keys of `loading` to use.
        """
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
