"""Profiles: times that add up, and work that is what the definition says."""

import time
from pathlib import Path

import pytest

import lce
from lce import profiling
from lce.profiling import CATEGORIES, n_pairs, section, timed
from tests.checkpoints import tokens
from tests.command import within

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16  # of the tiny model, in float32
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * DIM * 4


def test_times_add_up_to_those_of_the_run(tiny_model: Path) -> None:
    engine = lce.load(tiny_model)
    expected = engine.generate(tokens(40), max_tokens=9)
    started = time.perf_counter()
    with lce.profiled(engine) as profile:
        found = engine.generate(tokens(40), max_tokens=9)
    elapsed = time.perf_counter() - started
    assert found.token_ids == expected.token_ids
    assert tuple(profile.seconds) == CATEGORIES
    assert found.stats.prefill_s + found.stats.decode_s < profile.total_s <= elapsed
    fused = {"norms", "activations"}  # where a kernel of products does them
    assert all(seconds > 0 for name, seconds in profile.seconds.items() if name not in fused)
    assert profile.calls > 9 * LAYERS * 6


def test_what_a_marked_call_spends_in_another_counts_once() -> None:
    @timed("products")
    def product() -> None:
        time.sleep(0.02)

    @timed("attention", lambda *_: time.sleep(0.05))
    def attention() -> None:
        time.sleep(0.01)
        product()

    with profiling.profiling(1, 1, lambda: None) as profile:
        attention()
        with pytest.raises(KeyError), section("cache"):
            raise KeyError
    attention()
    assert 0.01 <= profile.seconds["attention"] < 0.02 <= profile.seconds["products"] < 0.05
    assert profile.total_s < 0.05 + 0.03, "counting is booked nowhere"
    assert profile.calls == 2
    assert profiling._clock is None


def test_other_threads_are_not_timed(tiny_model: Path) -> None:
    engine = lce.load(tiny_model)
    with lce.profiled(engine) as profile:
        within(lambda: engine.prefill(tokens(20)))
    assert (profile.calls, profile.read_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("method", "n_attended", "n_summaries"),
    [
        (lce.methods.Full(), 67, 0),
        (lce.methods.LongHeads(chunk_size=8, chunks=3, share="layer"), 3 + 2 * 8, 4),  # its own chunk and two others
    ],
    ids=["full", "longheads"],
)
def test_a_decode_step_is_counted(tiny_model: Path, method: lce.Method, n_attended: int, n_summaries: int) -> None:
    engine = lce.load(tiny_model, method)
    context = engine.prefill(tokens(66))
    with lce.profiled(engine) as profile:
        engine.prefill([5], context=context)
    assert profile.read_bytes == n_attended * TOKEN_BYTES + n_summaries * LAYERS * HEADS * DIM * 4
    assert profile.attention_flops == LAYERS * 4 * HEADS * DIM * n_attended


@pytest.mark.parametrize("n_queries", [1, 2, 5])
@pytest.mark.parametrize("n_keys", [5, 9])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
def test_pairs(n_queries: int, n_keys: int, window: int | None) -> None:
    pairs = [
        (i, j)
        for i in range(n_keys - n_queries, n_keys)
        for j in range(n_keys)
        if j <= i and (window is None or i - j < window)
    ]
    assert n_pairs(n_queries, n_keys, True, window) == len(pairs)
    assert n_pairs(n_queries, n_keys, False) == n_queries * n_keys
