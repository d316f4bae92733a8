"""Checks of users' arguments. A check returns a value of one type, or raises `UsageError` with a one-line message."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.layout import Budgets
from lce.engine.sampling import Constraint, Sampling
from lce.errors import UsageError, nearest, shown
from lce.files import path_of
from lce.models.config import ROPE_KINDS, LongRope, RopeConfig
from lce.progress import Progress, check_progress
from lce.sizes import count, in_bytes
from lce.tokenizer.tokenizer import checked_ids

if TYPE_CHECKING:
    from lce.engine.context import Context

MOST_FACTOR = 1_000_000  # the largest `rope_factor`
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TokenIds = Sequence[int] | NDArray[np.integer[Any]] | Tensor
Prompt = str | TokenIds
Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | Sequence[NDArray[np.integer[Any]]] | Sequence[Tensor]


class GenerationOptions(TypedDict, total=False):
    """The options of `Engine.generate`, `stream` and `astream`."""

    max_tokens: int | str  # the most tokens to generate: 256 by default; "1k" is 1024
    context: Context | None  # the context to continue; None: a new context
    # None is greedy. The options `temperature` to `frequency_penalty` override fields of `sampling`.
    sampling: Sampling | Mapping[str, Any] | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop: str | Sequence[str] | Callable[[str], object] | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    constraint: Constraint | None  # what the text must match; an object for one answer alone
    logprobs: int | None  # record log-probabilities: each token's own, and those of this many likeliest tokens
    progress: Progress | bool | None  # prefill's progress: True for a bar, or a callback (tokens done, total)


SAMPLING = tuple(field.name for field in dataclasses.fields(Sampling))


@dataclass(frozen=True)
class Options:
    """Checked `GenerationOptions`. Only `context` is not checked yet, because its check needs the engine."""

    max_tokens: int = 256
    context: Context | None = None
    sampling: Sampling = field(default_factory=Sampling)
    constraint: Constraint | None = None
    logprobs: int | None = None
    progress: Progress | bool | None = None


def generation_options(given: Mapping[str, Any]) -> Options:
    """Check the options of a generation. Raises `UsageError` for an unknown option and an unusable value."""
    check_names(given, GenerationOptions.__annotations__, "option")
    check_progress(given.get("progress"))
    checked = {name: value for name, value in given.items() if name not in SAMPLING}
    if "max_tokens" in given:
        checked["max_tokens"] = count(given["max_tokens"], "max_tokens")
    if given.get("logprobs") is not None:
        checked["logprobs"] = count(given["logprobs"], "logprobs", least=0)
    if given.get("constraint") is not None and not hasattr(given["constraint"], "apply"):
        raise UsageError(f"constraint is {shown(given['constraint'])}; expected an object with `apply` and `accept`")
    knobs = {knob: given[knob] for knob in SAMPLING if knob in given}
    return Options(**checked | {"sampling": sampling_of(given.get("sampling"), knobs)})


def check_names(given: Mapping[str, Any], valid: Iterable[str], what: str) -> None:
    """Raise `UsageError` if a key of `given` is not in `valid`. `what` tells in the message what a key is."""
    unknown = next((name for name in given if name not in valid), None)
    if unknown is not None:
        raise UsageError(f"unknown {what} {shown(unknown)}; {nearest(str(unknown), valid)}")


def sampling_of(sampling: object, knobs: Mapping[str, Any]) -> Sampling:
    """Return a `Sampling` from a user's `sampling` (a `Sampling`, a mapping, or None: greedy), changed by `knobs`."""
    if isinstance(sampling, Mapping):
        check_names(sampling, SAMPLING, "knob of sampling")
        sampling = Sampling(**sampling)
    if sampling is not None and not isinstance(sampling, Sampling):
        raise UsageError(f"sampling is {shown(sampling)}; expected lce.Sampling(...), or its knobs as keywords")
    return dataclasses.replace(sampling or Sampling(), **knobs)


def are_many(prompt: object) -> bool:
    """Return whether `prompt` is a list of prompts: texts, or lists of token ids."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return isinstance(prompt[0], str | list | tuple | range) or getattr(prompt[0], "ndim", 0) == 1


def ids_of(prompt: object, vocab_size: int) -> list[int]:
    """Convert a sequence, an array or a tensor of token ids to a list. Refuses ids that are not in the vocabulary."""
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise UsageError("the prompt is bytes; expected text or token ids: decode it, as prompt.decode() does")
    if isinstance(prompt, Tensor | np.ndarray):
        if prompt.ndim != 1 or "int" not in str(prompt.dtype):
            kind = f"{prompt.dtype} of shape {list(prompt.shape)}"
            raise UsageError(f"the prompt is {kind}; expected text, or token ids: whole numbers of one dimension")
        try:
            return checked_ids(prompt.tolist(), vocab_size)
        except (RuntimeError, NotImplementedError):  # a meta tensor or a sparse tensor
            raise UsageError("the prompt is a tensor that has no list of numbers; expected a dense one") from None
    if isinstance(prompt, Mapping | Set) or not isinstance(prompt, Iterable):
        raise UsageError(f"the prompt is a {type(prompt).__name__}; expected text or token ids")
    ids: list[Any] = list(prompt)
    if any(isinstance(token_id, bool | np.bool_) for token_id in ids):
        raise UsageError("the prompt has truth values; expected text or token ids")
    return checked_ids(ids, vocab_size)


def sized(value: object, what: str, least: int) -> int | None:
    """Return a user's number of tokens as an int, or None for None. Raises `UsageError` below `least`."""
    return None if value is None else count(value, what, least)


def budgets_of(device: int | str | None, host: int | str | None, spill_dir: str | Path | None) -> Budgets:
    """Return the cache's memory budgets from a user's sizes. Raises `UsageError` for text that is no size."""
    return Budgets(
        None if device is None else in_bytes(device, "kv_device_budget"),
        None if host is None else in_bytes(host, "kv_host_budget"),
        None if spill_dir is None else path_of(spill_dir, "spill_dir"),
    )


def dtype_of(name: object, own: Callable[[], torch.dtype]) -> torch.dtype:
    """Return the dtype that a user names. For "auto" or None, return `own()`, the checkpoint's dtype."""
    if name is None or (isinstance(name, str) and name == "auto"):
        return own()
    if isinstance(name, torch.dtype) and name in DTYPES.values():
        return name
    if not isinstance(name, str) or name not in DTYPES:
        raise UsageError(f"unknown dtype {shown(name)}; {nearest(str(name), ['auto', *DTYPES])}")
    return DTYPES[name]


def scaled(rope: RopeConfig, kind: str | None, factor: object) -> RopeConfig:
    """Return the checkpoint's RoPE config, with the scaling changed by the user's `kind` and `factor`."""
    if kind is not None and str(kind) not in ROPE_KINDS:
        raise UsageError(f"unknown rope {shown(kind)}; {nearest(str(kind), ROPE_KINDS)}")
    if factor is not None:
        if isinstance(factor, bool) or not isinstance(factor, Real) or not 1 <= float(factor) <= MOST_FACTOR:
            raise UsageError(f"rope_factor is {shown(factor)}; expected 1 or more, and {MOST_FACTOR:,} or less")
        factor = float(factor)
    if factor is not None and (kind or rope.kind) == "none":
        raise UsageError(f"rope_factor={factor:g} has no scaling to belong to; add rope=, for example rope='linear'")
    if isinstance(rope, LongRope) and (kind, factor) != (None, None):
        raise UsageError("the model's RoPE has divisors of its own, LongRoPE; leave rope and rope_factor out")
    if kind not in (None, "none", rope.kind) and factor is None:
        raise UsageError(f"rope={kind!r} needs a rope_factor, for example 4")
    return dataclasses.replace(rope, kind=kind or rope.kind, factor=factor if factor is not None else rope.factor)
