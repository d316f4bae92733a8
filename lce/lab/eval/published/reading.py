"""Reads the files of benchmarks and of predictions. Their contents are not trusted."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lce.errors import DataError, shown
from lce.files import JsonError, named, open_regular, parse_json

LONGEST_LINE = 64 << 20  # bytes; InfiniteBench's longest book has some 10 million
LARGEST_JSON = 2 << 30  # bytes of a file that is one JSON value; LongBench v2 has 0.5 GB
MOST_VALUES = 4 << 20  # JSON values of a line or file, or one for 4 bytes if more; commas in texts count too


@dataclass(frozen=True)
class Row:
    """One object of a file. For other types, methods raise `DataError`, which names the file and the line."""

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

    def number(self, name: str, default: float | None = None) -> float:
        value = self.content.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._strange(name, value, "a number")
        return value

    def texts(self, *names: str) -> tuple[str, ...]:
        """Return the texts or numbers of a list, numbers as in JSON; a single value counts as a list of one."""
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


def find_file(folder: Path, places: Sequence[str]) -> Path | None:
    """Return the first existing file of `places`, which are paths or patterns under `folder`.

    Raises `DataError` if two files fit a place.
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
    if path.suffix == ".json":
        yield from _listed_rows(path)
        return
    with open(open_regular(path), "rb") as file:
        number = n_rows = 0
        while line := _line(file, path, number + 1):
            number += 1
            if line.strip():
                n_rows += 1
                yield _row(line, f"line {number} of {named(path)}")
    if not n_rows:
        raise DataError(f"{named(path)} is empty; expected a JSON object a line")


def _line(file: Any, path: Path, number: int) -> bytes:
    try:
        line: bytes = file.readline(LONGEST_LINE + 1)
    except OSError as error:
        raise DataError(f"cannot read {named(path)}: {error.strerror}; check the disk") from error
    if len(line) > LONGEST_LINE:
        raise DataError(f"line {number} of {named(path)} is longer than {LONGEST_LINE} bytes; expected JSON lines")
    return line


def json_value(path: Path) -> Any:
    """Return the value of a JSON file."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST_JSON:
            raise DataError(f"{named(path)} has {size} bytes; expected {LARGEST_JSON} at most")
        try:
            raw = file.read()
        except OSError as error:
            raise DataError(f"cannot read {named(path)}: {error.strerror}; check the disk") from error
    return _parsed(raw, named(path))


def _listed_rows(path: Path) -> Iterator[Row]:
    content = json_value(path)
    if not content or not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise DataError(f"{named(path)} holds {shown(content, 40)}; expected a list of objects")
    for number, row in enumerate(content, 1):
        yield Row(row, f"entry {number} of {named(path)}")


def _row(line: bytes, where: str) -> Row:
    content = _parsed(line, where)
    if not isinstance(content, dict):
        raise DataError(f"{where} is {shown(content, 40)}; expected a JSON object")
    return Row(content, where)


def _parsed(raw: bytes, where: str) -> Any:
    try:
        return parse_json(raw.removeprefix(b"\xef\xbb\xbf"), max(MOST_VALUES, len(raw) // 4))
    except JsonError as error:
        raise DataError(f"{where}: {error}; expected the published layout") from None
