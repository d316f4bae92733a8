"""Knobs: the fields of a method, as values and as text.

A knob is a number, a word, or a value with knobs of its own, a `Knobs`. A value of several kinds is spelled by the name
of its kind, a value of one kind by its first knob; a knob of a value is spelled with a dot. So `-o select=lowdim -o
select.low_dim=64 -o budget=2048 -o budget.sinks=32` are four knobs of `pages`.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, TypeVar

from lce.errors import UsageError, shown
from lce.plugins import plugins

MOST = 1 << 31  # the largest integer that a knob takes: the product of two such numbers fits in int64
T = TypeVar("T")


def knob(default: T, meaning: str, *, least: int | None = None, is_share: bool = False, kw_only: bool = False) -> T:
    """Declare a knob (an option) of a method: a dataclass field with its meaning in a few words, and its allowed range.

    `least` is the smallest allowed value. With `is_share` a value is above 0 and at most 1. None is always allowed.
    """
    facts = {"meaning": meaning, "least": least, "is_share": is_share}
    return field(default=default, kw_only=kw_only, metadata=facts)


class Knobs:
    """A frozen dataclass of knobs that is the value of a knob. `kinds` are the subclasses of a base by name, if any."""

    name: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type[Knobs]]] = {}
    entry_points: ClassVar[str] = ""  # the group of entry points of more kinds, in other packages

    def __init_subclass__(cls, name: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name:
            if (other := cls.kinds.get(name)) is not None and other.__qualname__ != cls.__qualname__:
                raise UsageError(f"two kinds are called {name!r}: {other} and {cls}; rename one")
            cls.name = name
            cls.kinds[name] = cls


@dataclass(frozen=True)
class KnobFacts:
    """A knob's name (dotted for a knob of a value), field, type and default, and the kinds that have the knob."""

    name: str
    field: Field[Any]
    type: Any
    default: Any
    of: tuple[str, ...] = ()  # the kinds of the value that have the knob; empty: it is not a knob of some kinds alone

    @property
    def beside(self) -> str:
        """The value that has the knob, such as `select=lowdim`; empty if it is a knob of the method itself."""
        return f"{self.name.rpartition('.')[0]}={' or '.join(self.of)}" if self.of else ""


def fill_in(value: T, label: str, prefix: str = "", **defaults: Any) -> T:
    """Return `value` with `defaults` for knobs that are None. Raises `UsageError` for a knob out of range."""
    made: Any = replace(value, **{knob: x for knob, x in defaults.items() if getattr(value, knob) is None})  # type: ignore[type-var]
    for each in fields(made):
        x, least, name = getattr(made, each.name), each.metadata.get("least"), f"{prefix}{each.name}"
        if isinstance(x, int | float) and least is not None and x < least:
            raise UsageError(f"{label}: {name} is {x}; expected {least} or more")
        if x is not None and each.metadata.get("is_share") and not 0 < x <= 1:
            raise UsageError(f"{label}: {name} is {x}; expected a share above 0, at most 1")
    return made  # type: ignore[no-any-return]


def settings(value: Any) -> dict[str, Any]:
    """Return the knobs of a method or a value by name, with dots for knobs of values; `build` takes the result."""
    found: dict[str, Any] = {}
    for each in fields(value):
        x = getattr(value, each.name)
        if isinstance(x, Knobs):
            own = settings(x)
            head = x.name if x.kinds else own.pop(fields(x)[0].name)  # type: ignore[arg-type]
            found |= {each.name: head, **{f"{each.name}.{key}": y for key, y in own.items()}}
        else:
            found[each.name] = x
    return found


def knob_values(value: Any) -> dict[str, Any]:
    """Return `settings` as JSON values."""
    plain = (str, int, float, type(None))  # bool is a subclass of int
    return {name: x if isinstance(x, plain) else repr(x) for name, x in settings(value).items()}


def kinds_of(base: type[Knobs]) -> dict[str, type[Knobs]]:
    """Return the kinds of a value by name, with those that other packages add."""
    for name, point in plugins(base.entry_points).items() if base.entry_points else ():
        if name not in base.kinds:
            point.load()
    return base.kinds


def knobs_of(cls: type[Any]) -> list[KnobFacts]:
    """Return the knobs of a class, and the knobs of every kind of its values."""
    kinds, found = typing.get_type_hints(cls), list[KnobFacts]()
    for each in fields(cls):
        kind, usual = value_type(kinds[each.name]), each.default
        if kind is None:
            found.append(KnobFacts(each.name, each, kinds[each.name], usual))
            continue
        nested: dict[str, KnobFacts] = {}
        for of, one in (kinds_of(kind) or {"": kind}).items():
            for own in knobs_of(one):
                before = nested[own.name].of if own.name in nested else ()
                nested[own.name] = replace(own, name=f"{each.name}.{own.name}", of=(*before, of) if of else ())
        if kind.kinds:
            found.append(KnobFacts(each.name, each, Literal[tuple(kind.kinds)], getattr(usual, "name", None)))
        else:
            first = nested.pop(fields(kind)[0].name)  # type: ignore[arg-type]
            found.append(replace(first, name=each.name))
        found += nested.values()
    return found


def value_type(kind: Any) -> type[Knobs] | None:
    """Return a knob's type if it is a subclass of `Knobs`; None for numbers and words."""
    return kind if isinstance(kind, type) and issubclass(kind, Knobs) else None


def build(cls: type[T], options: Mapping[str, Any], what: str, label: str) -> T:
    """Return an instance of `cls` with these knobs, or raise `UsageError`, in which `what` and `label` name `cls`."""
    own, kinds = {each.name: each for each in fields(cls)}, typing.get_type_hints(cls)  # type: ignore[arg-type]
    values, parts = dict[str, Any](), dict[str, dict[str, Any]]()
    for key, value in options.items():
        head, _, rest = key.partition(".")
        if head in own and value_type(kinds[head]) is not None:
            parts.setdefault(head, {})[rest] = value
        elif key in own:
            values[key] = _converted(what, key, value, kinds[key], own[key].default)
        else:
            valid = ", ".join(f"{x.name}={spelled(x.default)}" for x in knobs_of(cls)) or "(none)"
            raise UsageError(f"{what} has no option {shown(key)}; valid, with defaults: {valid}")
    for head, given in parts.items():
        values[head] = _built(kinds[head], head, given, own[head].default, what, label)
    for key, each in own.items():
        if key not in values and each.default is each.default_factory is MISSING:
            raise UsageError(f"{what} needs {key}: give -o {key}=VALUE")
    return cls(**values)


def _built(base: type[Knobs], head: str, given: dict[str, Any], usual: Any, what: str, label: str) -> Knobs:
    """Return the value of the knob `head`: `given` has its kind or its first knob as "", and its knobs by name."""
    start = given.pop("", usual)
    if base.kinds and not isinstance(start, base):
        kinds_here = base.kinds if start in base.kinds else kinds_of(base)
        start = kinds_here[_converted(what, head, start, Literal[tuple(kinds_here)], usual.name)]()
    elif not isinstance(start, base):
        start, given = base(), {fields(base)[0].name: start, **given}  # type: ignore[arg-type]
    names, kinds, values = [each.name for each in fields(start)], typing.get_type_hints(type(start)), {}  # type: ignore[arg-type]
    for key, value in given.items():
        if key not in names:
            of = [name for name, kind in kinds_of(base).items() if key in {each.name for each in fields(kind)}]  # type: ignore[arg-type]
            if not of:
                raise UsageError(
                    f"{what} has no option {shown(f'{head}.{key}')}; {head} has {', '.join(names) or 'none'}"
                )
            alone = f"{head}.{key} is a knob of {head}={' and '.join(of)} alone, and {head} is {start.name}"
            raise UsageError(f"{label}: {alone}; drop {head}.{key}")
        full = head if not base.kinds and key == names[0] else f"{head}.{key}"
        values[key] = _converted(what, full, value, kinds[key], getattr(start, key))
    return replace(start, **values)  # type: ignore[type-var]


def _converted(what: str, key: str, value: Any, kind: Any, usual: Any) -> Any:
    try:
        return convert(value, kind)
    except ValueError as error:
        text = value if isinstance(value, str) and value.isprintable() and len(value) <= 80 else shown(value)
        raise UsageError(f"{what}: {key}={text} is not {error}; default {key}={spelled(usual)}") from None


def checked(value: T, label: str, prefix: str = "") -> T:
    """Return `value` if its knobs have valid types, else raise `UsageError`; 0 and 1 become bool for a bool knob."""
    kinds, changed = typing.get_type_hints(type(value)), {}
    for each in fields(value):  # type: ignore[arg-type]
        x, kind, name = getattr(value, each.name, MISSING), kinds[each.name], f"{label}: {prefix}{each.name}"
        if not each.init or x is each.default:
            continue
        if (base := value_type(kind)) is not None:
            if not isinstance(x, base):
                raise UsageError(f"{name} is {shown(x)}; expected a {base.__name__}; text is for lce.methods.make")
            y: Any = checked(x, label, f"{prefix}{each.name}.")
        else:
            y = _checked(name, x, kind)
        if y is not x:
            changed[each.name] = y
    return replace(value, **changed) if changed else value  # type: ignore[type-var]


def _checked(what: str, value: Any, kind: Any) -> Any:
    """Return a knob's value; 0 and 1 become bool for a bool knob. Raises `UsageError` for a value of another type.

    A knob whose type `convert` does not know is not checked.
    """
    arms = [*_arms(kind)]
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


def _arms(kind: Any) -> Iterator[Any]:
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    yield from typing.get_args(kind) if is_union else (kind,)


def spelled(value: Any) -> str:
    """Return an option's value as text that `convert` accepts."""
    if isinstance(value, Knobs):
        value = value.name or getattr(value, fields(value)[0].name)  # type: ignore[arg-type]
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def convert(value: Any, kind: Any) -> Any:
    """Convert `value` to the type `kind`: int, float, bool, str, a Literal, or a union. Raises `ValueError`.

    A union takes the first of its types that fits the value; the word `none` is None.
    """
    arms, expected = [*_arms(kind)], list[str]()
    if type(None) in arms and (value is None or (isinstance(value, str) and value == "none")):
        return None
    for arm in arms:
        if arm is not type(None):
            try:
                return _convert(value, arm)
            except ValueError as error:
                expected.append(str(error))
    raise ValueError(" or ".join(expected))


def _convert(value: Any, kind: Any) -> Any:
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
    if isinstance(kind, type) and kind not in (int, float) and isinstance(value, kind):
        return value
    raise ValueError(f"a value of type {getattr(kind, '__name__', kind)}")
