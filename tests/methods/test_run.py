"""`lce.methods.run`: the oracle's output in any blocks, and shapes that do not fit; `Driver`: a block whole or not."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lce
from lce.attention import Attention
from lce.cache.kv import KVCache
from lce.cache.layer import LayerCache
from lce.cache.layout import AccessPattern, Budgets, CacheLayout
from lce.errors import UsageError
from lce.methods import Driver, Full, LongHeads, Method, Rope, RopeConfig, make
from lce.methods.step import DeviceStep, Step
from lce.models.layers import Attend
from tests import oracle
from tests.interrupts import interrupted, places
from tests.running import cut, layout_for, legal, vectors

WINDOW, N = 32, 150
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("dca", {"chunk_size": 10}), ("longheads", {"chunk_size": 4})),
    ("esa", {"compress": "none", "sinks": 4, "top_k": 9}),
]


def truth(name: str, knobs: dict[str, Any], blocks: list[int], **setting: Any) -> Tensor:
    q, k, v = vectors(1, 4, 2, N, 16)
    known = oracle.Setting(WINDOW, blocks, **setting)
    return oracle.attention(q, k, v, oracle.DEFINITIONS[name](q, k, v, known, **knobs), known)


@pytest.mark.parametrize("blocks", [None, 7, 1000, [3, 90, 1, 56]], ids=str)
@pytest.mark.parametrize(("name", "knobs"), CASES, ids=str)
def test_equals_the_oracle(name: str, knobs: dict[str, Any], blocks: Any) -> None:
    sizes = blocks if isinstance(blocks, list) else cut(N, blocks or make(name, knobs).resolve(WINDOW).block)
    out = lce.methods.run(make(name, knobs), *vectors(1, 4, 2, N, 16), window=WINDOW, blocks=blocks)
    assert (out - truth(name, knobs, sizes)).abs().max() <= 1e-4


def test_the_worked_example() -> None:
    q, v = torch.zeros(1, 3, 2), torch.tensor([[[3.0, 0.0], [1.0, 0.0], [2.0, 6.0]]])
    out = lce.methods.run("full", q, q, v, window=8)
    assert torch.equal(out, torch.tensor([[[3.0, 0.0], [2.0, 0.0], [2.0, 2.0]]]))


def test_a_method_may_be_a_name_and_be_resolved() -> None:
    q, k, v = vectors(1, 4, 2, N, 16)
    first, *others = (
        lce.methods.run(method, q, k, v, window=WINDOW)
        for method in ("longheads", LongHeads(), LongHeads().resolve(WINDOW))
    )
    assert all(torch.equal(first, other) for other in others)


def test_options_reach_the_method() -> None:
    q, k, v = vectors(1, 4, 2, N, 16)
    rope = Rope(RopeConfig(kind="linear", factor=2.0), 16, WINDOW)
    scaled = lce.methods.run("full", q, k, v, window=WINDOW, rope=rope)
    assert (scaled - truth("full", {}, [], frequencies=rope.inv_freq)).abs().max() <= 1e-4
    slid = lce.methods.run("full", q, k, v, window=WINDOW, sliding_window=20, attention="reference")
    assert (slid - truth("full", {}, [], sliding_window=20)).abs().max() <= 1e-4
    noted: list[tuple[int, tuple[int, ...]]] = []
    method = LongHeads(chunk_size=8, chunks=4)
    how: Any = {"window": WINDOW, "blocks": [100, 50], "note": lambda i, chosen: noted.append((i, chosen.shape))}
    lce.methods.run(method, q, k, v, **how)
    assert noted == [(0, (4, 100, 3)), (0, (4, 50, 3))]


def test_vectors_that_are_learned_are_only_read() -> None:
    q, k, v = (x.requires_grad_() for x in vectors(1, 4, 2, 20, 16))
    assert not lce.methods.run("longheads", q, k, v, window=WINDOW).requires_grad


QKV = {"q": (4, 6, 8), "k": (2, 6, 8), "v": (2, 6, 8)}


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ({"q": (3, 6, 8)}, {}, r"q is \[3, 6, 8\], k is .*; expected a multiple of 2 query heads, not 3"),
        ({"v": (2, 5, 8)}, {}, r"v is \[2, 5, 8\]; expected q \[H, N, D\] and k, v \[G, N, D\]"),
        ({"q": (4, 5, 8)}, {}, r"q is \[4, 5, 8\], k is \[2, 6, 8\]"),
        ({"q": (4, 6, 10)}, {}, r"q is \[4, 6, 10\], k is \[2, 6, 8\]"),
        ({"q": (6, 8)}, {}, r"q is \[6, 8\]"),
        ({"q": (4, 0, 8), "k": (2, 0, 8), "v": (2, 0, 8)}, {}, "none of them empty"),
        ({"q": (4, 6, 7), "k": (2, 6, 7), "v": (2, 6, 7)}, {}, "expected D to be even"),
        pytest.param({}, {"rope": Rope(RopeConfig(), 16, WINDOW)}, "expected D to be 16, as in rope", id="rope of 16"),
        ({}, {"blocks": 0}, "blocks is 0; expected 1 or more"),
        ({}, {"blocks": [3, 2]}, "blocks add up to 5; expected sizes of 1 or more that add up to 6"),
        ({}, {"blocks": [7, -1]}, "a size in blocks is -1; expected 1 or more"),
        ({}, {"blocks": []}, "blocks add up to 0"),
        ({}, {"method": "ful"}, "did you mean 'full'"),
        ({}, {"method": "esa"}, "compress=pca"),
        ({}, {"attention": "torh"}, "did you mean 'torch'"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(shapes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {name: torch.zeros(shape) for name, shape in (QKV | shapes).items()}
    with pytest.raises(UsageError, match=message) as caught:
        lce.methods.run(**({"method": "full", "window": WINDOW} | given | options))
    assert "\n" not in str(caught.value)


def test_dtypes_that_differ_are_refused() -> None:
    q, k, v = vectors(1, 4, 2, 6, 8)
    with pytest.raises(UsageError, match=r"float32 on cpu, torch.float64 on cpu, .*; expected one dtype"):
        lce.methods.run("full", q, k.double(), v, window=WINDOW)


# The driver


def test_decode_steps_prefetch_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = vectors(1, 4, 2, 9, 8)
    cache = KVCache.empty(CacheLayout(2, 4, 2, 8, torch.float32, torch.device("cpu"), AccessPattern(4)))
    driver, rope = Driver(Full(), Attention.choose(), WINDOW, 2), Rope(RopeConfig(), 8, WINDOW)
    asked: list[int | str] = []
    monkeypatch.setattr(KVCache, "prefetch", lambda cache, layer: asked.append(layer))
    attended = type(driver.method).attend

    def attend(method: Method, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        out = attended(method, q, cache, step)
        if step.stop - step.start == 1:
            asked.append(f"layer {cache.index}")
        return out

    monkeypatch.setattr(type(driver.method), "attend", attend)
    driver.forward(cache, rope, 9, lambda attend: [attend(layer, q, k, v) for layer in range(2)])
    assert asked == []
    last = [x[:, -1:] for x in (q, k, v)]
    driver.forward(cache, rope, 1, lambda attend: [attend(layer, *last) for layer in range(2)])
    assert asked == [0, "layer 0", 1, "layer 1", 2], "behind a layer's own pages and kernels"


# Ctrl-C

INTERRUPTED: dict[str, dict[str, object]] = {
    "full": {},
    "longheads": {"chunk_size": 4},
    "esa": {"compress": "pca", "sinks": 2, "local": 6, "top_k": 5, "low_dim": 4},
    "infllm": {"block_size": 4, "sinks": 2, "top_k": 2, "local": 6},
}


CACHE = ("/cache/", "run.py", "parts.py")


def check_interruptions(name: str, start: int, every: int, folder: Path, *where: str) -> None:
    """Read `start` tokens, then a block and a token, interrupted at one of `every` instructions, then what is left.

    Each output equals, to the bit, that of a run which is not interrupted; so does that of a copy.
    """
    method = make(name, INTERRUPTED[name]).resolve(WINDOW)
    x = vectors(3, 4, 2, start + 16, 8)
    layout = layout_for(method, 4, x[1], 10, Budgets(host=0, spill_dir=folder))
    layout = legal(replace(layout, n_layers=2, access=replace(layout.access, chunk_size=4)))
    driver, rope = Driver(method, Attention.choose(), WINDOW, 2), Rope(RopeConfig(), 8, WINDOW, start + 16)

    def read(cache: KVCache, spans: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[Tensor]]:
        outs = {}
        for a, b in spans:
            block = [y[:, a:b] for y in x]

            def model_call(attend: Attend, block: list[Tensor] = block) -> list[Tensor]:
                return [attend(layer, *block) for layer in range(2)]

            outs[a, b] = driver.forward(cache, rope, b - a, model_call)
        return outs

    base = KVCache.empty(layout)
    read(base, [(a, min(a + 10, start)) for a in range(0, start, 10)])
    spans = [(start, start + 10), (start + 10, start + 11), (start + 11, start + 16)]
    truth, probe = read(base.fork(), spans), base.fork()
    for place, nth in places(lambda: read(probe, spans[:2]), every, *(where or CACHE)):
        cache = base.fork()
        interrupted(lambda cache=cache: read(cache, spans[:2]), place, nth)
        for each in (cache.fork(), cache):
            assert each.length in (start, start + 10, start + 11), place
            for span, outs in read(each, [span for span in spans if span[0] >= each.length]).items():
                assert all(torch.equal(a, b) for a, b in zip(outs, truth[span], strict=True)), place


# Each of these methods is interrupted in the other case.
ALIKE = {("longheads", 20), ("esa", 50), ("infllm", 20)}


@pytest.mark.parametrize(
    ("name", "every", "start"),
    [
        pytest.param(name, every, start, id=f"{name}-{called}", marks=[pytest.mark.slow] * ((name, start) in ALIKE))
        for name, every in (("full", 151), ("longheads", 1207), ("esa", 503), ("infllm", 907))
        for start, called in ((20, "becomes tiered"), (50, "is tiered"))
    ],
)
def test_an_interruption_anywhere_loses_nothing(name: str, every: int, start: int, tmp_path: Path) -> None:
    check_interruptions(name, start, every, tmp_path)


def test_an_interruption_of_a_commit_is_as_if_it_came_before_or_after(tmp_path: Path) -> None:
    """At every bytecode of it."""
    check_interruptions("infllm", 20, 1, tmp_path, "KVCache.commit.", "Staged.commit.")


@pytest.mark.slow
@pytest.mark.parametrize("start", [20, 50], ids=["becomes tiered", "is tiered"])
@pytest.mark.parametrize(("name", "every"), [(name, 11 + 2 * i) for i, name in enumerate(INTERRUPTED)])
def test_an_interruption_at_nearly_any_place_loses_nothing(name: str, every: int, start: int, tmp_path: Path) -> None:
    check_interruptions(name, start, every, tmp_path)


def test_every_kind_of_step_keeps_what_is_made_once() -> None:
    facts: Any = {
        "rope": Rope(RopeConfig(), 4, 8),
        "attention": Attention.choose("torch"),
        "window": 8,
        "n_kv_heads": 1,
    }
    for step in (Step(3, 4, **facts), DeviceStep(torch.tensor([3]), 8, **facts)):
        made = [step.once("x", lambda: torch.zeros(1)) for _ in range(2)]
        assert made[0] is made[1]
        assert step.once("nothing", lambda: None) is None
