"""What records say of an engine, and what tables call its model, method and task. Lines of records are not trusted."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import lce

if TYPE_CHECKING:
    from lce import Engine

MOST = 160  # characters of a name
LONGEST_ENGINE = 4096  # characters of an engine's repr that is taken apart; ours have some 300
PLAIN = str.maketrans({"|": "/", "`": "'", "<": "‹", ">": "›", "$": "?"})  # no tables, code, HTML or formulas
OF_SAMPLE = "task task_knobs filler length samples seed depths questions mode index number".split()
OF_ENGINE = "model engine rope weights kv_dtype".split()
AS_USUAL = frozenset([*OF_SAMPLE, *OF_ENGINE])


class Told(Protocol):
    """What a line tells of its engine besides the sample; None where it does not."""

    @property
    def method(self) -> str | None: ...
    @property
    def window(self) -> int | None: ...
    @property
    def checkpoint(self) -> str | None: ...


Line = tuple[Mapping[str, Any], Told]  # a sample, and its answer or loss
EngineKey = tuple[str, ...]


def described(engine: Engine) -> dict[str, str]:
    """Return what an answer depends on: the model, the method with its knobs, the RoPE scaling, the dtypes."""
    found = {"model": engine.fingerprint, "engine": repr(engine), "rope": repr(engine.rope)}
    if engine.weights is not None:
        found["weights"] = engine.weights
    if engine.layout.kv_dtype != "auto":
        found["kv_dtype"] = engine.layout.kv_dtype
    return found


def told(engine: Engine) -> dict[str, Any]:
    """Return what a record says of an engine besides, to read and to sort."""
    method = engine.method
    about = {"method": method.label, "knobs": knob_values(method)}
    return {**about, "window": engine.window, "version": lce.__version__}


def knob_values(method: Any) -> dict[str, Any]:
    """Return a method's or a task's knobs, as values that JSON has."""
    values = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    plain = (str, int, float, type(None))  # a bool is an int
    return {name: value if isinstance(value, plain) else repr(value) for name, value in values.items()}


def cut(text: str) -> str:
    """Return a name as tables and pictures have it: short, on one line, without what Markdown would read."""
    plain = "".join(c if c.isprintable() else "?" for c in text).translate(PLAIN).replace("](", "] (")
    return plain if len(plain) <= MOST else f"{plain[: MOST - 3]}..."


def way_of(sample: Mapping[str, Any]) -> str:
    """Knobs of the task, filler and mode as a short text, without what is as usual; and what else there is."""
    knobs = sample.get("task_knobs")
    parts = [f"{k}={v}" for k, v in knobs.items()] if isinstance(knobs, dict) else []
    if (filler := sample.get("filler")) not in ("prose", "none", None):
        parts.append(str(filler))
    if mode := sample.get("mode"):
        parts.append(f"mode {mode}")
    if "number" in sample:  # those that a method missed: not to be compared with all
        parts.append("asked again by lce eval why")
    parts += [f"{name}={sample[name]}" for name in sorted(sample.keys() - AS_USUAL)]
    return cut(", ".join(parts))


def model_names(lines: Iterable[Line]) -> dict[str, str]:
    """Return what each model is called: as the user did, with a part of its fingerprint."""
    called: dict[str, str] = {}
    for sample, answer in lines:
        model = str(sample.get("model"))
        called[model] = Path(answer.checkpoint).name if answer.checkpoint else called.get(model, "")
    return {model: cut(f"{name or 'model'} {model[:8]}") for model, name in called.items()}


def engine_key(sample: Mapping[str, Any]) -> EngineKey:
    return tuple(str(sample.get(name)) for name in OF_ENGINE)


def method_names(lines: Iterable[Line], without: Collection[str] = ()) -> dict[EngineKey, str]:
    """Return what tables call each engine: its method, and what tells it from others of the same method and model.

    Knobs in `without` do not tell engines apart: those that differ in them alone have one name.
    """
    groups: dict[tuple[str, str], dict[EngineKey, dict[str, str]]] = {}
    seen: set[EngineKey] = set()
    for sample, answer in lines:
        key = engine_key(sample)
        if key not in seen:
            seen.add(key)
            kind, parts = engine_parts(sample)
            groups.setdefault((key[0], answer.method or kind), {})[key] = parts
    names = {}
    for (_, name), engines in groups.items():
        kept = {key: {knob: x for knob, x in parts.items() if knob not in without} for key, parts in engines.items()}
        knobs = _telling(list(kept.values()))
        for key, parts in kept.items():
            names[key] = cut(" ".join([name, *(f"{knob}={parts[knob]}" for knob in knobs if knob in parts)]))
    return names


def _telling(engines: Sequence[Mapping[str, str]]) -> list[str]:
    """Return few knobs that tell engines apart as well as all of them do; the first ones where there is a choice."""

    def n_told(knobs: Iterable[str]) -> int:
        return len({tuple(engine.get(knob) for knob in knobs) for engine in engines})

    knobs = list(dict.fromkeys(knob for engine in engines for knob in engine))
    for knob in reversed(list(knobs)):
        fewer = [each for each in knobs if each != knob]
        if n_told(fewer) == n_told(knobs):
            knobs = fewer
    return knobs


def engine_parts(sample: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the method's class, and by name its knobs and all else that an engine's repr tells.

    Example: `Engine(Streaming(sinks=4, local=508), window=512, block=512, cpu, torch.float32)`.
    """
    text = str(sample.get("engine"))
    match = re.fullmatch(r"Engine\((\w+)\((.*)\), window=([1-9]\d{0,14}), block=(\d+), (.*)\)", text[:LONGEST_ENGINE])
    if match is None:
        return text, {}
    kind, knobs, window, block, place = match.groups()
    if watched := re.fullmatch(r"inner=(\w+)\((.*)\)", knobs):  # by `lce eval selection`
        kind, knobs = watched.groups()
    parts = dict(part.partition("=")[::2] for part in _split(knobs)) if knobs else {}
    parts = {knob: _value(value) for knob, value in parts.items()}
    parts |= {"window": window, "block": block, "on": place.replace("torch.", "")}
    parts["rope"] = _rope(str(sample.get("rope")))
    parts |= {name: str(sample.get(name, "as loaded")) for name in ("weights", "kv_dtype")}
    return kind, parts


def window_of(line: Line) -> int:
    """Return the window that a sample was asked with; 0 where it is not told."""
    sample, answer = line
    return answer.window or int(engine_parts(sample)[1].get("window", 0))


def _value(text: str) -> str:
    """Return a knob's value without quotes; of what was read from a file, `Maps('name', digest)`, the digest."""
    read = re.fullmatch(r"\w+\('[^']*', (\w+)\)", text)
    return read[1] if read else text.strip("'")


def _rope(text: str) -> str:
    """`linear x4` of a RoPE scaling's repr."""
    kind, factor = re.search(r"kind='(\w+)'", text), re.search(r"\bfactor=(\d+\.?\d*)", text)
    if kind is None or factor is None:
        return text
    return kind[1] if kind[1] == "none" else f"{kind[1]} x{float(factor[1]):g}"


def _split(text: str) -> list[str]:
    """`a=1, b=f(2, 3)` at the commas that no bracket encloses."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]
