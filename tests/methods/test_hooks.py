"""Hooks of a method of one's own that return something else hear what, and what was expected."""

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lce
from lce.cache.layout import AccessPattern
from lce.cache.method_state import TokenRows
from lce.errors import UsageError
from lce.methods import Full, LongHeads, Method, SelectiveMethod, Step
from lce.methods.costs import QueryBlock, cost
from lce.methods.hooks import METHOD_CHECKS, SELECTION_CHECKS
from tests.running import vectors

WINDOW, H, G, N, D, SIZE = 32, 4, 2, 40, 8, 4
Change = Callable[[Any], Any]  # a right return to a wrong one


@dataclass(frozen=True)
class Mean(SelectiveMethod):
    """A selector by the mean key; `bent` is what becomes of the return of the hook `wrong`."""

    chunk_size: int | None = SIZE
    wrong: str = ""
    bent: Any = None

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return k.mean(dim=2).repeat_interleave(len(q) // len(k), dim=0)


def bending(name: str) -> Any:
    """The hook of `Mean` as one of a method of one's own, whose return may be bent."""
    ours = inspect.getattr_static(Mean, name)
    right = ours.fget if isinstance(ours, property) else ours

    def hook(self: Mean, *args: Any) -> Any:
        if name == "keep" and self.wrong == name and self.bent(None) is None:
            return None  # nothing is cached
        out = right(self, *args)
        bends = self.wrong == name and (name != "key_positions" or len(args[0]))
        return self.bent(out) if bends else out

    hook.__name__ = name
    return property(hook) if isinstance(ours, property) else hook


HOOKS = (
    "for_model resolve block access choices state key_positions keep attend summarise score forced select choose"
).split()
Own: Any = dataclass(frozen=True)(type("Own", (Mean,), {name: bending(name) for name in HOOKS}))


def run(method: Method, **options: Any) -> Tensor:
    return lce.methods.run(method, *vectors(1, H, G, N, D), window=WINDOW, **options)


def to(value: Any) -> Change:
    """A change to one value, whatever was right."""
    return lambda right: value


# Returns that no hook with a tensor may give, by a name.
NO_TENSOR: dict[str, Change] = {
    "nothing": to(None),
    "an array": lambda right: right.numpy(),
    "a pair": lambda right: (right, right),
    "elsewhere": lambda right: right.to("meta"),
    "one dimension more": lambda right: right[None],
    "the first alone": lambda right: right[0],
}


def axis(dim: int, by: int) -> Change:
    """A tensor that is off by one along a dimension."""
    return lambda right: right.index_select(dim, torch.arange(right.shape[dim] + by).clamp(max=right.shape[dim] - 1))


def but(*names: str) -> dict[str, Change]:
    return {name: change for name, change in NO_TENSOR.items() if name not in names}


def off(*dims: int) -> dict[str, Change]:
    return {f"{by:+} along {dim}": axis(dim, by) for dim in dims for by in (-1, 1)}


def kind(*dtypes: torch.dtype) -> dict[str, Change]:
    return {f"as {dtype}": lambda right, dtype=dtype: right.to(dtype) for dtype in dtypes}


WRONG: dict[str, dict[str, Change]] = {
    "attend": NO_TENSOR | off(0, 1, 2) | kind(torch.float64, torch.bfloat16, torch.int64),
    "summarise": but("one dimension more", "the first alone")
    | {"off in chunks": axis(1, 1), "no chunks": axis(1, -1), "flat": lambda right: right.flatten()},
    "score": NO_TENSOR | off(0, 1, 2) | kind(torch.complex64),
    "forced": but("the first alone") | off(0, 1) | kind(torch.int64),
    "select": NO_TENSOR
    | off(0, 1)
    | kind(torch.float32, torch.int32)
    | {
        "the own chunk": lambda right: torch.full_like(right[..., :1], N // SIZE),
        "before the first": lambda right: torch.full_like(right, -2),
        "descending": lambda right: right.flip(-1),
        "twice": lambda right: torch.zeros_like(right),
        "all of them": lambda right: torch.arange(N // SIZE).expand(*right.shape[:2], -1),
        "more than have a position": lambda right: torch.nn.functional.pad(right, (0, 9), value=-1),
    },
    "choose": but("nothing") | off(0, 1) | kind(torch.float32),
    "key_positions": but("nothing", "the first alone") | off(0) | kind(torch.bool, torch.complex64),
    "keep": {"a tensor": to(torch.zeros(2)), "nothing cached": lambda right: None, "a pair": to((1, 2))},
    "state": {
        "a list": lambda right: list(right.values()),
        "a class": to({"rows": TokenRows}),
        "a number for a name": lambda right: {3: next(iter(right.values()))},
    },
    "access": {
        "a number": to(SIZE),
        "no chunk": to(AccessPattern(0)),
        "fewer than no sinks": to(AccessPattern(4, sinks=-1)),
        "local of True": to(AccessPattern(4, local=True)),
    },
    "block": {"nothing": to(None), "none": to(0), "half": to(10.0), "a word": to("10")},
    "resolve": {"nothing": to(None), "a name": to("longheads")},
}
CASES = [(hook, name) for hook, wrong in WRONG.items() for name in wrong]


def test_the_right_returns_pass() -> None:
    assert torch.equal(run(Own()), run(Own(), blocks=7)) or (run(Own()) - run(Own(), blocks=7)).abs().max() < 1e-5


@pytest.mark.parametrize(("hook", "name"), CASES, ids=str)
def test_a_wrong_return_is_named(hook: str, name: str) -> None:
    bent = WRONG[hook][name]
    method = Own(wrong=hook, bent=bent)
    with pytest.raises(UsageError) as caught:
        run(method)
    message = str(caught.value)
    assert re.match(rf"Own\.{hook} (returned|cached) .+; expected .+", message), message
    assert "\n" not in message
    assert len(message) < 300


def test_hooks_that_a_run_does_not_call() -> None:
    for name, wrong in (("choices", 3), ("choices", (0, 0)), ("choices", (0, 1, 2)), ("for_model", None)):
        method = Own(wrong=name, bent=to(wrong))
        with pytest.raises(UsageError, match=rf"Own\.{name} returned"):
            method.choices if name == "choices" else method.for_model(None)


def of(base: Any, hook: str, returns: Any, **promises: Any) -> Any:
    """A method of one's own, `Own`, with one hook."""
    getattr(returns, "func", returns).__name__ = hook
    return dataclass(frozen=True)(types.new_class("Own", (base,), promises, lambda body: body.update({hook: returns})))


COUNTED: Any = {"promises": {"counted": ()}}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: of(Full, "bound", lambda self, stop: stop - 1)().bound(7),
            "full.bound returned 6; expected None, or a whole number of tokens, 7",
        ),
        (
            lambda: of(Full, "attend", lambda self, q, *_: q[0])().attend(torch.zeros(H, 1, D), None, None),
            "full.attend returned [1, 8] float32; expected [4, 1, 8] float32",
        ),
        (
            lambda: cost(of(Full, "choice_cost", lambda *_: 7, **COUNTED)(), QueryBlock(0, 1, H, G, D)),
            "full.choice_cost returned 7; expected a Cost, as block.tokens(n) gives",
        ),
        (
            lambda: run(of(Mean, "log_mass", lambda self, scores, *_: scores[0])(chunks=4, top_p=0.5)),
            "Own.log_mass returned [40, 10] float32; expected [4, 40, 10]",
        ),
        (
            lambda: run(of(Method, "parts_of", lambda self, i, _: iter([(0, i + 1)]))()),
            "Own.parts_of yielded a tuple; expected a Part",
        ),
        (
            lambda: run(of(LongHeads, "score", lambda self, *x: LongHeads.score(self, *x).sum(-1))(chunk_size=SIZE)),
            "longheads.score returned [2, 8] float32; expected [C, 8, 10]",
        ),
        (
            lambda: run(of(Method, "attend", lambda self, q, *_: q[:, 3:])()),
            "Own.attend returned [4, 37, 8] float32; expected [4, 40, 8] float32",
        ),
        (
            lambda: run(of(Full, "access", functools.cached_property(lambda self: 16))()),
            "full.access returned 16; expected an AccessPattern",
        ),
    ],
    ids=range(8),
)
def test_any_method_of_ones_own_is_checked_where_it_differs_from_ours(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        call()


def test_the_shortest_method() -> None:
    assert torch.equal(run(of(Method, "attend", lambda self, q, *_: q)()), vectors(1, H, G, N, D)[0])
    with pytest.raises(NotImplementedError, match="Method declares no parts; define parts_of, or attend"):
        run(Method())


def test_every_hook_that_is_checked_is_in_the_table() -> None:
    assert {*WRONG, "choices", "for_model", "bound", "choice_cost", "log_mass"} == {*SELECTION_CHECKS}
    assert {*METHOD_CHECKS} < {*SELECTION_CHECKS}


def test_messages_say_both_shapes() -> None:
    def message(hook: str, bent: Change) -> str:
        with pytest.raises(UsageError) as caught:
            run(Own(wrong=hook, bent=bent), blocks=8)
        return str(caught.value)

    assert message("attend", axis(1, -1)) == "Own.attend returned [4, 7, 8] float32; expected [4, 8, 8] float32"
    assert message("attend", to(None)) == "Own.attend returned None; expected [4, 8, 8] float32"
    assert message("attend", to(np.zeros((4, 8, 8)))).startswith("Own.attend returned ndarray [4, 8, 8] float64; ")
    assert message("score", axis(2, 1)) == "Own.score returned [4, 8, 3] float32; expected [C, 8, 2]"
    assert message("score", lambda right: right[:3]) == (
        "Own.score returned [3, 8, 2] float32; expected [C, 8, 2] real numbers, where C divides 4"
    )
    assert message("key_positions", axis(0, 1)) == "Own.key_positions returned [9] int64; expected [8] numbers, or None"
    assert message("keep", lambda right: None) == (
        "Own.keep cached 0 of the block's 8 tokens; expected all of them: call super().keep(k, v, cache, step)"
    )
    assert "returned chunks out of order, twice, or not before" in message("select", lambda right: right.flip(-1))


@dataclass(frozen=True)
class PerKeyHead(SelectiveMethod):
    """Forgets that there are more query heads than KV heads."""

    double: bool = False

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        mean = k.mean(dim=2)
        return mean.repeat_interleave(2, dim=0).double() if self.double else mean


@dataclass(frozen=True)
class PerKeyHeadWithAScore(PerKeyHead):
    """For its own score, any summaries will do."""

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        return (q.unflatten(0, (len(summary), -1)) @ summary[:, None].mT).flatten(0, 1)


def test_summaries_suit_the_score_as_it_stands() -> None:
    with pytest.raises(UsageError, match=r"returned \[2, 10, 8\] float32; expected \[4, 10, 8\] float32 for score"):
        run(PerKeyHead(chunk_size=SIZE))
    with pytest.raises(UsageError, match=r"returned \[4, 10, 8\] float64; expected \[4, 10, 8\] float32"):
        run(PerKeyHead(chunk_size=SIZE, double=True))
    assert run(PerKeyHeadWithAScore(chunk_size=SIZE)).isfinite().all()


def test_ours_are_not_wrapped() -> None:
    for cls in (Full, LongHeads, Method, SelectiveMethod):
        assert not any(hasattr(vars(cls).get(name), "__wrapped__") for name in SELECTION_CHECKS)
    assert hasattr(Own.attend, "__wrapped__")
    assert Own.attend.__name__ == "attend"
    assert dataclasses.fields(Own)[-1].name == "bent"
