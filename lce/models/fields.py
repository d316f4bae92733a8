"""A JSON file of a checkpoint, read by key with every value checked; config.py and the families read through it.

This file does not import torch. The table below has limits that no published model comes near: a value beyond them
means that the file is damaged or hostile. A family that reads a key of its own passes its limits as `within`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lce.errors import ModelError, shown

_RANGES: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**22),
    "num_hidden_layers": (1, 1024),
    "num_attention_heads": (1, 4096),
    "num_key_value_heads": (1, 4096),
    "head_dim": (1, 2**14),
    "max_position_embeddings": (1, 2**30),
    "original_max_position_embeddings": (1, 2**30),
    "sliding_window": (1, 2**30),
    "rms_norm_eps": (1e-20, 1),
    "rope_theta": (2, 10**15),
    "factor": (1, 10**6),
    "attention_factor": (1e-6, 10**6),
    "beta_fast": (1e-6, 10**6),
    "beta_slow": (1e-6, 10**6),
    "mscale": (0, 10**6),
    "mscale_all_dim": (0, 10**6),
    "low_freq_factor": (1e-6, 10**6),
    "high_freq_factor": (1e-6, 10**6),
    "partial_rotary_factor": (0, 1),
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

    def refusal(self, key: str, expected: str, remedy: str = _REMEDY) -> ModelError:
        got = "is missing"
        if key in self.values:
            got = f"is {shown(self.values[key])}"
        elif key in self.defaults:
            got += f", which means {shown(self.defaults[key])}"
        return ModelError(f"{self.where}: {key} {got}; expected {expected}; {remedy}")

    def optional_integer(self, key: str) -> int | None:
        value = self.values.get(key, self.defaults.get(key))
        return None if value is None else self._in_range(key, value, int)

    def integer(self, key: str, within: tuple[int, int] | None = None) -> int:
        value: int = self._in_range(key, self._filled(key), int, within)
        return value

    def optional_number(self, key: str) -> float | None:
        value = self.values.get(key, self.defaults.get(key))
        return None if value is None else float(self._in_range(key, value, float))

    def number(self, key: str, default: float | None = None, within: tuple[float, float] | None = None) -> float:
        return float(self._in_range(key, self._filled(key, default), float, within))

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._filled(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def _filled(self, key: str, default: object = None) -> object:
        """Return the value under `key`; for a key that is left out or null, its default."""
        value = self.values.get(key)
        return self.defaults.get(key, default) if value is None else value

    def _in_range(self, key: str, value: Any, kind: type, within: tuple[float, float] | None = None) -> Any:
        low, high = within or _RANGES[key]
        if type(value) not in (int, kind) or not low <= value <= high:  # exact types: a bool is an int too
            raise self.refusal(key, f"a {'whole ' if kind is int else ''}number from {low} to {high}")
        return value

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refusal(key, "a string")
        return value

    def names(self, key: str) -> list[str]:
        """Return the list of strings under `key`, empty where there is none."""
        listed = [] if self.values.get(key) is None else self.values[key]
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise self.refusal(key, "a list of names")
        return listed

    def section(self, key: str) -> Fields:
        """Return the object under `key`, empty where there is none. It must be flat: one for all layers."""
        value = self._filled(key, {})
        if not isinstance(value, dict) or any(isinstance(inner, dict) for inner in value.values()):
            raise self.refusal(key, "null or one flat object for all layers")
        return Fields(f"{self.where}: {key}", value)

    def inner(self, key: str, inherited: Sequence[str]) -> Fields:
        """Return the object under `key`, with those `inherited` keys that this object has itself."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.refusal(key, "an object")
        shared = {name: self.values[name] for name in inherited if self.values.get(name) is not None}
        return Fields(f"{self.where}: {key}", value | shared)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return the ids under `key`, one or a list of them; empty where there are none."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise self.refusal(key, f"token ids below the vocab_size of {vocab_size}")
        return tuple(ids)
