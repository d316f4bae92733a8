"""A JSON file of a checkpoint, read by key with every value checked; config.py and the families read through it.

This file does not import torch. The tables below are limits that no published model comes near: a value beyond them
means that the file is damaged or hostile. A family that reads a key of its own passes its limits as `within`.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from lce.errors import ModelError

_LARGEST_FILE = 4 << 20  # bytes; published files have a few thousand
_LARGEST_INTEGER = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 2**14,
    "max_position_embeddings": 2**30,
    "original_max_position_embeddings": 2**30,
    "sliding_window": 2**30,
}
_NUMBER_RANGE = {
    "rms_norm_eps": (1e-20, 1.0),
    "rope_theta": (2.0, 1e15),
    "factor": (1.0, 1e6),
    "attention_factor": (1e-6, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
    "partial_rotary_factor": (0.0, 1.0),
}
_REMEDY = "correct the file or download the checkpoint again"


class Fields:
    """A JSON object of a file, read by key. A wrong value is a ModelError.

    A key that the file leaves out takes its value in `defaults`, if it has one there. So does a null, except where a
    null means something: an `optional_` reader returns None for it.
    """

    def __init__(self, where: str, values: Mapping[str, object], defaults: Mapping[str, object] | None = None) -> None:
        self.where = where
        self.values = values
        self.defaults = defaults or {}

    def with_defaults(self, defaults: Mapping[str, object]) -> Fields:
        return Fields(self.where, self.values, defaults)

    def refusal(self, key: str, expected: str, remedy: str = _REMEDY) -> ModelError:
        short = reprlib.Repr()
        short.maxstring = 80
        got = f"is {short.repr(self.values[key])}" if key in self.values else "is missing"
        return ModelError(f"{self.where}: {key} {got}; expected {expected}; {remedy}")

    def optional_integer(self, key: str, within: tuple[int, int] | None = None) -> int | None:
        value = self.values.get(key, self.defaults.get(key))
        if value is None:
            return None
        low, high = within or (1, _LARGEST_INTEGER[key])
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refusal(key, f"a whole number from {low} to {high}")
        return value

    def integer(self, key: str, within: tuple[int, int] | None = None) -> int:
        value = self.optional_integer(key, within)
        chosen = self.defaults.get(key) if value is None else value
        if not isinstance(chosen, int):
            raise self.refusal(key, "a whole number from {} to {}".format(*(within or (1, _LARGEST_INTEGER[key]))))
        return chosen

    def optional_number(self, key: str, within: tuple[float, float] | None = None) -> float | None:
        value = self.values.get(key, self.defaults.get(key))
        if value is None:
            return None
        low, high = within or _NUMBER_RANGE[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.refusal(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def number(self, key: str, default: float | None = None, within: tuple[float, float] | None = None) -> float:
        value = self.optional_number(key, within)
        chosen = self.defaults.get(key, default) if value is None else value
        if not isinstance(chosen, int | float):
            raise self.refusal(key, "a number from {:g} to {:g}".format(*(within or _NUMBER_RANGE[key])))
        return float(chosen)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refusal(key, "a string")
        return value

    def names(self, key: str) -> list[str]:
        """The list of strings under `key`, empty where there is none."""
        listed = [] if self.values.get(key) is None else self.values[key]
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise self.refusal(key, "a list of names")
        return listed

    def section(self, key: str) -> Fields:
        """The object under `key`, empty where there is none. It must be flat: one for all layers."""
        value = self.values.get(key)
        value = self.defaults.get(key, {}) if value is None else value
        if not isinstance(value, dict) or any(isinstance(inner, dict) for inner in value.values()):
            raise self.refusal(key, "null or one flat object for all layers")
        return Fields(f"{self.where}: {key}", value)

    def inner(self, key: str, inherited: Sequence[str]) -> Fields:
        """The object under `key`, with those `inherited` keys that this object has itself."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.refusal(key, "an object")
        shared = {name: self.values[name] for name in inherited if self.values.get(name) is not None}
        return Fields(f"{self.where}: {key}", value | shared)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """The ids under `key`, one or a list of them; empty where there are none."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise self.refusal(key, f"token ids below the vocab_size of {vocab_size}")
        return tuple(ids)


def read_object(path: Path) -> Fields:
    """The object in a JSON file; ModelError if it cannot be read, holds no JSON object, or exceeds 4 MiB."""
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); {_REMEDY}") from None
    if len(raw) > _LARGEST_FILE:
        raise ModelError(f"{path} is larger than {_LARGEST_FILE} bytes, which no model config is; {_REMEDY}")
    try:
        values = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ModelError(f"{path} is not JSON in UTF-8 ({reason}); {_REMEDY}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a {type(values).__name__}; expected a JSON object; {_REMEDY}")
    return Fields(str(path), values)
