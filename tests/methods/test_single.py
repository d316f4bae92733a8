"""What single methods promise besides what the comparison with the oracle covers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lce
from lce.cache.layout import CacheLayout
from lce.errors import UsageError
from lce.methods import InfLLM, LMInfinite, LongHeads, Method, Quest, make
from lce.methods.selectors import Bounds
from tests import oracle
from tests.running import cut, run, vectors

WINDOW = 32
INFLLM = InfLLM(block_size=8, repr_tokens=2, top_k=3, sinks=5, local=12)
ESA = {"compress": "none"}
BUDGETED = ("oracle", "random")


@pytest.mark.parametrize(
    ("name", "knobs", "words"),
    [
        ("streaming", {"sinks": -1}, "sinks is -1; expected 0 or more"),
        ("streaming", {"local": 0}, "local is 0; expected 1 or more"),
        ("lm_infinite", {"top_k": -2}, "top_k is -2; expected 0 or more"),
        ("rerope", {"local": 0}, "local is 0; expected 1 or more"),
        ("self_extend", {"group": 0}, "group is 0; expected 1 or more"),
        ("self_extend", {"group": "auto", "local": 64}, "local is 64; expected 63 or less with group=auto"),
        ("self_extend", {"group": "auto", "local": 9, "far": 8}, "local is 9; expected 8 or less with group=auto"),
        ("self_extend", {"group": 4, "far": 60}, "far is 60 with group=4; expected group=auto"),
        ("dca", {"chunk_size": 0}, "chunk_size is 0; expected 1 or more"),
        ("dca", {"chunk_size": 65}, "chunk_size is 65; expected at most the window, 64"),
        ("dca", {"chunk_size": 10, "far": 8}, "far is 8; expected 9 or more"),
        ("infllm", {"repr_tokens": 0}, "repr_tokens is 0; expected 1 or more"),
        ("infllm", {"block_size": 0}, "block_size is 0; expected 1 or more"),
        ("esa", {**ESA, "eps": -1}, "eps is -1; expected 0 or more"),
        ("esa", {**ESA, "top_k": 0}, "top_k is 0; expected 1 or more"),
        ("esa", {"compress": "pca", "heads": "max"}, "heads=max needs .*; give compress=none too"),
        ("quest", {"page": 0}, "page is 0; expected 1 or more"),
        ("quest", {"dense_layers": -1}, "dense_layers is -1; expected 0 or more"),
        ("quest", {"budget": 31}, "budget is 31; expected two pages of 16 tokens or more"),
        ("longheads", {"chunk_size": 0}, "chunk_size is 0; expected 1 or more"),
        ("longheads", {"chunk_size": 32}, "2 chunks of 32 tokens; expected 3 or more"),
        ("longheads", {"chunk_size": 4, "local": 29}, "chunks is 8; expected 10 or more, for local=29"),
        ("longheads", {"fix_head": True, "share": "layer"}, "fix_head follows one head and .*: drop one"),
        ("longheads", {"rank": "random", "top_p": 0.5}, "top_p takes the best .* rank='random' does not: drop one"),
        *((name, {"budget": 5, "chunk_size": 2}, "budget is 5; expected three chunks of 2") for name in BUDGETED),
        *((name, {"budget": 9, "chunks": 4}, "budget and chunks both say") for name in BUDGETED),
        *(
            (name, {**knobs, "top_p": p}, f"top_p is {p}; expected a share above 0, at most 1")
            for name, knobs in (("longheads", {}), ("oracle", {}), ("quest", {}), ("infllm", {}), ("esa", ESA))
            for p in (0.0, 1.5, -1.0)
        ),
    ],
)
def test_knobs_that_cannot_work(name: str, knobs: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: {words}"):
        make(name, knobs).resolve(64)


@pytest.mark.parametrize(
    ("name", "knobs", "window", "expected"),
    [
        ("dca", {}, 4096, {"chunk_size": 3072, "far": 4095}),
        ("dca", {"chunk_size": 10, "far": 9}, 64, {"chunk_size": 10, "far": 9}),
        ("esa", ESA, 4096, {"local": 2048, "top_k": 1024, "far": 2048, "block": 512, "eps": 3}),
        ("esa", ESA, 512, {"block": 128}),
        ("esa", {**ESA, "preset": "paper"}, 8192, {"far": 4096, "top_k": 2048}),
        ("longheads", {}, 512, {"chunk_size": 4, "chunks": 64, "local": 32}),
        ("longheads", {}, 4096, {"chunk_size": 8, "chunks": 256, "local": 256}),
        ("longheads", {"chunks": 6}, 4096, {"chunk_size": 8, "local": 12}),
        ("longheads", {"preset": "paper"}, 4096, {"chunk_size": 256, "chunks": 8, "local": 256}),
        ("longheads", {"preset": "released"}, 4096, {"chunk_size": 256, "chunks": 16}),
        ("quest", {}, 4096, {"page": 16, "budget": 1024, "dense_layers": 2}),
        ("quest", {}, 32, {"budget": 32}),  # two pages at least
        ("oracle", {"budget": 100}, 512, {"chunks": 6}),
        ("random", {"budget": 100}, 512, {"chunks": 6}),
    ],
    ids=str,
)
def test_what_is_left_out_follows_the_window(
    name: str, knobs: dict[str, Any], window: int, expected: dict[str, int]
) -> None:
    method = make(name, knobs).resolve(window)
    assert {knob: getattr(method, knob) for knob in expected} == expected


@pytest.mark.parametrize("sliding", [1, 5, 16, 1000])
@pytest.mark.parametrize("block", [1, 7, 64, 150])
def test_full_honours_the_sliding_window(sliding: int, block: int) -> None:
    q, k, v = vectors(1, 4, 2, 150, 8)
    setting = oracle.Setting(WINDOW, sliding_window=sliding)
    truth = oracle.attention(q, k, v, oracle.full(q, k, v, setting), setting)
    out = run(make("full"), q, k, v, cut(150, block), window=WINDOW, sliding_window=sliding)
    assert (out - truth).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("method", "limit", "numbers"),
    [
        (INFLLM, "lce.attention.scores.IN_CACHES", 600),
        (LMInfinite(sinks=2, local=12, top_k=4), "lce.methods.lm_infinite.SCORES_AT_ONCE", 2000),
        (lce.methods.ESA(compress="none", sinks=4, local=10, top_k=7), "lce.methods.lowdim.SCORES_AT_ONCE", 500),
        (lce.methods.ESA(compress="pca", sinks=4, local=10, top_k=7), "lce.methods.lowdim.SCORES_AT_ONCE", 500),
    ],
    ids=str,
)
def test_long_texts_are_scored_in_slices(
    method: Method, limit: str, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = vectors(1, 4, 2, 150, 8)
    whole = run(method, q, k, v, [60, 60, 30], window=WINDOW)
    monkeypatch.setattr(limit, numbers)
    assert (run(method, q, k, v, [60, 60, 30], window=WINDOW) - whole).abs().max() < 2e-6


def test_infllm_is_not_harmed_by_large_logits_outside_the_local_window() -> None:
    q, k, v = vectors(1, 4, 2, 150, 8)
    q = q * 20  # future keys have logits far above the sum over the window
    setting = oracle.Setting(WINDOW, cut(150, 30))
    tables = oracle.infllm(q, k, v, setting, block_size=8, repr_tokens=2, top_k=3, sinks=5, local=12)
    out = run(INFLLM, q, k, v, setting.blocks, window=WINDOW)
    assert (out - oracle.attention(q, k, v, tables, setting)).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("method", "first", "size", "most"),
    [(INFLLM, 5, 8, 8), (lce.methods.ESA(far=256, sinks=4, local=10, top_k=3), 0, 1, 70)],
    ids=["infllm", "esa"],
)
def test_a_trace_names_what_a_block_chose_together(method: Method, first: int, size: int, most: int) -> None:
    trace = lce.load("demo", method=method, block=20).trace(list(range(2, 102)))
    assert (trace.chunk_size, trace.first) == (size, first)
    chosen = trace.chosen[0][:, 80:]  # the last block's, before its local window
    assert chosen.shape[-1] == 3
    assert ((chosen >= (0 if size > 1 else 4)) & (chosen < most)).all()
    assert (chosen == chosen[:1, :1]).all(), "in all heads"
    assert (chosen.diff(dim=-1) > 0).all()


def test_lm_infinite_holds_the_middle_back_to_a_layer() -> None:
    q, k, v = vectors(1, 4, 2, 150, 8)
    without, with_it, later = (
        run(LMInfinite(sinks=2, local=12, **knobs), q, k, v, [150], window=WINDOW)
        for knobs in ({}, {"top_k": 4}, {"top_k": 4, "from_layer": 1})
    )
    assert (later - without).abs().max() == 0
    assert (with_it - without).abs().max() > 1e-2


def drawn(**knobs: object) -> Tensor:
    """What the last query of 32 heads chooses of 20 random chunks: `[32, K]`."""
    found: list[Tensor] = []
    method = make("random", {"chunk_size": 2, "chunks": 7, "keep_first": False, "keep_last": False, **knobs})
    run(method, *vectors(0, 32, 32, 41, 4), [41], window=16, note=lambda _, chosen: found.append(chosen))
    return found[0][:, -1]


def test_random_draws_are_even_and_depend_on_the_seed() -> None:
    chosen = drawn()
    assert chosen.shape == (32, 6)
    counts = torch.bincount(chosen.flatten(), minlength=20)
    assert counts.min() >= 2  # 9.6 each on average
    assert counts.max() <= 22
    assert len({tuple(row) for row in chosen.tolist()}) > 28, "heads draw on their own"
    assert torch.equal(chosen, drawn())
    assert not torch.equal(chosen, drawn(seed=1))
    assert ((drawn(top_p=0.11) >= 0).sum(-1) == 3).all(), "a share of 20 chunks"


def test_no_key_answers_better_than_its_page_of_quest_promises() -> None:
    """The score is an upper bound of `q · k`, and is reached where a page has one key."""
    q, k, v = vectors(1, 8, 2, 60, 16)
    pages = k.unflatten(1, (12, 5))
    bounds: Any = Bounds()
    step = SimpleNamespace(decoding=False)
    score = bounds.score(q, bounds.summarise(q[:, :0], pages, v.unflatten(1, (12, 5)), step), step, 0)
    logits = torch.einsum("htd,hmld->html", q, pages.repeat_interleave(4, 0))
    assert (logits.amax(-1) <= score + 1e-4).all()
    single = bounds.summarise(q[:, :0], k[:, :, None], v[:, :, None], step)
    exact = q @ k.repeat_interleave(4, 0).mT
    torch.testing.assert_close(bounds.score(q, single, step, 0), exact, rtol=0, atol=1e-4)


def test_the_first_layers_of_quest_attend_everything() -> None:
    q, k, v = vectors(2, 4, 2, 300, 16)
    full, dense, chosen = (
        lce.methods.run(method, q, k, v, window=64) for method in ("full", Quest(dense_layers=1), Quest(dense_layers=0))
    )
    assert torch.equal(dense, full)
    assert not torch.allclose(chosen, full, atol=1e-2)


def test_quest_keeps_two_numbers_a_channel_and_page() -> None:
    kept = Quest().resolve(64).state(CacheLayout(1, 4, 2, 16, torch.float32, torch.device("cpu")))
    assert {name: state.most_bytes(16_000, 512) for name, state in kept.items()} == {"summaries": 1500 * 2 * 2 * 16 * 4}


# LongHeads


def choices(method: LongHeads, n: int, blocks: list[int]) -> tuple[Tensor, Tensor]:
    """The output, and the chunks that each query of each head chose, `[H, N, K]`."""
    seen: list[Tensor] = []
    out = run(method, *vectors(11, 4, 2, n, 8), blocks, window=WINDOW, note=lambda _, chosen: seen.append(chosen))
    most = max(chosen.shape[-1] for chosen in seen)
    padded = [torch.nn.functional.pad(chosen, (0, most - chosen.shape[-1]), value=-1) for chosen in seen]
    return out, torch.cat(padded, dim=1)


def test_random_choices_do_not_depend_on_blocks() -> None:
    method = LongHeads(chunk_size=4, rank="random")
    whole, chosen = choices(method, 200, [200])
    out, found = choices(method, 200, [57, 64, 1, 1, 77])
    assert torch.equal(found[:, -150:], chosen[:, -150:])
    assert (out - whole).abs().max() <= 1e-4
    assert not torch.equal(chosen, choices(LongHeads(chunk_size=4), 200, [200])[1])
    assert not torch.equal(chosen[0], chosen[2])


def test_random_choices_are_placed_as_any_others() -> None:
    method = LongHeads(chunk_size=4, chunks=5, rank="random")
    out, chosen = choices(method, 120, [120])
    tables = oracle.placed(4, 120, 4, lambda h, i: [c for c in chosen[h, i].tolist() if c >= 0])
    assert (out - oracle.attention(*vectors(11, 4, 2, 120, 8), tables, oracle.Setting(WINDOW))).abs().max() <= 1e-4
