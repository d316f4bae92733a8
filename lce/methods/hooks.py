"""Checks of what a method's hooks return, made at each call.

For a subclass of `Method` outside of lce, each hook that the class defines is wrapped once, when the class is made. The
methods of lce are tested instead. A check compares shapes, dtypes and devices, and looks at values only on the CPU, so
that nothing waits for a device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from lce.cache.layout import AccessPattern
from lce.cache.method_state import MethodState
from lce.errors import UsageError, shown
from lce.methods.costs import Cost

Check = Callable[..., None]  # arguments: the method, the hook's name, the returned value, and the hook's arguments


def guard(cls: type, checks: Mapping[str, Check]) -> None:
    """Wrap the hooks that `cls` itself defines, functions and properties, in their checks."""
    for name, check in checks.items():
        hook = vars(cls).get(name)
        if isinstance(hook, FunctionType) and not getattr(hook, "__isabstractmethod__", False):
            setattr(cls, name, _checked(hook, check))
        elif isinstance(hook, property) and isinstance(hook.fget, FunctionType):
            setattr(cls, name, property(_checked(hook.fget, check)))
        elif isinstance(hook, functools.cached_property):
            hook.func = _checked(hook.func, check)


def _checked(hook: Callable[..., Any], check: Check) -> Callable[..., Any]:
    name: str = hook.__name__

    @functools.wraps(hook)
    def checked(method: Any, *args: Any, **kwargs: Any) -> Any:
        got = hook(method, *args, **kwargs)
        check(method, name, got, *args, **kwargs)
        return got

    return checked


def refuse(method: Any, hook: str, got: Any, expected: str) -> UsageError:
    """Return the error for a wrong value returned by a hook."""
    return UsageError(f"{method.label}.{hook} returned {described(got)}; expected {expected}")


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


def expect_tensor(
    method: Any, hook: str, got: Any, shape: Sequence[int | str], like: Tensor, dtype: torch.dtype | None = None,
    words: str = "",
) -> None:  # fmt: skip
    """Raise unless `got` is a tensor of this shape on the device of `like`, of `dtype` if one is given.

    A word in `shape` stands for any size of 1 or more; the last one may stand for several dimensions: `...`.
    """
    kind = "" if dtype is None else f" {str(dtype).removeprefix('torch.')}"
    if not isinstance(got, Tensor) or not _fits(got.shape, shape) or dtype not in (None, got.dtype):
        raise refuse(method, hook, got, f"[{', '.join(map(str, shape))}]{kind}{words}")
    if got.device != like.device:
        raise refuse(method, hook, got, f"it on {like.device}, not on {got.device}")


def _fits(got: Sequence[int], shape: Sequence[int | str]) -> bool:
    if shape[-1] == "...":
        shape = [*shape[:-1], *got[len(shape) - 1 :]]
    pairs = zip(got, shape, strict=False)
    return len(got) == len(shape) and all(n == most if isinstance(most, int) else n > 0 for n, most in pairs)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _must(fits: Callable[..., bool], expected: str) -> Check:
    """Return a check that a hook's result `fits`; `{0}` in `expected` is the hook's first argument."""

    def check(method: Any, hook: str, got: Any, *given: Any, **named: Any) -> None:
        if not fits(got, *given):
            raise refuse(method, hook, got, expected.format(*given))

    return check


def _alike(method: Any, hook: str, got: Any, like: Tensor, *_: Any) -> None:
    expect_tensor(method, hook, got, like.shape, like, like.dtype)


def _keep(method: Any, hook: str, got: Any, k: Tensor, v: Tensor, cache: Any, step: Any) -> None:
    if got is not None:
        raise refuse(method, hook, got, "None: it puts the block into the cache")
    if cache.stop != step.stop:
        raise UsageError(
            f"{method.label}.{hook} cached {max(0, cache.stop - step.start)} of the block's {step.stop - step.start} "
            "tokens; expected all of them: call super().keep(k, v, cache, step)"
        )


def _key_positions(method: Any, hook: str, got: Any, indices: Tensor) -> None:
    if got is not None:
        expect_tensor(method, hook, got, indices.shape, indices, words=" numbers, or None")
        if got.dtype == torch.bool or got.is_complex():
            raise refuse(method, hook, got, f"{list(indices.shape)} whole or real numbers, or None")


def _is_state(got: Any, *_: Any) -> bool:
    return isinstance(got, Mapping) and all(isinstance(k, str) and isinstance(v, MethodState) for k, v in got.items())


def _is_access(got: Any) -> bool:
    return isinstance(got, AccessPattern) and all(map(_is_count, (got.chunk_size, got.sinks, got.local), (1, 0, 0)))


def _is_choices(got: Any) -> bool:
    return isinstance(got, tuple) and len(got) == 2 and _is_count(got[0], 0) and _is_count(got[1], 1)


_is_method = _must(lambda got, *_: hasattr(got, "attend"), "a method: self, or dataclasses.replace(self, ...)")
METHOD_CHECKS: Mapping[str, Check] = {
    "attend": _alike,
    "decode": _alike,
    "bound": _must(lambda got, n: got is None or _is_count(got, n), "None, or a whole number of tokens, {0} or more"),
    "keep": _keep,
    "key_positions": _key_positions,
    "state": _must(_is_state, "names, and for each an instance of MethodState, such as Summaries or TokenRows"),
    "access": _must(
        _is_access, "an AccessPattern of whole numbers: a chunk_size of 1 or more, sinks and local of 0 or more"
    ),
    "block": _must(lambda got: _is_count(got, 1), "a whole number of tokens, 1 or more"),
    "choices": _must(_is_choices, "the first token of choice 0 and the tokens of a choice, two whole numbers"),
    "choice_cost": _must(lambda got, _: isinstance(got, Cost), "a Cost, as block.tokens(n) gives one"),
    "for_model": _is_method,
    "resolve": _is_method,
}


# The hooks of methods that select chunks


def _summarise(method: Any, hook: str, got: Any, q: Tensor, k: Tensor, v: Tensor, step: Any) -> None:
    if method.keeps_vectors:
        words = " for score as it stands" if not isinstance(got, Tensor) or got.dtype == q.dtype else ""
        expect_tensor(method, hook, got, (len(q), k.shape[1], k.shape[3]), q, q.dtype, words)
    else:
        expect_tensor(method, hook, got, ("S", k.shape[1], "..."), q)


def _score(method: Any, hook: str, got: Any, q: Tensor, summary: Tensor, step: Any, layer: int) -> None:
    expect_tensor(method, hook, got, ("C", q.shape[1], summary.shape[1]), q)
    if len(q) % len(got) or got.is_complex():
        expected = f"[C, {q.shape[1]}, {summary.shape[1]}] real numbers, where C divides {len(q)}"
        raise refuse(method, hook, got, expected)


def _log_mass(method: Any, hook: str, got: Any, scores: Tensor, *_: Any) -> None:
    expect_tensor(method, hook, got, scores.shape, scores)


def _forced(method: Any, hook: str, got: Any, chunk_ids: Tensor, own: Tensor) -> None:
    shape = len(own), len(chunk_ids)
    is_mask = isinstance(got, Tensor) and got.ndim <= 2 and got.dtype == torch.bool and got.device == own.device
    if not is_mask or any(n not in (1, most) for n, most in zip(got.shape[::-1], shape[::-1], strict=False)):
        raise refuse(method, hook, got, f"{list(shape)} bool on {own.device}")


def _select(method: Any, hook: str, got: Any, scores: Tensor, step: Any) -> None:
    _check_chosen(method, hook, got, len(scores), scores)
    if got.device.type == "cpu" and got.numel():  # looking at values does not wait there
        own = (step.positions(got.device) // method.size)[:, None]
        before, after = got[..., :-1], got[..., 1:]
        rising = ((after > before) & (before >= 0)) | (after == -1)
        if not rising.all() or not ((got >= -1) & (got < own)).all():
            raise UsageError(
                f"{method.label}.{hook} returned chunks out of order, twice, or not before the query's own; expected "
                "ascending ones, -1 behind the last"
            )


def _choose(method: Any, hook: str, got: Any, q: Tensor, cache: Any, step: Any) -> None:
    if got is not None:  # in a recorded step heads may share a choice
        _check_chosen(method, hook, got, len(q) if step.at is None else len(got), q)


def _check_chosen(method: Any, hook: str, got: Any, n_heads: int, like: Tensor) -> None:
    shape, most = (n_heads, like.shape[1], "K"), method.n_choices
    expect_tensor(method, hook, got, shape, like, torch.int64, f" with K {most} or fewer")
    if got.shape[-1] > most:
        raise refuse(method, hook, got, f"[{n_heads}, {like.shape[1]}, K] int64 with K {most} or fewer")


SELECTION_CHECKS: Mapping[str, Check] = {
    **METHOD_CHECKS,
    "summarise": _summarise,
    "score": _score,
    "log_mass": _log_mass,
    "forced": _forced,
    "select": _select,
    "choose": _choose,
}
