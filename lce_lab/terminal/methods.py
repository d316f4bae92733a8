"""Makes the methods that a command of the laboratory compares: those that it names, or all that serve the model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import lce
from lce.errors import CapacityError, LceError, UsageError, nearest
from lce.terminal.output import note

ALL = "all"


def methods_of(
    names: Sequence[str], knobs: Mapping[str, str], loading: Mapping[str, Any], *, selecting: bool = False
) -> list[lce.Method]:
    """Return the methods called `names`. `all` stands for the methods that serve the model.

    With `selecting`, `all` stands for those that select keys. `all` excludes methods for analysis, which can be named
    as well. A method of `all` that lacks something, such as the learned maps of `esa`, is left out with a note, unless
    -o METHOD.KEY=VALUE names the method. With `all`, a knob KEY=VALUE is for the methods that have KEY. `loading` are
    options of `lce.engine.sizing.resolved`. Raises `UsageError` for wrong names or knobs.
    """
    from lce.engine.sizing import resolved

    if ALL not in names:
        return [lce.methods.make(name, knobs_for(name, knobs, names)) for name in names]
    from lce_lab.analysis.oracle import selects

    asked, known = [name for name in names if name != ALL], lce.methods.available()
    analysis = {name for name, cls in _classes(known).items() if "analysis" in lce.methods.promises_of(cls)}  # type: ignore[arg-type]
    others = [name for name in known if name not in analysis]
    listed = list(dict.fromkeys([*(name for name in ["full", *others] if name not in asked), *asked]))
    check_owned(knobs, listed)
    resolved(method="full", **loading)  # raises an error if the model cannot be read
    serving = [_serving(name, knobs, listed, loading) for name in listed if name not in asked]
    found = [method for method in serving if method is not None and (not selecting or selects(method))]
    return found + [lce.methods.make(name, owned(name, knobs, listed)) for name in asked]


def _classes(names: Sequence[str]) -> dict[str, type[lce.Method]]:
    """Return the classes of methods by name, without the methods of packages that cannot be imported."""
    found = {}
    for name in names:
        with contextlib.suppress(UsageError):
            found[name] = lce.methods.find(name)
    return found


def knobs_for(name: str, knobs: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the knobs of the method `name`: KEY=VALUE is for all methods, NAME.KEY=VALUE overrides it for NAME."""
    chosen = {key: value for key, value in knobs.items() if not _owner(key, names)}
    for key, value in knobs.items():
        if _owner(key, names) == name:
            chosen[key.partition(".")[2]] = value
    return chosen


def _owner(key: str, names: Sequence[str]) -> str:
    """Return the method in METHOD.KEY, "" for a KEY, which may have dots: `budget.sinks` is a knob of `pages`."""
    owner, dot, _ = key.partition(".")
    if not dot or any(key in _knob_names(cls) for cls in _classes(names).values()):
        return ""
    if owner not in names:
        raise UsageError(f"-o {key} is for a method that --method does not name; {nearest(owner, names)}")
    return owner


def _knob_names(cls: type[lce.Method]) -> set[str]:
    return {each.name for each in lce.methods.knobs_of(cls)}


def owned(name: str, knobs: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the result of `knobs_for` without the KEY=VALUE knobs that the method lacks."""
    cls = lce.methods.find(name)
    own = _knob_names(cls) | {f"preset={preset}" for preset in cls.presets}
    some = {key: x for key, x in knobs.items() if _owner(key, names) or key in own or f"{key}={x}" in own}
    return knobs_for(name, some, names)


def check_owned(knobs: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise `UsageError` for a KEY=VALUE that no method has, or a METHOD.KEY=VALUE of a method not in `names`."""
    classes = _classes(names).values()
    presets = {preset for cls in classes for preset in cls.presets}
    valid = {name for cls in classes for name in _knob_names(cls)} | ({"preset"} if presets else set())
    for key, value in knobs.items():
        if _owner(key, names):
            continue
        if key not in valid:
            raise UsageError(f"no method has the knob {key!r}; {nearest(key, sorted(valid))}")
        if key == "preset" and value not in presets:
            raise UsageError(f"no method has the preset {value!r}; {nearest(value, sorted(presets))}")


def _serving(
    name: str, knobs: Mapping[str, str], names: Sequence[str], loading: Mapping[str, Any]
) -> lce.Method | None:
    """Return the method `name` with its knobs; None, with a note, if even its defaults do not serve the model."""
    from lce.engine.sizing import resolved

    try:
        method = lce.methods.make(name, owned(name, knobs, names))
        resolved(method=method, **loading)
        return method
    except LceError as error:
        serves = False
        with contextlib.suppress(LceError):
            resolved(method=name, **loading)
            serves = True  # the method works with its defaults, so the given knobs are wrong
        if serves or any(key.startswith(f"{name}.") for key in knobs):
            raise
        note(f"--method all leaves {name} out: {error}")
        return None


def check_capacity(model: str, methods: Sequence[lce.Method], tokens: int, loading: Mapping[str, Any]) -> None:
    """Raise `CapacityError` if `tokens` tokens do not fit into memory with a method. `loading` is for `lce.load`."""
    from lce.engine.options import SizeOptions
    from lce.engine.sizing import resolved

    resolved(model, "full")  # downloads a model whose config is in its weights' file, as a plan does not
    sizes: Any = {name: loading[name] for name in SizeOptions.__annotations__ if name in loading}
    for method in methods:
        if (refusal := lce.plan(model, method, tokens=tokens, **sizes).refusal) is not None:
            raise CapacityError(refusal)
