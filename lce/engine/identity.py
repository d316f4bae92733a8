"""The identity of an engine: the model, the method and its knobs, the window, the RoPE scaling, the dtypes."""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lce.cache.manifest import REMEDY
from lce.errors import DataError, shown
from lce.files import named
from lce.methods.base import Method
from lce.methods.knobs import settings, spelled
from lce.methods.lowdim import LowDimMaps
from lce.methods.registry import renewed, user_file
from lce.methods.wrapped import BETWEEN, PREFILL, Handover
from lce.models.config import RopeConfig

_MOST_SHOWN = 6  # the most differing knobs that one error message lists


@dataclass(frozen=True, eq=False)
class Identity:
    """The facts that must be equal between an engine and the engine that wrote a context file.

    A context in memory holds the `Identity` object of its engine, and only that engine may use the context.
    `fingerprint` returns the model's fingerprint. The function reads the checkpoint, so it is called on first use.
    """

    fingerprint: Callable[[], str]
    method: Method
    window: int
    rope: RopeConfig
    dtype: torch.dtype
    vocab_size: int
    kv_dtype: str = "auto"  # the format of keys and values in files
    weights: str | None = None  # the quantisation scheme of the weights, if any

    @cached_property
    def model(self) -> str:
        """The fingerprint of the weights, the config and the quantisation scheme, if any."""
        return model_identity(self.fingerprint(), self.weights)

    @property
    def facts(self) -> dict[str, Any]:
        """The identity as JSON values, for the header of a context file."""
        own, method = user_file(self.method), self.method
        knobs = method.settings if isinstance(method, Handover) else settings(method)
        return {
            "model": self.model,
            "method": self.method.label,
            "knobs": {name: _as_json(value) for name, value in knobs.items()},
            **({} if own is None else {"code": {"digest": own.digest, "file": own.path}}),
            "window": self.window,
            "rope": {name: _as_json(value) for name, value in dataclasses.asdict(self.rope).items()},
            "dtype": str(self.dtype).removeprefix("torch."),
            **({} if self.kv_dtype == "auto" else {"kv_dtype": self.kv_dtype}),
            **({} if self.weights is None else {"weights": self.weights}),
        }

    def check(self, path: Path, found: object, remedy: str = REMEDY) -> None:
        """Raise a `DataError` that says what differs if `found`, the identity in the file `path`, is not this one."""
        theirs = {**found, "knobs": _renewed(found)} if isinstance(found, dict) else {}
        for difference, option in _differences(theirs, self.facts):
            raise DataError(f"{named(path)} was made with {difference:.280}: {option:.140}, or {remedy}")


def model_identity(fingerprint: str, weights: str | None) -> str:
    """Return a model's identity: the fingerprint, hashed with the quantisation scheme if the weights are quantised."""
    return fingerprint if weights is None else hashlib.sha256(f"{weights} of {fingerprint}".encode()).hexdigest()


def knobs_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity's knobs for `lce.methods.make`. An object becomes its file's path, if any, or is left out."""
    found = _renewed(facts).items()
    plain = {name: value for name, value in found if not isinstance(value, dict)}
    return plain | {name: file for name, value in found if isinstance(value, dict) and (file := value.get("file"))}


def _renewed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs of an identity in a file, those of both methods of a `Handover`, under their present names."""
    knobs, method = facts.get("knobs"), facts.get("method")
    found = knobs if isinstance(knobs, dict) else {}
    own, _, prefill = method.partition(BETWEEN) if isinstance(method, str) else ("", "", "")
    before = {name.removeprefix(PREFILL): value for name, value in found.items() if name.startswith(PREFILL)}
    decode = {name: value for name, value in found.items() if not name.startswith(PREFILL)}
    return renewed(own, decode) | {f"{PREFILL}{name}": value for name, value in renewed(prefill, before).items()}


def file_of(facts: Mapping[str, Any]) -> str | None:
    """Return the path, for messages, of the user's file that an identity's method is from; None for other methods."""
    code = facts.get("code")
    return named(str(code.get("file"))) if isinstance(code, dict) else None


def _as_json(value: object) -> Any:
    """Return a knob's value as JSON. An object becomes a digest, with the file that it was read from, if any."""
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, LowDimMaps):
        path = Path(value.source)
        return {"digest": value.digest, "file": str(path.absolute()) if path.is_file() else None}
    return {"digest": repr(value), "file": None}


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each difference of two identities and its remedy. Differences that need another model come first."""
    if theirs.get("weights") != ours.get("weights"):
        made, here = (_text(facts.get("weights") or "as they are stored") for facts in (theirs, ours))
        before = "load the folder before `lce quantize`, without --weights"
        remedy = f"give --weights {made}" if theirs.get("weights") else before
        yield f"other weights, {made}; this engine has {here}", remedy
    if theirs.get("model") != ours["model"]:
        yield "another model", "load that one"
    method, name = ours["method"], file_of(theirs) or _text(theirs.get("method"))
    if theirs.get("method") != method:
        yield f"another method, {name}; this engine has {method}", f"give --method {name}"
    elif _content(theirs.get("code")) != _content(ours.get("code")):
        yield f"other code of the method {method}, {name} as it was then", "give --method that code"
    if knobs := list(_differing(theirs.get("knobs"), ours["knobs"])):
        made, here = (" ".join(f"{each[0]}={_text(each[i])}" for each in knobs) for i in (1, 2))
        options = " ".join(f"-o {name}={_text(value)}" for name, value, _ in knobs)
        yield f"another method, {method} {made}; this engine has {here}", f"give {options}"
    if scaling := list(_differing(theirs.get("rope"), ours["rope"])):
        made, here = (" ".join(f"{each[0]}={_text(each[i])}" for each in scaling) for i in (1, 2))
        rope = theirs["rope"] if isinstance(theirs.get("rope"), dict) else {}
        kind, factor = _text(rope.get("kind")), _text(rope.get("factor"))
        option = f"give --rope {kind}" if kind == "none" else f"give --rope {kind} --rope-factor {factor}"
        if {each[0] for each in scaling} - {"kind", "factor"}:  # parameters of the scaling that no option changes
            option = "load the model with the config.json of before"
        yield f"another rope, {made}; this engine has {here}", option
    for key, usual in (("window", None), ("dtype", None), ("kv_dtype", "auto")):
        if theirs.get(key, usual) != ours.get(key, usual):
            value, here = _text(theirs.get(key, usual)), ours.get(key, usual)
            yield f"another {key}, {value}; this engine has {here}", f"give --{key.replace('_', '-')} {value}"


def _differing(theirs: object, ours: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of the first entries that differ. Knobs from files are compared by contents."""
    found = theirs if isinstance(theirs, dict) else {}
    names = [*ours, *sorted(found.keys() - ours.keys())]
    differing = [name for name in names if _content(found.get(name)) != _content(ours.get(name))]
    for name in differing[:_MOST_SHOWN]:
        yield (name if name in ours else _text(name)), found.get(name), ours.get(name)


def _content(value: Any) -> tuple[str, Any]:
    """Return the type's name and the value to compare (an object's digest), so that 1, 1.0 and true differ."""
    compared = value.get("digest") if isinstance(value, dict) else value
    return type(compared).__name__, compared


def _text(value: object) -> str:
    """Return a value of a file's manifest as a user would type it. The text is short and printable for any value."""
    if isinstance(value, dict):
        value = value.get("file") or value.get("digest")
    text = spelled(value) if isinstance(value, str | int | float | None) else ""
    return text if 0 < len(text) <= 96 and text.isprintable() else shown(value, 24)
