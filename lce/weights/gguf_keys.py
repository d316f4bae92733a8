"""The metadata of a GGUF file, read by key and checked, and how a file scales RoPE, as config.json has it.

llama3 scaling has no keys. The tensor `rope_freqs.weight` has the number by which each frequency is divided, and the
parameters are those that give these numbers.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lce.errors import ModelError, shown
from lce.files import named
from lce.weights.gguf_file import GgufFile
from lce.weights.safetensors_file import opened, pread

AGAIN, OTHER = "download the file again", "use another file"
DIVISORS = "rope_freqs.weight"
_LARGEST = 2**31 - 1
_KINDS = ("none", "linear", "yarn")
# The windows that llama3 scaling is looked for with. Conversion takes Llama's own, the first, for most models.
_WINDOWS = (8192, *(2**n for n in range(4, 24)))
# What a file recommends, by the names in generation_config.json.
SAMPLING = {name: f"general.sampling.{name}" for name in ("top_k", "top_p", "min_p")}
SAMPLING |= {"temperature": "general.sampling.temp", "repetition_penalty": "general.sampling.penalty_repeat"}
_YARN = {  # keys of the file, and of config.json
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
    "yarn_log_multiplier": "mscale_all_dim",
}


@dataclass(frozen=True)
class Keys:
    """A file's metadata under keys with a prefix. Keys without a default must be there. `seen` has those asked for."""

    file: GgufFile
    prefix: str
    seen: set[str] = field(default_factory=set)

    def get(self, key: str, default: object = None) -> Any:
        """Return the value as it is stored."""
        self.seen.add(key)
        return self.file.metadata.get(self.prefix + key, default)

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key, default)
        if type(value) is not int or not least <= value <= _LARGEST:  # `type`, because a bool is an instance of int
            raise self.refusal(key, f"a whole number from {least} to {_LARGEST}")
        return value

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        """Return a number. A float32 becomes the shortest decimal that rounds to it, as config.json has it."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not least <= value <= 1e30:
            raise self.refusal(key, f"a number from {least:g} to 1e+30")
        return decimal(value)

    def refuse_unread(self, harmless: frozenset[str]) -> None:
        """Raise ModelError for a key that nobody asked for, unless it is `harmless` or its value is 0 or empty."""
        for whole, value in self.file.metadata.items():
            key = whole.removeprefix(self.prefix)
            if key != whole and key not in self.seen | harmless and value:
                raise self.refusal(key, "no such key, because lce does not implement what it says", OTHER)

    def refusal(self, key: str, expected: str, remedy: str = AGAIN) -> ModelError:
        """Return the error that says that the value under `key` is wrong, what was `expected`, and a `remedy`."""
        key = self.prefix + key
        got = f"is {shown(self.file.metadata[key])}" if key in self.file.metadata else "is missing"
        return ModelError(f"{named(self.file.path)}: {key} {got}; expected {expected}; {remedy}")


def decimal(value: float) -> float:
    """Return the shortest decimal that rounds to `value` if `value` is a float32, else `value`."""
    assert math.isfinite(value)
    return float(str(np.float32(value))) if np.float32(value) == value else float(value)


def rope_parameters(keys: Keys, head_dim: int) -> dict[str, Any]:
    """Return the kind of scaling, RoPE's base `rope_theta`, and the numbers of the scaling."""
    theta = keys.number("rope.freq_base", 10000.0, least=2.0)
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    original = keys.integer("rope.scaling.original_context_length", 0, least=0)
    kind = keys.get("rope.scaling.type", "none" if factor in (0, 1) else "linear")
    if kind not in _KINDS:
        raise keys.refusal("rope.scaling.type", f"one of {', '.join(_KINDS)}", OTHER)
    if keys.number("rope.scaling.attn_factor", 1.0) != 1:
        raise keys.refusal("rope.scaling.attn_factor", "1", OTHER)
    own: dict[str, Any] = {} if kind == "none" else {"factor": factor}
    if kind == "yarn":
        if keys.number("rope.scaling.yarn_ext_factor", 1.0, least=-1.0) not in (1, -1):  # -1 means the default, 1
            raise keys.refusal("rope.scaling.yarn_ext_factor", "1", OTHER)
        given = [key for key in _YARN if keys.get(f"rope.scaling.{key}") is not None]
        own |= {_YARN[key]: keys.number(f"rope.scaling.{key}") for key in given}
        own |= {"mscale": 1.0} if "mscale_all_dim" in own else {}
        own |= {"original_max_position_embeddings": original} if original else {}
    if DIVISORS in keys.file.tensors:
        if kind != "none":
            raise keys.refusal("rope.scaling.type", f"none, because the file has {DIVISORS}")
        return {"rope_theta": theta} | _llama3(keys.file, theta, head_dim)
    return {"rope_type": "default" if kind == "none" else kind, "rope_theta": theta, **own}


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the llama3 scaling of the divisors. All models have factors 1 and 4 and a power of two as the window."""
    divisors = _divisors(file, head_dim)
    factor = decimal(float(divisors[-1]))
    turns = theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    for window in _WINDOWS:
        kept = ((window * turns - 1) / 3).clip(0, 1)
        if np.abs(1 / divisors - ((1 - kept) / factor + kept)).max() < 1e-5:
            own = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": window}
            return {"rope_type": "llama3", "factor": factor, **own}
    fault = f"{DIVISORS} is no llama3 scaling of frequencies by {factor:g}; expected one with factors 1 and 4"
    raise ModelError(f"{named(file.path)}: {fault} of a window that is a power of two; {OTHER}")


def _divisors(file: GgufFile, head_dim: int) -> NDArray[np.float64]:
    info, size = file.tensors[DIVISORS], head_dim // 2
    found = np.zeros(0)
    if info.dtype == "F32" and info.shape == (size,):
        with opened({info.file: file.stamps[info.file]}) as files:
            raw = pread(files[info.file], 4 * size, info.start, info.file)
        found = np.frombuffer(raw, "<f4").astype(np.float64)
    if not len(found) or not ((found >= 1) & (found <= 1e6)).all():
        fault = f"{DIVISORS} is {info.dtype} {list(info.shape)}; expected {size} numbers in F32, from 1 to 1e6"
        raise ModelError(f"{named(file.path)}: {fault}; {AGAIN}")
    return found
