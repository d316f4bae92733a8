"""Knobs whose names changed: the one table by which files and records of earlier versions are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lce.errors import UsageError

# By method, the name of before and the present one.
RENAMED: Mapping[str, Mapping[str, str]] = {
    "pages": {
        "place": "placement",
        **{knob: f"budget.{knob}" for knob in ("sinks", "local", "growth", "grows_from", "grows_to", "top_p")},
        **{knob: f"select.{knob}" for knob in ("repr_tokens", "compress", "low_dim", "maps", "judge", "seed")},
        **{knob: f"placement.{knob}" for knob in ("group", "chunk_size", "far")},
    }
}

ORDER = ("select", "placement", "page", "budget", "share", "queries")  # in which the knobs of `pages` are spelled now


def renewed(method: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs of a method under their present names. A knob of before that is None meant nothing, and goes.

    Example: `renewed("pages", {"place": "dual", "seed": None, "page": 16})` is `{"placement": "dual", "page": 16}`.
    """
    names = RENAMED.get(method, {})
    found = {names.get(key, key): value for key, value in knobs.items() if key not in names or value is not None}
    if method == "delta":  # two of its knobs spell methods
        found |= {key: _respelled(found[key]) for key in ("method", "dense") if isinstance(found.get(key), str)}
    return found


def _respelled(text: str) -> str:
    """Return a method with its knobs, `NAME:KNOB=VALUE:KNOB=VALUE`, under their present names."""
    name, *pairs = text.split(":")
    if name not in RENAMED or not any(pair.partition("=")[0] in RENAMED[name] for pair in pairs):
        return text
    knobs = renewed(name, dict(pair.partition("=")[::2] for pair in pairs))
    ordered = sorted(knobs.items(), key=lambda knob: ORDER.index(knob[0].partition(".")[0]))
    return ":".join((name, *(f"{key}={value}" for key, value in ordered)))


def check_renamed(method: str, knobs: Iterable[str]) -> None:
    """Raise `UsageError` for a knob's name of before."""
    for key in knobs:
        if (now := RENAMED.get(method, {}).get(key)) is not None:
            raise UsageError(f"method {method!r} has no option {key!r}; it is called {now} now: give -o {now}=VALUE")
