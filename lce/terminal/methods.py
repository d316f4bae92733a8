"""The methods that `--method` and `-o` name on a command line: one, several, or all that can serve the model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lce
from lce.errors import LceError, UsageError, nearest
from lce.terminal.output import note

ALL = "all"


def methods_of(
    names: Sequence[str], knobs: Mapping[str, str], loading: Mapping[str, Any],
    suits: Callable[[lce.Method], bool] = lambda method: True,
) -> list[lce.Method]:  # fmt: skip
    """Return the methods called `names`. `all` stands for methods that serve the model and that `suits` accepts.

    `all` excludes methods for analysis, which can be named besides. A method that lacks something, such as the learned
    maps of `esa`, is left out with a note, unless -o METHOD.KEY=VALUE names the method. With `all`, KEY=VALUE is for
    the methods that have KEY. `loading` are options of `lce.engine.loading.resolved`. Raises `UsageError`.
    """
    from lce.engine.loading import resolved

    if ALL not in names:
        return [lce.methods.make(name, knobs_for(name, knobs, names)) for name in names]
    named = [name for name in names if name != ALL]
    others = [name for name in ["full", *lce.methods.available()] if name not in named and not _is_for_analysis(name)]
    listed = list(dict.fromkeys([*others, *named]))
    check_owned(knobs, listed)
    resolved(method="full", **loading)  # the model itself can be read
    serving = [_serving(name, knobs, listed, loading) for name in listed if name not in named]
    found = [method for method in serving if method is not None and suits(method)]
    return found + [lce.methods.make(name, owned(name, knobs, listed)) for name in named]


def _is_for_analysis(name: str) -> bool:
    try:
        return lce.methods.find(name).analysis
    except UsageError:  # one package's broken method; making it reports the error
        return False


def knobs_for(name: str, knobs: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the knobs of one of several methods: KEY=VALUE is for all, and NAME.KEY=VALUE overrides it for NAME."""
    chosen = {key: value for key, value in knobs.items() if "." not in key}
    for key, value in knobs.items():
        owner, dot, own_key = key.partition(".")
        if dot and owner not in names:
            raise UsageError(f"-o {key}={value} is for a method that --method does not name; {nearest(owner, names)}")
        if dot and owner == name:
            chosen[own_key] = value
    return chosen


def owned(name: str, knobs: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the result of `knobs_for` without the KEY=VALUE knobs that the method lacks."""
    cls = lce.methods.find(name)
    own = {field.name for field in dataclasses.fields(cls)} | {f"preset={preset}" for preset in cls.presets}
    some = {key: x for key, x in knobs.items() if "." in key or key in own or f"{key}={x}" in own}
    return knobs_for(name, some, names)


def check_owned(knobs: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise `UsageError` for a KEY=VALUE that no method has, or a METHOD.KEY=VALUE of a method not in `names`."""
    valid, presets = set(), set()
    for name in names:
        with contextlib.suppress(UsageError):  # one package's broken method
            cls = lce.methods.find(name)
            valid |= {field.name for field in dataclasses.fields(cls)} | ({"preset"} if cls.presets else set())
            presets |= set(cls.presets)
    for key, value in knobs.items():
        if "." in key:
            knobs_for("", {key: value}, names)
        elif key not in valid:
            raise UsageError(f"no method has the knob {key!r}; {nearest(key, sorted(valid))}")
        elif key == "preset" and value not in presets:
            raise UsageError(f"no method has the preset {value!r}; {nearest(value, sorted(presets))}")


def _serving(
    name: str, knobs: Mapping[str, str], names: Sequence[str], loading: Mapping[str, Any]
) -> lce.Method | None:  # fmt: skip
    """Return a method of `all` with its knobs; None, with a note, if not even its defaults can serve the model."""
    from lce.engine.loading import resolved

    try:
        method = lce.methods.make(name, owned(name, knobs, names))
        resolved(method=method, **loading)
        return method
    except LceError as error:
        if any(key.startswith(f"{name}.") for key in knobs) or _serves(name, loading):
            raise
        note(f"--method all leaves {name} out: {error}")
        return None


def _serves(name: str, loading: Mapping[str, Any]) -> bool:
    """Return whether a method with its defaults can serve the model, so that only the knobs are at fault."""
    from lce.engine.loading import resolved

    try:
        resolved(method=name, **loading)
    except LceError:
        return False
    return True
