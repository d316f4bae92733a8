"""Reads records of selection and makes tables: a row a method, with its knobs, and a length.

A table has one model, one judge, one kind of hidden states, and one task asked in one way, or texts that were read. A
row has the means over all texts in the files, each once. A note says where methods were watched at different texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lce.errors import DataError, shown
from lce.files import named
from lce.lab.eval.naming import EngineKey, cut, engine_key, method_names, model_names, way_of
from lce.lab.eval.selection import Selection
from lce.lab.eval.watching import Look

LookLine = tuple[Mapping[str, Any], Look]  # a sample, and its observation
BUDGETS = frozenset({"budget", "chunks", "top_k", "top_p"})  # knobs of the amount chosen
USUAL = {"judge": "constant", "states": "own"}
MOST_TOKENS = 1 << 48


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


def check_look(sample: Mapping[str, Any], look: Look, file: str | Path) -> None:
    """Raise `DataError` for a line without a text, or whose numbers have no heads. Lines are not trusted."""
    length = sample.get("length")
    sound = type(length) is int and 0 < length < MOST_TOKENS and isinstance(sample.get("task"), str)
    if not sound or not look.recall or not all(look.recall) or not look.tokens or not all(look.tokens):
        raise DataError(
            f"{named(file)} has a look at length {shown(length)} of task {shown(sample.get('task'))} with "
            f"{len(look.recall)} layers; expected a number of tokens, a name, and layers with heads; correct the line"
        )


def selection_tables(lines: Mapping[str, LookLine]) -> Iterator[SelectionTable]:
    """Yield the tables of all lines; `lines` are by key.

    Raises `DataError` for looks at models of different shapes in one row.
    """
    names, models = method_names(lines.values()), model_names(lines.values())
    bases = method_names(lines.values(), without=BUDGETS)
    groups: dict[tuple[str, str], dict[tuple[int, EngineKey], list[LookLine]]] = {}
    for sample, look in lines.values():
        where = sample["length"], engine_key(sample)
        group = groups.setdefault((models[str(sample.get("model"))], _setting(sample)), {})
        group.setdefault(where, []).append((sample, look))
    for (model, setting), cells in groups.items():
        table = SelectionTable(model, setting)
        for (length, key), found in cells.items():
            table.rows.append(Row(names[key], bases[key], _mean(names[key], length, found)))
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


def _text(line: LookLine) -> str:
    """Return a key of the observed text, for one setting and length."""
    sample, look = line
    return json.dumps([sample.get(name) for name in ("seed", "samples", "index", "text")] + [look.prompt])


def _mean(method: str, length: int, lines: Sequence[LookLine]) -> Selection:
    sample, looks = lines[0][0], [look for _, look in lines]
    judge, states = (str(sample.get(name)) for name in ("judge", "states"))
    try:
        return Selection.of(method, length, looks, judge, states)
    except (ValueError, IndexError) as error:
        raise DataError(
            f"{method} at {length:,} tokens has looks with different numbers of layers or heads ({error}); expected "
            "those of one model; correct the lines"
        ) from None
