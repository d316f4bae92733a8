"""Makes tables of recorded selections: a row a method, with its knobs, and a length.

A table has one model, one judge, one kind of hidden states, and one task asked in one way, or texts that were read. A
row has the means over all texts in the files, each once. A note says where methods were watched at different texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from lce.lab.eval.naming import EngineKey, cut, engine_key, method_names, model_names, way_of
from lce.lab.eval.record import Attended
from lce.lab.eval.selection import Selection

AttendedLine = tuple[Mapping[str, Any], Attended]  # a sample, and what its queries attended
BUDGETS = frozenset({"budget", "chunks", "top_k", "top_p"})  # knobs of the amount chosen
USUAL = {"judge": "constant", "states": "own"}


class Row(NamedTuple):
    """One method's selection at one length. Rows of a `line` differ only in budgets."""

    method: str
    line: str
    selection: Selection

    @property
    def length(self) -> int:
        return self.selection.length

    @property
    def read_bytes(self) -> float:
        """Bytes that a query reads in all layers: keys, values, and the data to choose by."""
        return self.selection.read_bytes + self.selection.scored_bytes


@dataclass
class SelectionTable:
    """The selections of one model's methods in one setting.

    Rows are by length, then by method, in the order of the files, then by bytes read.
    """

    model: str
    setting: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"selection, {self.setting}"

    @property
    def methods(self) -> list[str]:
        """The names of the lines, each once."""
        return list(dict.fromkeys(row.line for row in self.rows))

    @property
    def lengths(self) -> list[int]:
        return sorted({row.length for row in self.rows})

    def as_object(self) -> dict[str, Any]:
        """Return the table as a JSON object."""
        rows = [{**asdict(row.selection), "method": row.method} for row in self.rows]
        return {"model": self.model, "setting": self.setting, "notes": self.notes, "rows": rows}


def selection_tables(lines: Sequence[AttendedLine]) -> Iterator[SelectionTable]:
    """Yield the tables of all lines, in the order of the files."""
    names, models, bases = method_names(lines), model_names(lines), method_names(lines, without=BUDGETS)
    groups: dict[tuple[str, str], dict[tuple[int, EngineKey], list[AttendedLine]]] = {}
    for sample, attended in lines:
        where = sample["length"], engine_key(sample)
        group = groups.setdefault((models[str(sample.get("model"))], _setting(sample)), {})
        group.setdefault(where, []).append((sample, attended))
    for (model, setting), cells in groups.items():
        table = SelectionTable(model, setting)
        for (length, key), found in cells.items():
            judge, states = (str(found[0][0].get(name)) for name in USUAL)
            selection = Selection.of(names[key], length, [each for _, each in found], judge, states)
            table.rows.append(Row(names[key], bases[key], selection))
        order = {method: n for n, method in enumerate(table.methods)}
        table.rows.sort(key=lambda row: (row.length, order[row.line], row.read_bytes))
        table.notes = [
            f"At {length:,} tokens the methods were not watched at the same texts."
            for length in table.lengths
            if len({frozenset(map(_text, found)) for (own, _), found in cells.items() if own == length}) > 1
        ]
        yield table


def _setting(sample: Mapping[str, Any]) -> str:
    """Return the task, how it was asked, the judge and the states, without usual values and texts."""
    left_out = {"text", *(name for name, usual in USUAL.items() if sample.get(name) == usual)}
    way = way_of({name: value for name, value in sample.items() if name not in left_out})
    return f"{cut(sample['task'])}{', ' if way else ''}{way}"


def _text(line: AttendedLine) -> str:
    """Return a key of the watched text, for one setting and length."""
    sample, attended = line
    return json.dumps([sample.get(name) for name in ("seed", "samples", "index", "text")] + [attended.prompt])
