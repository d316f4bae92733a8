"""Checks of the values that the hooks of users' methods return, made at each call.

When a subclass of `Method` is made, each hook that it defines is wrapped in a check. lce's own methods are tested
instead: checks begin when all of these are imported. A check compares shapes, dtypes and devices. Values are looked at
only on the CPU, because on a GPU a check would have to wait for the device.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from lce.cache.layout import AccessPattern
from lce.cache.method_state import MethodState
from lce.errors import UsageError, shown
from lce.methods.costs import Cost

# A check takes the method, the value that a hook returned, and the hook's arguments. It returns None for a valid value,
# or else a text that says what was expected.
Check = Callable[..., str | None]
begun = False  # whether hooks of classes made from now on are checked: once the methods of lce are imported


def guard(cls: type) -> None:
    """Wrap the hooks that `cls` itself defines, functions and properties, in their checks."""
    checks = SELECTION_CHECKS if hasattr(cls, "summarise") else METHOD_CHECKS
    for name, check in checks.items():
        hook = vars(cls).get(name)
        if isinstance(hook, FunctionType) and not getattr(hook, "__isabstractmethod__", False):
            setattr(cls, name, _checked(hook, check))
        elif isinstance(hook, property) and isinstance(hook.fget, FunctionType):
            setattr(cls, name, property(_checked(hook.fget, check)))
        elif isinstance(hook, functools.cached_property):
            hook.func = _checked(hook.func, check)


def _checked(hook: Callable[..., Any], check: Check) -> Callable[..., Any]:
    @functools.wraps(hook)
    def checked(method: Any, *args: Any, **kwargs: Any) -> Any:
        got = hook(method, *args, **kwargs)
        if (expected := check(method, got, *args, **kwargs)) is not None:
            raise UsageError(f"{method.label}.{hook.__name__} returned {described(got)}; expected {expected}")
        return got

    return checked


def described(value: Any) -> str:
    """Describe a returned value in a few words: `[4, 8, 16] float32`, `None`, `ndarray [4, 8, 16] float32`."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None:
        is_plain = value is None or isinstance(value, (bool, int, float, str, AccessPattern))
        return shown(value) if is_plain else f"a {type(value).__name__}"
    kind = "" if isinstance(value, Tensor) else f"{type(value).__name__} "
    return f"{kind}{list(shape)} {str(dtype).removeprefix('torch.')}"


def tensor_check(
    got: Any, shape: Sequence[int | str], like: Tensor, dtype: torch.dtype | None = None, words: str = ""
) -> str | None:
    """Return None if `got` is a tensor of this shape and dtype on the device of `like`, or else what is expected.

    A word in `shape` stands for any size of 1 or more. The last word may be `...`, for any number of dimensions.
    """
    kind = "" if dtype is None else f" {str(dtype).removeprefix('torch.')}"
    if not isinstance(got, Tensor) or not _fits(got.shape, shape) or dtype not in (None, got.dtype):
        return f"[{', '.join(map(str, shape))}]{kind}{words}"
    return None if got.device == like.device else f"it on {like.device}, not on {got.device}"


def _fits(got: Sequence[int], shape: Sequence[int | str]) -> bool:
    if shape[-1] == "...":
        shape = [*shape[:-1], *got[len(shape) - 1 :]]
    pairs = zip(got, shape, strict=False)
    return len(got) == len(shape) and all(n == most if isinstance(most, int) else n > 0 for n, most in pairs)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class Must:
    """A check that calls `fits(result, *arguments)`; `{0}` in `expected` is the hook's first argument."""

    fits: Callable[..., bool]
    expected: str

    def __call__(self, method: Any, got: Any, *given: Any, **_: Any) -> str | None:
        return None if self.fits(got, *given) else self.expected.format(*given)


def _keep(method: Any, got: Any, k: Tensor, v: Tensor, cache: Any, step: Any) -> str | None:
    if got is None and cache.stop != step.stop:
        raise UsageError(
            f"{method.label}.keep cached {max(0, cache.stop - step.start)} of the block's {step.stop - step.start} "
            "tokens; expected all of them: call super().keep(k, v, cache, step)"
        )
    return None if got is None else "None: it puts the block into the cache"


def _key_positions(method: Any, got: Any, indices: Tensor) -> str | None:
    if got is None:
        return None
    if isinstance(got, Tensor) and got.shape == indices.shape and (got.dtype == torch.bool or got.is_complex()):
        return f"{list(indices.shape)} whole or real numbers, or None"
    return tensor_check(got, indices.shape, indices, words=" numbers, or None")


def _is_state(got: Any, *_: Any) -> bool:
    return isinstance(got, Mapping) and all(isinstance(k, str) and isinstance(v, MethodState) for k, v in got.items())


_is_method = Must(lambda got, *_: hasattr(got, "attend"), "a method: self, or dataclasses.replace(self, ...)")
METHOD_CHECKS: Mapping[str, Check] = {
    "attend": lambda method, got, q, *_: tensor_check(got, q.shape, q, q.dtype),
    "bound": Must(lambda got, n: got is None or _is_count(got, n), "None, or a whole number of tokens, {0} or more"),
    "keep": _keep,
    "key_positions": _key_positions,
    "state": Must(_is_state, "names, and for each an instance of MethodState, such as Summaries or TokenRows"),
    "access": Must(
        lambda got: (
            isinstance(got, AccessPattern) and all(map(_is_count, (got.chunk_size, got.sinks, got.local), (1, 0, 0)))
        ),
        "an AccessPattern of whole numbers: a chunk_size of 1 or more, sinks and local of 0 or more",
    ),
    "block": Must(lambda got: _is_count(got, 1), "a whole number of tokens, 1 or more"),
    "choices": Must(
        lambda got: isinstance(got, tuple) and len(got) == 2 and all(map(_is_count, got, (0, 1))),
        "the first token of choice 0 and the tokens of a choice, two whole numbers",
    ),
    "choice_cost": Must(lambda got, _: isinstance(got, Cost), "a Cost, as block.tokens(n) gives one"),
    "for_model": _is_method,
    "resolve": _is_method,
}


def _summarise(method: Any, got: Any, q: Tensor, k: Tensor, v: Tensor, step: Any) -> str | None:
    if not method.selection.selector.has_vectors:
        return tensor_check(got, ("S", k.shape[1], "..."), q)
    words = " for score as it stands" if not isinstance(got, Tensor) or got.dtype == q.dtype else ""
    return tensor_check(got, (len(q), k.shape[1], k.shape[3]), q, q.dtype, words)


def _score(method: Any, got: Any, q: Tensor, summary: Tensor, step: Any, layer: int) -> str | None:
    expected = tensor_check(got, ("C", q.shape[1], summary.shape[1]), q)
    if expected is None and (len(q) % len(got) or got.is_complex()):
        expected = f"[C, {q.shape[1]}, {summary.shape[1]}] real numbers, where C divides {len(q)}"
    return expected


def _forced(method: Any, got: Any, chunk_ids: Tensor, own: Tensor) -> str | None:
    shape = len(own), len(chunk_ids)
    is_mask = isinstance(got, Tensor) and got.ndim <= 2 and got.dtype == torch.bool and got.device == own.device
    fits = is_mask and all(n in (1, most) for n, most in zip(got.shape[::-1], shape[::-1], strict=False))
    return None if fits else f"{list(shape)} bool on {own.device}"


def _select(method: Any, got: Any, scores: Tensor, step: Any) -> str | None:
    expected = _chosen_check(method, got, len(scores), scores)
    if expected is None and got.device.type == "cpu" and got.numel():  # reading a GPU's numbers would wait
        own = (step.positions(got.device) // method.selection.size)[:, None]
        before, after = got[..., :-1], got[..., 1:]
        rising = ((after > before) & (before >= 0)) | (after == -1)
        if not rising.all() or not ((got >= -1) & (got < own)).all():
            raise UsageError(
                f"{method.label}.select returned chunks out of order, twice, or not before the query's own; expected "
                "ascending ones, -1 behind the last"
            )
    return expected


def _choose(method: Any, got: Any, q: Tensor, cache: Any, step: Any) -> str | None:
    # for a `DeviceStep`, heads that share a choice may share one row
    return None if got is None else _chosen_check(method, got, len(q) if step.at is None else len(got), q)


def _chosen_check(method: Any, got: Any, n_heads: int, like: Tensor) -> str | None:
    n_choices = method.selection.n_choices
    words = f" with K {n_choices} or fewer"
    expected = tensor_check(got, (n_heads, like.shape[1], "K"), like, torch.int64, words)
    if expected is None and got.shape[-1] > n_choices:
        expected = f"[{n_heads}, {like.shape[1]}, K] int64{words}"
    return expected


SELECTION_CHECKS: Mapping[str, Check] = {
    **METHOD_CHECKS,
    "summarise": _summarise,
    "score": _score,
    "log_mass": lambda method, got, scores, *_: tensor_check(got, scores.shape, scores),
    "forced": _forced,
    "select": _select,
    "choose": _choose,
}
