"""Hooks of a method of one's own that return something else hear what, and what was expected."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import lce
from lce.cache.layer import LayerCache
from lce.cache.layout import AccessPattern, CacheLayout
from lce.cache.method_state import MethodState, TokenRows
from lce.errors import UsageError
from lce.methods import Full, LongHeads, Method, SelectiveMethod, Step
from lce.methods.base import METHOD_CHECKS
from lce.methods.costs import Cost, QueryBlock
from lce.methods.hooks import SELECTION_CHECKS, described
from lce.methods.parts import LayerFacts
from lce.methods.step import DeviceStep
from tests.running import vectors

WINDOW, H, G, N, D, SIZE = 32, 4, 2, 40, 8, 4
Change = Callable[[Any], Any]  # a right return to a wrong one


@dataclass(frozen=True)
class Own(SelectiveMethod):
    """A selector with every hook of its own; `bent` is what becomes of the return of the hook `wrong`."""

    chunk_size: int | None = SIZE
    wrong: str = ""
    bent: Any = None

    def out(self, hook: str, right: Any) -> Any:
        return self.bent(right) if hook == self.wrong else right

    def for_model(self, model: Any) -> Any:
        return self.out("for_model", self)

    def resolve(self, window: int) -> Any:
        return self.out("resolve", super().resolve(window))

    @property
    def block(self) -> int:
        return self.out("block", 10)  # type: ignore[no-any-return]

    @property
    def access(self) -> AccessPattern:
        return self.out("access", super().access)  # type: ignore[no-any-return]

    @property
    def choices(self) -> tuple[int, int]:
        return self.out("choices", super().choices)  # type: ignore[no-any-return]

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        return self.out("state", super().state(layout))  # type: ignore[no-any-return]

    def key_positions(self, indices: Tensor) -> Tensor | None:
        positions = super().key_positions(indices)
        return self.out("key_positions", positions) if len(indices) else positions  # type: ignore[no-any-return]

    def keep(self, k: Tensor, v: Tensor, cache: LayerCache, step: Step) -> None:
        if self.out("keep", "cached") == "cached":
            super().keep(k, v, cache, step)
        return self.out("keep", None)  # type: ignore[no-any-return]

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        return self.out("attend", super().attend(q, cache, step))  # type: ignore[no-any-return]

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        mean = k.mean(dim=2).repeat_interleave(len(q) // len(k), dim=0)
        return self.out("summarise", mean)  # type: ignore[no-any-return]

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        return self.out("score", super().score(q, summary, step, layer))  # type: ignore[no-any-return]

    def forced(self, chunk_ids: Tensor, own: Tensor) -> Tensor:
        return self.out("forced", super().forced(chunk_ids, own))  # type: ignore[no-any-return]

    def select(self, scores: Tensor, step: Step) -> Tensor:
        return self.out("select", super().select(scores, step))  # type: ignore[no-any-return]

    def choose(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor | None:
        return self.out("choose", super().choose(q, cache, step))  # type: ignore[no-any-return]


def run(method: Method, **options: Any) -> Tensor:
    return lce.methods.run(method, *vectors(1, H, G, N, D), window=WINDOW, **options)


def to(value: Any) -> Change:
    """A change to one value, whatever was right."""
    return lambda right: value


# Returns that no hook with a tensor may give, by a name.
NO_TENSOR: dict[str, Change] = {
    "nothing": to(None),
    "a list": lambda right: right.tolist(),
    "an array": lambda right: right.numpy(),
    "a pair": lambda right: (right, right),
    "elsewhere": lambda right: right.to("meta"),
    "one dimension more": lambda right: right[None],
    "the first alone": lambda right: right[0],
}


def axis(dim: int, by: int) -> Change:
    """A tensor that is off by one along a dimension."""
    return lambda right: right.index_select(dim, torch.arange(right.shape[dim] + by).clamp(max=right.shape[dim] - 1))


def off(*dims: int) -> dict[str, Change]:
    return {f"{by:+} along {dim}": axis(dim, by) for dim in dims for by in (-1, 1)}


def kind(*dtypes: torch.dtype) -> dict[str, Change]:
    return {f"as {dtype}": lambda right, dtype=dtype: right.to(dtype) for dtype in dtypes}


WRONG: dict[str, dict[str, Change]] = {
    "attend": NO_TENSOR | off(0, 1, 2) | kind(torch.float64, torch.bfloat16, torch.int64),
    "summarise": {k: v for k, v in NO_TENSOR.items() if k not in ("one dimension more", "the first alone")}
    | {"off in chunks": axis(1, 1), "no chunks": axis(1, -1), "flat": lambda right: right.flatten()},
    "score": NO_TENSOR | off(0, 1, 2) | kind(torch.complex64),
    "forced": {k: v for k, v in NO_TENSOR.items() if k != "the first alone"} | off(0, 1) | kind(torch.int64),
    "select": NO_TENSOR
    | off(0, 1)
    | kind(torch.float32, torch.int32)
    | {
        "the own chunk": lambda right: torch.full_like(right[..., :1], N // SIZE),
        "before the first": lambda right: torch.full_like(right, -2),
        "descending": lambda right: right.flip(-1),
        "twice": lambda right: torch.zeros_like(right),
        "all of them": lambda right: torch.arange(N // SIZE).expand(*right.shape[:2], -1),
    },
    "choose": {k: v for k, v in NO_TENSOR.items() if k != "nothing"} | off(0, 1) | kind(torch.float32),
    "key_positions": {k: v for k, v in NO_TENSOR.items() if k not in ("nothing", "the first alone")}
    | off(0)
    | kind(torch.bool, torch.complex64),
    "keep": {"a tensor": to(torch.zeros(2)), "nothing cached": lambda right: None, "a pair": to((1, 2))},
    "state": {
        "nothing": to(None),
        "a list": lambda right: list(right.values()),
        "a class": to({"rows": TokenRows}),
        "a tensor": to({"rows": torch.zeros(3)}),
        "a number for a name": lambda right: {3: next(iter(right.values()))},
    },
    "access": {
        "nothing": to(None),
        "a number": to(SIZE),
        "no chunk": to(AccessPattern(0)),
        "half a chunk": to(AccessPattern(1.5)),  # type: ignore[arg-type]
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


class Recorded(Full):
    def bound(self, stop: int) -> int | None:
        return stop - 1

    def decode(self, q: Tensor, cache: LayerCache, step: DeviceStep) -> Tensor:
        return q[0]


def test_hooks_of_recorded_steps() -> None:
    q, cache, step = torch.zeros(H, 1, D), cast("LayerCache", None), cast("DeviceStep", None)
    with pytest.raises(UsageError, match=r"full\.bound returned 6; expected None, or a whole number of tokens, 7"):
        Recorded().bound(7)
    with pytest.raises(UsageError, match=r"full\.decode returned \[1, 8\] float32; expected \[4, 1, 8\] float32"):
        Recorded().decode(q, cache, step)


@dataclass(frozen=True)
class Analysed(lce.SelectiveMethod):
    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return k.mean(dim=2).repeat_interleave(len(q) // len(k), dim=0)

    def log_mass(self, scores: Tensor, n_heads: int, head_dim: int) -> Tensor:
        return scores[0]


def test_hooks_of_analysis() -> None:
    with pytest.raises(UsageError, match=r"Analysed\.log_mass returned \[\d+, \d+\] float32; expected \[4, \d+, \d+\]"):
        run(Analysed(chunk_size=4, chunks=4, top_p=0.5))


@dataclass(frozen=True)
class Yields(Method):
    def parts_of(self, i: Tensor, layer: LayerFacts) -> Any:
        yield (0, i + 1)


def test_parts_are_parts() -> None:
    with pytest.raises(UsageError, match=r"Yields\.parts_of yielded a tuple; expected a Part"):
        run(Yields())
    with pytest.raises(NotImplementedError, match="Method declares no parts; define parts_of, or attend"):
        run(Method())


class Costly(Full):
    def choice_cost(self, block: QueryBlock) -> Cost:
        return cast("Cost", 7)


def test_a_cost_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"full\.choice_cost returned 7; expected a Cost, as block\.tokens\(n\) gives"):
        Costly().cost(QueryBlock(0, 1, H, G, D))


def test_every_hook_that_is_checked_is_in_the_table() -> None:
    assert {*WRONG, "choices", "for_model", "bound", "decode", "choice_cost", "log_mass"} == {*SELECTION_CHECKS}
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

    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return k.mean(dim=2)


@dataclass(frozen=True)
class InDouble(SelectiveMethod):
    def summarise(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return k.mean(dim=2).repeat_interleave(2, dim=0).double()


@dataclass(frozen=True)
class PerKeyHeadWithAScore(PerKeyHead):
    """For its own score, any summaries will do."""

    def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
        return (q.unflatten(0, (len(summary), -1)) @ summary[:, None].mT).flatten(0, 1)


def test_summaries_suit_the_score_as_it_stands() -> None:
    with pytest.raises(UsageError, match=r"returned \[2, 10, 8\] float32; expected \[4, 10, 8\] float32 for score"):
        run(PerKeyHead(chunk_size=SIZE))
    with pytest.raises(UsageError, match=r"returned \[4, 10, 8\] float64; expected \[4, 10, 8\] float32"):
        run(InDouble(chunk_size=SIZE))
    assert run(PerKeyHeadWithAScore(chunk_size=SIZE)).isfinite().all()


@dataclass(frozen=True)
class Bare(Method):
    """The shortest method, with what it forgot."""

    gone: Any = 0

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        return q[:, : q.shape[1] - self.gone]


def test_a_method_that_selects_nothing_is_checked_as_well() -> None:
    assert torch.equal(run(Bare()), vectors(1, H, G, N, D)[0])
    with pytest.raises(UsageError, match=r"Bare\.attend returned \[4, 37, 8\] float32; expected \[4, 40, 8\] float32"):
        run(Bare(3))


def test_a_method_that_derives_from_one_of_ours_is_checked_where_it_differs() -> None:
    @dataclass(frozen=True)
    class Louder(LongHeads):
        def score(self, q: Tensor, summary: Tensor, step: Step, layer: int) -> Tensor:
            return super().score(q, summary, step, layer).sum(-1)

    with pytest.raises(UsageError, match=r"longheads\.score returned \[4, 40\] float32; expected \[C, 40, 10\]"):
        run(Louder(chunk_size=SIZE))


def test_a_property_may_be_cached() -> None:
    @dataclass(frozen=True)
    class Cached(Full):
        @functools.cached_property
        def access(self) -> Any:  # type: ignore[override]
            return 16

        @functools.cached_property
        def block(self) -> int:  # type: ignore[override]
            return 8

    assert Cached().block == 8
    with pytest.raises(UsageError, match=r"full\.access returned 16; expected a AccessPattern"):
        run(Cached())


def test_ours_are_not_wrapped() -> None:
    for cls in (Full, LongHeads, Method, SelectiveMethod):
        assert not any(hasattr(vars(cls).get(name), "__wrapped__") for name in SELECTION_CHECKS)
    assert hasattr(Own.attend, "__wrapped__")
    assert Own.attend.__name__ == "attend"
    assert dataclasses.fields(Own)[-1].name == "bent"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None"),
        (3, "3"),
        ("x\n", r"'x\n'"),
        ([1, 2], "a list"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), "[2, 3] bfloat16"),
        (np.zeros(4, dtype=np.int32), "ndarray [4] int32"),
        (TokenRows, "the class TokenRows"),
        (TokenRows(4), "a TokenRows"),
    ],
    ids=range(8),
)
def test_values_in_a_few_words(value: Any, words: str) -> None:
    assert described(value) == words
