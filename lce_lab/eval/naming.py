"""Describes engines in records, and names models, methods and tasks in tables."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lce
import lce_lab.analysis.oracle  # noqa: F401  # so that its selectors are among the kinds
from lce.methods import Placement, Selector, knob_values
from lce_lab.eval.record import Line

MOST = 160  # the largest number of characters of a name
AGAIN = "asked again by lce eval why"  # such samples are those that a method missed, so scores are not comparable
PLAIN = str.maketrans({"|": "/", "`": "'", "<": "‹", ">": "›", "$": "?"})  # replaces Markdown and HTML signs
OF_SAMPLE = "task task_knobs filler length samples seed depths questions mode index again".split()
KNOB = r"(\w+)=((?:\([^)]*\)|\[[^\]]*\]|[^,(\[])*)"  # a knob in a repr; commas in brackets belong to the value
FACTOR = r"\bfactor=(\d+\.?\d*)"  # in the repr of a RoPE scaling
OF_ENGINE = "model engine rope weights kv_dtype code".split()

Measured = tuple[Mapping[str, Any], Line]  # a sample, and its measurement
EngineKey = tuple[str, ...]  # a sample's values of the fields in OF_ENGINE


def described(engine: lce.Engine) -> dict[str, str]:
    """Return the fields of a record that identify an engine: model, method with knobs, RoPE scaling, and dtypes."""
    setup, kv_dtype = engine.setup, engine.setup.layout.kv_dtype
    found = {"model": setup.fingerprint, "engine": repr(engine), "rope": repr(setup.rope), "weights": setup.weights}
    found["kv_dtype"] = None if kv_dtype == "auto" else kv_dtype
    found["code"] = (setup.identity.facts.get("code") or {}).get("digest")
    return {name: value for name, value in found.items() if value is not None}


def told(engine: lce.Engine) -> dict[str, Any]:
    """Return the fields of `lce_lab.eval.record.Line` that an engine determines: all except `checkpoint`."""
    about = {"method": engine.method.label, "knobs": knob_values(engine.method)}
    return {**about, "window": engine.window, "version": lce.__version__}


def cut(text: str) -> str:
    """Return a name for tables and pictures: one line of at most `MOST` characters, without signs of Markdown."""
    plain = "".join(c if c.isprintable() else "?" for c in text).translate(PLAIN).replace("](", "] (")
    return plain if len(plain) <= MOST else f"{plain[: MOST - 3]}..."


def range_text(numbers: Sequence[int]) -> str:
    """Return the least and the largest of some numbers as text, such as `2 to 1,024`; one number if they are equal."""
    least, most = min(numbers), max(numbers)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def way_of(sample: Mapping[str, Any]) -> str:
    """Return as text the options of a sample that differ from the defaults: task knobs, filler, mode and others."""
    parts = [f"{knob}={value}" for knob, value in sample.get("task_knobs", {}).items()]
    if (filler := sample.get("filler")) not in ("prose", "none", None):
        parts.append(str(filler))
    if mode := sample.get("mode"):
        parts.append(f"mode {mode}")
    if "again" in sample:
        parts.append(AGAIN)
    parts += [f"{name}={sample[name]}" for name in sorted(sample.keys() - {*OF_SAMPLE, *OF_ENGINE})]
    return cut(", ".join(parts))


def model_names(measured: Iterable[Measured]) -> dict[str, str]:
    """Return model names by fingerprint. A name has the checkpoint's name and the beginning of the fingerprint."""
    called: dict[str, str] = {}
    for sample, line in measured:
        model, name = str(sample.get("model")), Path(line.checkpoint or "").name
        called[model] = max(name, called.get(model, ""))  # the same name, whichever line comes first
    return {model: cut(f"{name or 'model'} {model[:8]}") for model, name in called.items()}


def engine_key(sample: Mapping[str, Any]) -> EngineKey:
    return tuple(str(sample.get(name)) for name in OF_ENGINE)


def method_names(measured: Iterable[Measured], without: Collection[str] = ()) -> dict[EngineKey, str]:
    """Return engines' names: the method, and the knobs that differ among engines of the same method and model.

    The knobs in `without` are left out. A window is named if it is not the model's largest.
    """
    engines: dict[EngineKey, Measured] = {}
    largest: dict[str, int] = {}
    for sample, line in measured:
        key = engine_key(sample)
        engines.setdefault(key, (sample, line))
        largest[key[0]] = max(largest.get(key[0], 0), line.window or 0)
    groups: dict[tuple[str, str], dict[EngineKey, dict[str, str]]] = {}
    for key, (sample, line) in sorted(engines.items(), key=lambda item: item[0]):
        kind, parts = engine_parts(sample)
        left_out = {*without, *(["window"] if line.window == largest[key[0]] else [])}
        kept = {knob: value for knob, value in parts.items() if knob not in left_out}
        groups.setdefault((key[0], line.method or kind), {})[key] = kept
    names = {}
    for (_, name), alike in groups.items():
        knobs = _telling(list(alike.values()))
        for key, parts in alike.items():
            names[key] = cut(" ".join([name, *(f"{knob}={parts[knob]}" for knob in knobs if knob in parts)]))
    return names


def _telling(engines: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a short list of knobs that tells `engines` apart as well as all knobs do; the window comes first."""

    def n_told(knobs: Iterable[str]) -> int:
        return len({tuple(engine.get(knob) for knob in knobs) for engine in engines})

    knobs = sorted(dict.fromkeys(knob for engine in engines for knob in engine), key=lambda knob: knob != "window")
    for knob in reversed(list(knobs)):
        fewer = [each for each in knobs if each != knob]
        if n_told(fewer) == n_told(knobs):
            knobs = fewer
    return knobs


def engine_parts(sample: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the name of the method's class, and the engine's knobs and fields by name, from the repr in a sample.

    Example of such a repr: `Engine(Streaming(sinks=4, local=508), window=512, block=512, cpu, torch.float32)`.
    """
    text = str(sample.get("engine"))
    match = re.fullmatch(r"Engine\((\w+)\((.*)\), window=(\d{1,15}), block=(\d{1,15}), (.*)\)", text)
    if match is None:
        return text, {}
    kind, knobs, window, block, place = match.groups()
    if watched := re.fullmatch(r"inner=(\w+)\((.*)\)", knobs):  # `lce eval selection` wraps methods in `Observed`
        kind, knobs = watched.groups()
    parts = _flat(knobs)
    for knob, value in parts.items():
        read = re.fullmatch(r"\w+\('[^']*', (\w+)\)", value)  # LowDimMaps('FILE', DIGEST): keep the digest
        parts[knob] = read[1] if read else value.strip("'")
    parts |= {"window": window, "block": block, "on": place.replace("torch.", "")} | _rope(str(sample.get("rope")))
    parts |= {name: str(sample.get(name, "as loaded")) for name in ("weights", "kv_dtype", "code")}
    return kind, parts


def _flat(knobs: str) -> dict[str, str]:
    """Return the knobs in a repr by name, those of values with dots: `budget=Budget(tokens=9, sinks=4)` are two."""
    found = {}
    for knob, value in re.findall(KNOB, knobs):
        found[knob] = value
        if nested := re.fullmatch(r"(\w+)\((\w+=.*)?\)", value):
            own = _flat(nested[2] or "")
            kinds = {kind.__name__: name for base in (Selector, Placement) for name, kind in base.kinds.items()}
            found[knob] = kinds[nested[1]] if nested[1] in kinds else own.pop(next(iter(own)), value)
            found |= {f"{knob}.{key}": each for key, each in own.items()}
    return found


def _rope(text: str) -> dict[str, str]:
    """Return the kind and the factor in the repr of a RoPE scaling, an empty mapping without scaling."""
    kind, factor = re.search(r"kind='(\w+)'", text), re.search(FACTOR, text)
    if kind is None:
        return {"rope": text}
    if kind[1] == "none":
        return {}
    return {"rope": kind[1]} | ({"rope_factor": f"{float(factor[1]):g}"} if factor else {})


def fitted(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample without the factor of its RoPE scaling, if that is the sample's length over the window."""
    factor, window = re.search(FACTOR, rope := str(sample.get("rope"))), engine_parts(sample)[1].get("window")
    if factor is None or window is None or round(float(factor[1]) * int(window)) != sample.get("length"):
        return sample
    return {**sample, "rope": rope.replace(factor[0], "factor='auto'")}
