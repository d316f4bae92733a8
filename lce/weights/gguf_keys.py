"""The metadata of a GGUF file, read by key and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lce.errors import ModelError, shown
from lce.files import named
from lce.weights.gguf_file import GgufFile

AGAIN, OTHER = "download the file again", "use another file"
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Keys:
    """The metadata of `file` under the keys that begin with `prefix`, such as `llama.`, which callers leave out.

    A wrong value raises ModelError. A default of None means that the key must be there. `seen` has the keys that were
    asked for.
    """

    file: GgufFile
    prefix: str
    seen: set[str] = field(default_factory=set)

    def get(self, key: str, default: object = None) -> Any:
        """Return the value as it is stored."""
        self.seen.add(key)
        return self.file.metadata.get(self.prefix + key, default)

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key, default)
        if type(value) is not int or not least <= value <= _LARGEST:  # `type`, because a bool is an instance of int
            raise self.refusal(key, f"a whole number from {least} to {_LARGEST}")
        return value

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        """Return a number. A float32 becomes the shortest decimal that rounds to it, as config.json has it."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not least <= value <= 1e30:
            raise self.refusal(key, f"a number from {least:g} to 1e+30")
        return decimal(value)

    def refuse_unread(self, harmless: frozenset[str]) -> None:
        """Raise ModelError for a key that nobody asked for, unless it is `harmless` or its value is 0 or empty."""
        for whole, value in self.file.metadata.items():
            key = whole.removeprefix(self.prefix)
            if key != whole and key not in self.seen | harmless and value:
                raise self.refusal(key, "no such key, because lce does not implement what it says", OTHER)

    def refusal(self, key: str, expected: str, remedy: str = AGAIN) -> ModelError:
        """Return the error that says that the value under `key` is wrong, what was `expected`, and a `remedy`."""
        key = self.prefix + key
        got = f"is {shown(self.file.metadata[key])}" if key in self.file.metadata else "is missing"
        return ModelError(f"{named(self.file.path)}: {key} {got}; expected {expected}; {remedy}")


def decimal(value: float) -> float:
    """Return the shortest decimal number that rounds to a float32; another number as it is."""
    assert math.isfinite(value)
    return float(str(np.float32(value))) if np.float32(value) == value else float(value)
