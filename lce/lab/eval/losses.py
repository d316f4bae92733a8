"""Makes tables of recorded losses: a row a method, a column a length or a run of positions.

A table has one model and one of three settings: windows with the last S tokens scored, windows with all tokens scored,
or streams, whose columns end at powers of two. The record does not name its texts. A cell has all windows in the
files, each once. A note says where methods read different windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from lce.lab.eval.naming import engine_key, method_names, model_names
from lce.lab.eval.perplexity import Perplexity
from lce.lab.eval.record import Loss

LossLine = tuple[Mapping[str, Any], Loss]  # what was read, and the loss


class Column(NamedTuple):
    """Windows of `length` tokens, or the tokens `first..length-1` of streams."""

    first: int
    length: int


@dataclass
class LossTable:
    """The perplexities of one model in one setting, by method and column."""

    model: str
    setting: str
    cells: dict[tuple[str, Column], Perplexity] = field(default_factory=dict)
    windows: tuple[int, ...] = ()  # of the engines
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"perplexity, {self.setting}"

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for method, _ in self.cells))

    @property
    def columns(self) -> list[Column]:
        return sorted({column for _, column in self.cells}, key=lambda column: column.length)

    def as_object(self) -> dict[str, Any]:
        """Return the table as a JSON object."""
        cells = [{**asdict(cell), "method": method} for (method, _), cell in self.cells.items()]
        return {"model": self.model, "setting": self.setting, "notes": self.notes, "cells": cells}


def loss_tables(lines: Sequence[LossLine]) -> Iterator[LossTable]:
    """Yield the tables of all lines, in the order of the files; lengths ascend."""
    names, models = method_names(lines), model_names(lines)
    for model, name in models.items():
        for setting, group in _settings([line for line in lines if str(line[0].get("model")) == model]):
            windows = {loss.window for _, loss in group if loss.window}
            table = LossTable(name, setting, windows=tuple(sorted(windows)))
            columns = _columns(group)
            found: dict[tuple[str, Column], dict[str, Loss]] = {}
            for sample, loss in group:
                where = names[engine_key(sample)], columns[_border(sample)]
                found.setdefault(where, {})[f"{sample['text']} {sample['first']} {sample.get('stop')}"] = loss
            for (method, column), losses in found.items():
                kind = group[0][0]["setting"]
                table.cells[method, column] = Perplexity.of(method, kind, *column, list(losses.values()))
            table.notes = [
                f"At {column.length:,} tokens the methods were not asked the same texts."
                for column in table.columns
                if len({frozenset(losses) for (_, own), losses in found.items() if own == column}) > 1
            ]
            yield table


def _settings(lines: Sequence[LossLine]) -> Iterator[tuple[str, list[LossLine]]]:
    """Yield each setting and its lines, for one model. A window no longer than its stride belongs to every setting."""
    windows = [line for line in lines if line[0]["setting"] == "windows"]
    strides = sorted({sample["length"] - sample["first"] for sample, _ in windows if sample["first"] > 1})
    for stride in strides:
        last = [line for line in windows if line[0]["first"] == max(1, line[0]["length"] - stride)]
        yield f"the last {stride:,} tokens of windows", last
    whole = [line for line in windows if line[0]["first"] == 1]
    if any(sample["length"] - 1 > max(strides, default=0) for sample, _ in whole):
        yield "all tokens of windows", whole
    if streams := [line for line in lines if line[0]["setting"] == "stream"]:
        yield "by position in a stream", streams


def _border(sample: Mapping[str, Any]) -> int:
    """Return a line's column: a window's length, or the power of two by which a run of a stream ends."""
    length: int = sample["length"]
    return length if sample["setting"] == "windows" else 1 << (sample["stop"] - 1).bit_length()


def _columns(lines: Sequence[LossLine]) -> dict[int, Column]:
    """Return the columns of a table by border. Columns of a stream end where reading ended."""
    found: dict[int, Column] = {}
    for sample, _ in lines:
        border = _border(sample)
        if sample["setting"] == "windows":
            found[border] = Column(0, border)
        else:
            first = 0 if sample["first"] == 1 else sample["first"]
            before = found.get(border, Column(first, 0))
            found[border] = Column(min(first, before.first), max(sample["stop"], before.length))
    return found
