"""How a record spells the engine that gave an answer, and lines that were written before some knobs were there."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import lce
from lce.errors import LceError

if TYPE_CHECKING:
    from lce import Engine
    from lce.lab.eval.record import Record


def described(engine: Engine) -> dict[str, str]:
    """What an answer depends on, of an engine: the model, the method with its knobs, the RoPE scaling, the dtypes."""
    found = {"model": engine.fingerprint, "engine": repr(engine), "rope": repr(engine.rope)}
    if engine.weights is not None:
        found["weights"] = engine.weights
    if engine.layout.kv_dtype is not None:
        found["kv_dtype"] = str(engine.layout.kv_dtype).removeprefix("torch.")
    return found


def told(engine: Engine) -> dict[str, Any]:
    """What a record tells of an engine besides, to read and to sort."""
    method = engine.method
    return {
        "method": method.label, "knobs": knob_values(method), "window": engine.window, "version": lce.__version__,
    }  # fmt: skip


def spellings(record: Record, engine: Engine) -> list[dict[str, str]]:
    """How a record may spell this engine and its RoPE scaling: as they are, or as they were before some knobs.

    A knob that was added since a line was written does not make the line another engine's while it has its default.
    """
    method, rope = engine.method, engine.rope
    try:
        plain: Any = type(method)().resolve(engine.window)
    except (LceError, TypeError):  # no defaults, or none that fit this window: those of the fields, unresolved
        plain = SimpleNamespace(**{field.name: field.default for field in dataclasses.fields(method)})
    spelled = []
    for name, text, owner, default in (
        ("engine", repr(engine), method, plain),
        ("rope", repr(rope), rope, type(rope)()),
    ):
        older = sorted(line for line in record.values(name) - {text} if without_new(text, line, owner, default) == line)
        spelled.append([{name: each} for each in (text, *older)])
    return [by_engine | by_rope for by_engine in spelled[0] for by_rope in spelled[1]]


def without_new(text: str, line: str, owner: Any, default: Any) -> str:
    """A text with a dataclass's repr, without the fields that `line` does not name and that have their defaults."""
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        is_new = not re.search(rf"[(\s]{field.name}=", line)
        if is_new and value == getattr(default, field.name, dataclasses.MISSING):
            text = re.sub(rf"(?<=[(\s]){field.name}={re.escape(repr(value))}(, |(?=\)))", "", text)
    return text.replace(", )", ")")


def knob_values(method: Any) -> dict[str, Any]:
    """A method's or a task's knobs, as values that JSON has."""
    values = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    plain = (str, int, float, type(None))  # a bool is an int
    return {name: value if isinstance(value, plain) else repr(value) for name, value in values.items()}
