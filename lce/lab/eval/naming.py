"""How records describe an engine, and how tables name model, method and task."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lce

if TYPE_CHECKING:
    from lce import Engine
    from lce.lab.eval.record import Line

MOST = 160  # characters of a name
PLAIN = str.maketrans({"|": "/", "`": "'", "<": "‹", ">": "›", "$": "?"})  # Markdown and HTML signs
OF_SAMPLE = "task task_knobs filler length samples seed depths questions mode index number".split()
KNOB = r"(\w+)=((?:\([^)]*\)|\[[^\]]*\]|[^,(\[])*)"  # as a repr has it; its value may have commas within brackets
OF_ENGINE = "model engine rope weights kv_dtype".split()

Measured = tuple[Mapping[str, Any], "Line"]  # a sample, and what was measured
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
    """Return further facts that a record keeps about an engine: all fields of `Line` but `checkpoint`."""
    method = engine.method
    about = {"method": method.label, "knobs": knob_values(method)}
    return {**about, "window": engine.window, "version": lce.__version__}


def knob_values(method: Any) -> dict[str, Any]:
    """Return a method's or a task's knobs as JSON values."""
    values = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    plain = (str, int, float, type(None))  # a bool is an int
    return {name: value if isinstance(value, plain) else repr(value) for name, value in values.items()}


def cut(text: str) -> str:
    """Return a name for tables and pictures: short, on one line, without Markdown's signs."""
    plain = "".join(c if c.isprintable() else "?" for c in text).translate(PLAIN).replace("](", "] (")
    return plain if len(plain) <= MOST else f"{plain[: MOST - 3]}..."


def way_of(sample: Mapping[str, Any]) -> str:
    """Return the fields of a sample that differ from the usual as a short text: knobs, filler, mode and any others."""
    parts = [f"{knob}={value}" for knob, value in sample.get("task_knobs", {}).items()]
    if (filler := sample.get("filler")) not in ("prose", "none", None):
        parts.append(str(filler))
    if mode := sample.get("mode"):
        parts.append(f"mode {mode}")
    if "number" in sample:  # only samples that a method missed: not comparable
        parts.append("asked again by lce eval why")
    parts += [f"{name}={sample[name]}" for name in sorted(sample.keys() - {*OF_SAMPLE, *OF_ENGINE})]
    return cut(", ".join(parts))


def model_names(measured: Iterable[Measured]) -> dict[str, str]:
    """Return a name for each model: the user's name and a part of the fingerprint."""
    called: dict[str, str] = {}
    for sample, line in measured:
        model = str(sample.get("model"))
        called[model] = Path(line.checkpoint).name if line.checkpoint else called.get(model, "")
    return {model: cut(f"{name or 'model'} {model[:8]}") for model, name in called.items()}


def engine_key(sample: Mapping[str, Any]) -> EngineKey:
    return tuple(str(sample.get(name)) for name in OF_ENGINE)


def method_names(measured: Iterable[Measured], without: Collection[str] = ()) -> dict[EngineKey, str]:
    """Return a name for each engine: its method, and the knobs that differ among engines of this method and model.

    Engines that differ only in knobs of `without` share a name.
    """
    engines: dict[EngineKey, Measured] = {}
    for sample, line in measured:
        engines.setdefault(engine_key(sample), (sample, line))
    groups: dict[tuple[str, str], dict[EngineKey, dict[str, str]]] = {}
    for key, (sample, line) in engines.items():
        kind, parts = engine_parts(sample)
        kept = {knob: value for knob, value in parts.items() if knob not in without}
        groups.setdefault((key[0], line.method or kind), {})[key] = kept
    names = {}
    for (_, name), alike in groups.items():
        knobs = _telling(list(alike.values()))
        for key, parts in alike.items():
            names[key] = cut(" ".join([name, *(f"{knob}={parts[knob]}" for knob in knobs if knob in parts)]))
    return names


def _telling(engines: Sequence[Mapping[str, str]]) -> list[str]:
    """Return few knobs that distinguish `engines` as well as all knobs do; earlier knobs are preferred."""

    def n_told(knobs: Iterable[str]) -> int:
        return len({tuple(engine.get(knob) for knob in knobs) for engine in engines})

    knobs = list(dict.fromkeys(knob for engine in engines for knob in engine))
    for knob in reversed(list(knobs)):
        fewer = [each for each in knobs if each != knob]
        if n_told(fewer) == n_told(knobs):
            knobs = fewer
    return knobs


def engine_parts(sample: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the method's class, and the knobs and other fields of an engine's repr by name.

    Example: `Engine(Streaming(sinks=4, local=508), window=512, block=512, cpu, torch.float32)`.
    """
    text = str(sample.get("engine"))
    match = re.fullmatch(r"Engine\((\w+)\((.*)\), window=(\d+), block=(\d+), (.*)\)", text)
    if match is None:
        return text, {}
    kind, knobs, window, block, place = match.groups()
    if watched := re.fullmatch(r"inner=(\w+)\((.*)\)", knobs):  # by `lce eval selection`
        kind, knobs = watched.groups()
    parts = dict(re.findall(KNOB, knobs))
    for knob, value in parts.items():
        read = re.fullmatch(r"\w+\('[^']*', (\w+)\)", value)  # from a file: `Maps('name', digest)`
        parts[knob] = read[1] if read else value.strip("'")
    parts |= {"window": window, "block": block, "on": place.replace("torch.", ""), "rope": _rope(str(sample["rope"]))}
    parts |= {name: str(sample.get(name, "as loaded")) for name in ("weights", "kv_dtype")}
    return kind, parts


def _rope(text: str) -> str:
    """Return a RoPE scaling's repr in short, such as `linear x4`."""
    kind, factor = re.search(r"kind='(\w+)'", text), re.search(r"\bfactor=(\d+\.?\d*)", text)
    if kind is None or factor is None:
        return text
    return kind[1] if kind[1] == "none" else f"{kind[1]} x{float(factor[1]):g}"
