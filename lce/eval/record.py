"""A record of answered samples, so that a long evaluation can be interrupted, resumed and shared out.

The file has one JSON line an answer, with everything that the answer depends on. A sample in it is not asked again. A
line is flushed to disk when it is added; an incomplete last line, left by a crash, is ignored.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lce.errors import DataError


class Record:
    """The answers in one file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._right: dict[str, bool] = {}
        try:
            data = self.path.read_bytes() if self.path.exists() else b""
            whole = data.rfind(b"\n") + 1
            self._torn = whole if whole < len(data) else None  # the offset of an incomplete last line
            for number, line in enumerate(data[:whole].decode().split("\n")[:-1], 1):
                self._read(line, number)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {self.path}: {getattr(error, 'strerror', None) or error}") from error

    def _read(self, line: str, number: int) -> None:
        try:
            answer = json.loads(line)
            right = answer.pop("right")
            if not isinstance(right, bool):
                raise TypeError
        except (ValueError, TypeError, KeyError, AttributeError):
            raise DataError(
                f"{self.path} is no record of answers: line {number} is {line[:60]!r}; name another file"
            ) from None
        self._right[_key(answer)] = right

    def given(self, sample: dict[str, Any]) -> bool | None:
        """Whether the recorded answer to this sample is right; None without one."""
        return self._right.get(_key(sample))

    def add(self, sample: dict[str, Any], right: bool) -> None:
        """Append one answer to the file. Raises `DataError` where that fails."""
        try:
            with self.path.open("ab") as file:
                if self._torn is not None:
                    file.truncate(self._torn)
                    self._torn = None
                file.write(json.dumps({**sample, "right": right}).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror}") from error
        self._right[_key(sample)] = right


def _key(sample: dict[str, Any]) -> str:
    return json.dumps(sample, sort_keys=True)
