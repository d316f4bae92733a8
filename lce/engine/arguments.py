"""Checks of users' arguments. A check returns a value of one type, or raises `UsageError` with a one-line message."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lce.engine.options import Counted, Record, check_names, option
from lce.engine.sampling import Constraint
from lce.engine.sampling_options import Sampling
from lce.errors import UsageError, shown
from lce.progress import Progress, check_progress
from lce.sizes import count
from lce.tokenizer.tokenizer import checked_ids

if TYPE_CHECKING:
    from lce.engine.context import Context

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


SAMPLING = tuple(each.name for each in dataclasses.fields(Sampling))


@dataclass(frozen=True)
class Options(Record):
    """Checked `GenerationOptions`. Only `context` is not checked yet, because its check needs the engine."""

    max_tokens: int = option(256, parse=count)
    context: Context | None = None
    sampling: Sampling = field(default_factory=Sampling)
    constraint: Constraint | None = None
    logprobs: int | None = option(None, parse=Counted(0))
    progress: Progress | bool | None = None


def generation_options(given: Mapping[str, Any]) -> Options:
    """Check the options of a generation. Raises `UsageError` for an unknown option and an unusable value."""
    check_names(given, GenerationOptions.__annotations__, "option")
    check_progress(given.get("progress"))
    if given.get("constraint") is not None and not hasattr(given["constraint"], "apply"):
        raise UsageError(f"constraint is {shown(given['constraint'])}; expected an object with `apply` and `accept`")
    knobs = {name: value for name, value in given.items() if name in SAMPLING}
    others = {name: value for name, value in given.items() if name not in SAMPLING}
    return Options(**others | {"sampling": sampling_of(given.get("sampling"), knobs)})


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
