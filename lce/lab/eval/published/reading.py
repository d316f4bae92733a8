"""Reads the files of benchmarks and of predictions."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lce.errors import DataError, shown
from lce.files import JsonError, named, open_regular, parse_json


@dataclass(frozen=True)
class Row:
    """A JSON object of a file. `where` names file and line in the `DataError` that methods raise for other types."""

    content: dict[str, Any]
    where: str

    def __contains__(self, name: str) -> bool:
        return name in self.content

    def text(self, *names: str) -> str:
        """Return the text under one of `names`."""
        name, value = self._value(names)
        if not isinstance(value, str):
            raise self._strange(name, value, "a text")
        return value

    def number(self, name: str) -> float:
        _, value = self._value([name])
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._strange(name, value, "a number")
        return value

    def texts(self, *names: str) -> tuple[str, ...]:
        """Return the texts of a list of texts or numbers. A single value counts as a list of one."""
        name, value = self._value(names)
        values = value if isinstance(value, list) else [value]
        if len(values) == 1 and isinstance(values[0], list):
            values = values[0]
        if not values or not all(isinstance(x, str | int | float) and not isinstance(x, bool) for x in values):
            raise self._strange(name, value, "texts or numbers")
        return tuple(x if isinstance(x, str) else repr(x) for x in values)

    def _value(self, names: Sequence[str]) -> tuple[str, Any]:
        name = next((name for name in names if name in self.content), None)
        if name is None:
            raise DataError(f"{self.where} has no {' or '.join(map(repr, names))}; expected the published layout")
        return name, self.content[name]

    def _strange(self, name: str, value: object, expected: str) -> DataError:
        return DataError(f"{name!r} of {self.where} is {shown(value, 40)}; expected {expected}")


def row_of(content: Any, where: str) -> Row:
    """Return a JSON object as a row. Raises `DataError` for other values."""
    if not isinstance(content, dict):
        raise DataError(f"{where} is {shown(content, 40)}; expected a JSON object")
    return Row(content, where)


def find_file(folder: Path, places: Sequence[str]) -> Path | None:
    """Return the first existing file of `places`, which are patterns under `folder`; None if there is none.

    Raises `DataError` if two files match one pattern.
    """
    for place in places:
        found = sorted(glob.glob(os.path.join(glob.escape(str(folder)), place)))
        if len(found) > 1:
            raise DataError(f"{named(found[0])} and {named(found[1])} are both of one task; leave one of them there")
        if found:
            return Path(found[0])
    return None


def json_rows(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON-lines file, or of a `.json` file with a list of objects."""
    is_empty = True
    for content, where in _entries(path) if path.suffix == ".json" else _lines(path):
        is_empty = False
        yield row_of(content, where)
    if is_empty:
        raise DataError(f"{named(path)} is empty; expected JSON objects")


def json_value(path: Path) -> Any:
    """Return the value of a JSON file."""
    with open(open_regular(path), "rb") as file:
        return _parsed(file.read(), named(path))


def _lines(path: Path) -> Iterator[tuple[Any, str]]:
    with open(open_regular(path), "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"line {number} of {named(path)}"
                yield _parsed(line, where), where


def _entries(path: Path) -> Iterator[tuple[Any, str]]:
    content = json_value(path)
    if not isinstance(content, list):
        raise DataError(f"{named(path)} holds {shown(content, 40)}; expected a list of objects")
    for number, entry in enumerate(content, 1):
        yield entry, f"entry {number} of {named(path)}"


def _parsed(raw: bytes, where: str) -> Any:
    try:
        return parse_json(raw.removeprefix(b"\xef\xbb\xbf"), len(raw))
    except JsonError as error:
        raise DataError(f"{where}: {error}; expected the published layout") from None
