"""Profiles: times that add up, work that is what the definition says, and nothing left behind."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import lce
from lce.attention import Attention
from lce.cache.layer import LayerCache
from lce.engine.profile import CATEGORIES, HOOKS, n_pairs
from lce.models import layers
from tests.checkpoints import tokens

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
    assert found.stats.prefill_s + found.stats.decode_s < profile.total_s + profile.timers_s <= elapsed
    used = {name for name, seconds in profile.seconds.items() if seconds > 0}
    assert used == set(CATEGORIES) - {"selection"}
    assert profile.calls > 9 * LAYERS * 7


def test_what_a_timed_call_spends_in_another_counts_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow product makes products slow, and nothing else."""
    plain = layers.linear

    def slow(*args: Any, **options: Any) -> object:
        time.sleep(0.002)
        return plain(*args, **options)

    monkeypatch.setattr(layers, "linear", slow)
    engine = lce.load(tiny_model)
    with lce.profiled(engine) as profile:
        engine.prefill(tokens(8))
    n_products = LAYERS * 4 + 1
    assert profile.seconds["products"] >= n_products * 0.002
    assert profile.seconds["activations"] < 0.002


@pytest.mark.parametrize("name", ["full", "longheads"])
def test_nothing_is_left_behind(tiny_model: Path, name: str) -> None:
    engine = lce.load(tiny_model, name)
    before = [getattr(owner, each) for _, owner, names in HOOKS for each in names]
    own = dict(vars(type(engine.method)))

    def interrupted() -> None:
        with lce.profiled(engine):
            assert Attention.dense is not before[1]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [getattr(owner, each) for _, owner, names in HOOKS for each in names] == before
    assert dict(vars(type(engine.method))) == own
    assert "keep" not in vars(type(engine.method))


def test_other_threads_are_not_timed(tiny_model: Path) -> None:
    engine = lce.load(tiny_model)
    with lce.profiled(engine) as profile:
        thread = threading.Thread(target=engine.prefill, args=(tokens(20),))
        thread.start()
        thread.join(60)
    assert profile.calls == 0
    assert profile.read_bytes == 0


def test_a_decode_step_of_full_reads_all_keys_and_values(tiny_model: Path) -> None:
    engine = lce.load(tiny_model)
    context = engine.prefill(tokens(29))
    with lce.profiled(engine) as profile:
        engine.prefill([5], context=context)
    assert profile.read_bytes == 30 * TOKEN_BYTES
    assert profile.attention_flops == LAYERS * 4 * HEADS * DIM * 30


@pytest.mark.parametrize("block", [1, 7, 64])
def test_a_prefill_of_full_sees_each_pair_once(tiny_model: Path, block: int) -> None:
    engine = lce.load(tiny_model, block=block)
    with lce.profiled(engine) as profile:
        engine.prefill(tokens(50))
    assert profile.attention_flops == LAYERS * 4 * HEADS * DIM * 50 * 51 / 2


def test_a_chosen_chunk_counts_once_a_kv_head(tiny_model: Path) -> None:
    """With `share=layer` all heads choose the same chunks: two of 8 tokens, beside the own one."""
    method = lce.methods.LongHeads(chunk_size=8, chunks=3, share="layer")
    engine = lce.load(tiny_model, method)
    context = engine.prefill(tokens(66))
    with lce.profiled(engine) as profile:
        engine.prefill([5], context=context)
    own, chosen = 3, 2 * 8
    summaries = LAYERS * HEADS * DIM * 4 * 8  # eight complete chunks
    assert profile.read_bytes == (own + chosen) * TOKEN_BYTES + summaries
    assert profile.attention_flops == LAYERS * 4 * HEADS * DIM * (own + chosen)
    assert profile.seconds["selection"] > 0


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


def test_pages_that_come_back_are_the_caches_time(tiny_model: Path, tmp_path: Path) -> None:
    """`LayerCache.tiles` is a generator: what it does between two rounds is timed."""
    method = lce.methods.LongHeads(chunk_size=8, chunks=5)
    engine = lce.load(tiny_model, method, block=16, kv_host_budget="64KiB", spill_dir=tmp_path)
    context = engine.prefill(tokens(300))
    assert context.cache.tiers
    with lce.profiled(engine) as profile:
        engine.prefill([5], context=context)
    assert profile.seconds["cache"] > 0
    assert LayerCache.tiles.__name__ == "tiles"
