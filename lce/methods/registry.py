"""Finds methods by name, and makes them of knobs.

lce registers its own methods by the decorator `register`. Another package lists its methods in the entry-point group
`lce.methods`; the class of such a method is imported when the method's name is first used. `from_file` runs a user's
file that registers a method. A file is run only where a user names it, never because a context file or a request does.
"""

import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from lce.errors import USER_MODULE, UsageError, nearest, shown, user_line
from lce.files import named, open_regular, path_of
from lce.methods.base import Method
from lce.methods.knobs import build, checked
from lce.plugins import plugins


class UserFile(NamedTuple):
    """The path of a user's file of code, and the SHA-256 of the text that was run."""

    path: str
    digest: str


ENTRY_POINTS = "lce.methods"
AUTO = "auto"  # no method's name: a model is loaded with the method that suits it, see `lce.methods.auto`
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
    return sorted({*_REGISTRY, *plugins(ENTRY_POINTS)})


def find(name: str) -> type[Method]:
    """Return the method class registered as `name`, or raise a `UsageError` that suggests the nearest name."""
    return _REGISTRY[name] if isinstance(name, str) and name in _REGISTRY else _found(name)


def _found(name: str) -> type[Method]:
    if not isinstance(name, str):
        raise UsageError(f"method is {shown(name)}; expected a name; valid: {', '.join(available())}")
    if name == AUTO:
        raise UsageError(
            "auto stands for a method where one model is loaded or planned: in lce.load, lce.plan, and lce generate, "
            "chat, prefill and plan, without knobs"
        )
    if (point := plugins(ENTRY_POINTS).get(name)) is not None:
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
    """Return the user's file that defines a method, or None. The file is part of what identifies the method."""
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
    return checked(method, method.label)


def make(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """Return the method `name` with these options; values may be text, as on a command line.

    `preset` names one of the method's `presets`, which other options override. Raises `UsageError` for bad options.
    """
    cls = find(name)
    if options is not None and not isinstance(options, Mapping):
        raise UsageError(f"the options of method {name!r} are {shown(options)}; expected a mapping of knobs and values")
    given = dict(options or {})
    if cls.presets and "preset" in given:
        preset = given.pop("preset")
        if not isinstance(preset, str) or preset not in cls.presets:
            raise UsageError(f"method {name!r} has no preset {shown(preset)}; {nearest(str(preset), cls.presets)}")
        given = {**cls.presets[preset], **given}
    if name in RENAMED:
        check_renamed(name, given)
    return build(cls, given, f"method {name!r}", name)


def with_knobs(method: Any, options: Mapping[str, Any] | None) -> Any:
    """Return a method of a name and the options `method_options`; without options, the method as it is given."""
    if options is not None and not isinstance(options, Mapping):
        raise UsageError(f"method_options is {shown(options)}; expected a mapping of knobs to values")
    if options and not isinstance(method, str):
        raise UsageError("method_options are for a method's name; give the method its knobs")
    return make(method, options) if options and isinstance(method, str) else method


# By method, the former names of knobs, and the present ones.
RENAMED: Mapping[str, Mapping[str, str]] = {
    "pages": {
        "place": "placement",
        **{knob: f"budget.{knob}" for knob in ("sinks", "local", "growth", "grows_from", "grows_to", "top_p")},
        **{knob: f"select.{knob}" for knob in ("repr_tokens", "compress", "low_dim", "maps", "judge", "seed")},
        **{knob: f"placement.{knob}" for knob in ("group", "chunk_size", "far")},
    }
}


def renewed(method: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs of a method under their present names. A renamed knob that is None is dropped: it meant nothing.

    Example: `renewed("pages", {"place": "dual", "seed": None, "page": 16})` is `{"placement": "dual", "page": 16}`.
    """
    names = RENAMED.get(method, {})
    found = {names.get(key, key): value for key, value in knobs.items() if key not in names or value is not None}
    if method == "longheads" and "keep_last" in found:  # the last chunk, or none
        found["local"] = found.get("chunk_size") if found.pop("keep_last") else 0
    return found


def check_renamed(method: str, knobs: Iterable[str]) -> None:
    """Raise `UsageError` for a knob that is given by its former name."""
    for key in knobs:
        if (now := RENAMED.get(method, {}).get(key)) is not None:
            raise UsageError(f"method {method!r} has no option {key!r}; it is called {now} now: give -o {now}=VALUE")
