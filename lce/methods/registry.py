"""Finds methods by name, and converts the values of their knobs from text.

lce registers its own methods by the decorator `register`. Another package lists its methods in the entry-point group
`lce.methods`; the class of such a method is imported when the method's name is first used. `from_file` runs a user's
file that registers a method. A file is run only where a user names it, never because a context file or a request does.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from lce.errors import USER_MODULE, UsageError, nearest, shown, user_line
from lce.files import named, open_regular, path_of
from lce.methods.base import Method


class UserFile(NamedTuple):
    """The path of a user's file of code, and the SHA-256 of the text that was run."""

    path: str
    digest: str


ENTRY_POINTS = "lce.methods"
AUTO = "auto"  # no method's name: a model is loaded with the method that suits it, see `lce.methods.auto`
MOST = 1 << 31  # the largest integer that a knob takes: the product of two such numbers fits in int64
_REGISTRY: dict[str, type[Method]] = {}
_FILES: WeakKeyDictionary[type, UserFile] = WeakKeyDictionary()  # of classes that `from_file` has made
M = TypeVar("M", bound=type[Method])


def register(name: str) -> Callable[[M], M]:
    """Return a class decorator that registers a method as `name`. Raises `UsageError` if the name is taken."""

    def enter(cls: M) -> M:
        if name == AUTO:
            raise UsageError(f"{cls.__name__} is registered as {AUTO!r}, a word of lce.load; give another name")
        other = _REGISTRY.get(name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UsageError(f"two methods are called {name!r}: {other} and {cls}; rename one")
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return enter


def available() -> list[str]:
    """Return the names of all methods, including those of installed packages."""
    return sorted({*_REGISTRY, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def find(name: str) -> type[Method]:
    """Return the method class registered as `name`, or raise a `UsageError` that suggests the nearest name."""
    if not isinstance(name, str):
        raise UsageError(f"method is {shown(name)}; expected a name; valid: {', '.join(available())}")
    if name == AUTO:
        raise UsageError(
            "auto stands for a method where one model is loaded or planned: in lce.load, lce.plan, and lce generate, "
            "chat, prefill and plan, without knobs"
        )
    for point in () if name in _REGISTRY else entry_points(group=ENTRY_POINTS, name=name):
        what = f"method {name!r} of {point.value}"
        try:
            cls = point.load()
        except Exception as error:
            raise UsageError(f"{what} cannot be imported: {error}") from error
        if not (isinstance(cls, type) and issubclass(cls, Method)):
            raise UsageError(f"{what} is {cls!r}; expected a subclass of lce.Method")
        register(name)(cls)
    if name not in _REGISTRY:
        hint = "a file of yours is run by lce.methods.from_file" if name.endswith(".py") else nearest(name, available())
        raise UsageError(f"unknown method {shown(name)}; {hint}")
    return _REGISTRY[name]


def from_file(path: str | Path) -> type[Method]:
    """Run a Python file as the user's own code; return the one method class that the file registers.

    The file runs again only if its text has changed since. Raises `UsageError` for a file that fails, with the line.

    Example: `lce.load(model, lce.methods.from_file("mine.py")(chunk_size=64))`.
    """
    place = str(path_of(path).absolute())
    with open(open_regular(place, UsageError), "rb") as file:
        text = file.read()
    own, before = UserFile(place, hashlib.sha256(text).hexdigest()), dict(_REGISTRY)
    for name, cls in before.items():
        earlier = _FILES.get(cls)
        if earlier == own:
            return cls
        if earlier is not None and earlier.path == place:
            del _REGISTRY[name]  # the class of an earlier text of the file
    module = types.ModuleType(f"{USER_MODULE}{own.digest[:12]}")
    try:
        sys.modules[module.__name__] = module
        exec(compile(text, place, "exec"), vars(module))
        found = [cls for cls in _REGISTRY.values() if cls.__module__ == module.__name__]
        if len(found) != 1:
            names = " and ".join(cls.name for cls in found) or "no method"
            raise UsageError(f"{named(place)} registers {names}; expected one class with @lce.methods.register(NAME)")
        _FILES[found[0]] = own
        return found[0]
    except BaseException as error:
        del sys.modules[module.__name__]
        _REGISTRY.update(before)  # at no time are other methods missing, for other threads
        for name in _REGISTRY.keys() - before.keys():
            del _REGISTRY[name]
        line = user_line(error)
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, UsageError) and not line):
            raise
        raise UsageError(f"{line or f'{named(place)}: {error}'}; correct the file") from error


@functools.singledispatch
def user_file(method: Method) -> UserFile | None:
    """Return the user's file that a method is from, part of what identifies the method; None: from no such file."""
    return next((_FILES[cls] for cls in type(method).__mro__ if cls in _FILES), None)


def as_method(method: str | Method) -> Method:
    """Return a new method by name or file, or the given one if its knobs have valid types; else raise `UsageError`."""
    if isinstance(method, str):
        return make(from_file(method).name if method.endswith(".py") else method)
    if isinstance(method, type) and issubclass(method, Method):
        raise UsageError(f"method is the class {method.__name__}; expected an instance: {method.__name__}()")
    if not isinstance(method, Method):
        raise UsageError(f"method is {shown(method)}; expected a name, or an instance of lce.Method")
    cls = type(method)
    if any("__init__" in vars(base) and "__dataclass_fields__" not in vars(base) for base in cls.__mro__[:-1]):
        raise UsageError(f"method {cls.__name__} has an __init__ of its own; expected a frozen dataclass")
    kinds = typing.get_type_hints(cls)
    given = {field.name: getattr(method, field.name) for field in dataclasses.fields(method) if field.init}
    knobs = {name: _knob(f"{method.label}: {name}", value, kinds[name]) for name, value in given.items()}
    changed = {name: value for name, value in knobs.items() if value is not given[name]}
    return dataclasses.replace(method, **changed) if changed else method


def _knob(what: str, value: Any, kind: Any) -> Any:
    """Return a knob's value; 0 and 1 become bool for a bool knob. Raises `UsageError` for a value of another type.

    A knob whose type `convert` does not know is not checked.
    """
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    arms = typing.get_args(kind) if is_union else (kind,)
    plain = [arm for arm in arms if arm in (int, float, bool, str) or typing.get_origin(arm) is Literal]
    if not plain or any(isinstance(arm, type) and arm not in plain and isinstance(value, arm) for arm in arms):
        return value
    try:
        converted = convert(value, kind)
    except ValueError as error:
        raise UsageError(f"{what} is {shown(value)}; expected {error}") from None
    if isinstance(value, str) and not isinstance(converted, str):
        raise UsageError(f"{what} is the text {shown(value)}; expected {getattr(plain[0], '__name__', plain[0])}")
    return converted if isinstance(converted, bool) else value


def make(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """Return the method `name` with these options; values may be text, as on a command line.

    `preset` names one of the method's `presets`, which other options override. Raises `UsageError` for bad options.
    """
    cls = find(name)
    if options is not None and not isinstance(options, Mapping):
        raise UsageError(f"the options of method {name!r} are {shown(options)}; expected a mapping of knobs and values")
    given, values, kinds = dict(options or {}), {}, typing.get_type_hints(cls)
    if cls.presets and "preset" in given:
        preset = given.pop("preset")
        if not isinstance(preset, str) or preset not in cls.presets:
            raise UsageError(f"method {name!r} has no preset {shown(preset)}; {nearest(str(preset), cls.presets)}")
        given = {**cls.presets[preset], **given}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key, value in given.items():
        if key not in fields:
            valid = ", ".join(f"{f.name}={spelled(f.default)}" for f in fields.values()) or "(none)"
            raise UsageError(f"method {name!r} has no option {shown(key)}; valid, with defaults: {valid}")
        try:
            values[key] = convert(value, kinds[key])
        except ValueError as error:
            text = value if isinstance(value, str) and value.isprintable() and len(value) <= 80 else shown(value)
            default = spelled(fields[key].default)
            raise UsageError(f"method {name!r}: {key}={text} is not {error}; default {key}={default}") from None
    for key, field in fields.items():
        if key not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise UsageError(f"method {name!r} needs {key}: give -o {key}=VALUE")
    return cls(**values)


def spelled(value: Any) -> str:
    """Return an option's value as text that `convert` accepts."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def convert(value: Any, kind: Any) -> Any:
    """Convert `value` to the type `kind`: int, float, bool, str, a Literal, or a union. Raises `ValueError`."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return _convert_to_any(value, typing.get_args(kind))
    is_small = isinstance(value, int) and abs(value) <= MOST
    word = str(value) if is_small or isinstance(value, str) else ""
    if typing.get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in typing.get_args(kind)}
        if word not in choices:
            raise ValueError("one of " + ", ".join(choices) if len(choices) > 1 else next(iter(choices)))
        return choices[word]
    if kind is bool:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if word.lower() not in words:
            raise ValueError("true or false")
        return words[word.lower()]
    if kind in (int, float) and isinstance(value, (int, kind, str)) and not isinstance(value, bool):
        try:
            number = kind(value)
        except (ValueError, OverflowError):
            raise ValueError("a whole number" if kind is int else "a number") from None
        if kind is float and not math.isfinite(number):
            raise ValueError("a finite number")
        if kind is int and abs(number) > MOST:
            raise ValueError(f"a whole number of {MOST} or less")
        return number
    if kind is str and isinstance(value, str):
        return value
    raise ValueError(f"a value of type {getattr(kind, '__name__', kind)}")


def _convert_to_any(value: Any, kinds: Sequence[Any]) -> Any:
    """Convert `value` to the first of these types that takes the value; the word `none` is None."""
    if type(None) in kinds and (value is None or (isinstance(value, str) and value == "none")):
        return None
    expected = []
    for kind in kinds:
        if kind is not type(None):
            try:
                return convert(value, kind)
            except ValueError as error:
                expected.append(str(error))
    raise ValueError(" or ".join(expected))


def knob_values(method: Any) -> dict[str, Any]:
    """Return a method's or a task's knobs as JSON values."""
    values = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    plain = (str, int, float, type(None))  # bool is a subclass of int
    return {name: value if isinstance(value, plain) else repr(value) for name, value in values.items()}
