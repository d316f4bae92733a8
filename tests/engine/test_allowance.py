"""Contexts that were admitted fit together: what one was promised is not available to another."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import lce
from lce import system
from lce.engine.planning import ALLOWANCE
from lce.errors import CapacityError
from tests.checkpoints import tokens

TOKEN = 2 * 2 * 2 * 16 * 4  # bytes of keys and values in the tiny model
CHUNK = 256 * TOKEN  # what memory is counted in


@pytest.fixture
def engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> lce.Engine:
    """An engine where memory for three chunks and a half is free, whatever is used."""
    gc.collect()  # contexts of other tests
    monkeypatch.setattr(system, "free_memory", lambda device: 3 * CHUNK + CHUNK // 2)
    return lce.load(tiny_model)


def test_two_contexts_that_do_not_fit_together(engine: lce.Engine, tiny_model: Path) -> None:
    first = engine.new_context(512)
    told = "^512 tokens need 256.0 KiB of memory, and 192.0 KiB is available; the longest that fits is 256 tokens;"
    with pytest.raises(CapacityError, match=told):
        engine.new_context(512)
    with pytest.raises(CapacityError, match=told):
        lce.load(tiny_model, "streaming", window=4096).new_context(512)
    second = engine.new_context(256)
    first.close()
    third = engine.new_context(512)
    with pytest.raises(CapacityError, match="no text fits"):
        engine.generate(tokens(3), max_tokens=3)
    del second, third
    engine.generate(tokens(300), max_tokens=3)
    engine.new_context(768).close()


def test_what_a_context_was_promised_stays_its_own(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(20), length=768)
    with pytest.raises(CapacityError, match="the longest that fits is 256 tokens"):
        engine.new_context(300)
    engine.prefill(tokens(700), context=context)
    assert ALLOWANCE.promised(context.cache) == 768
    with pytest.raises(CapacityError, match=r"the longest that fits is 1,[0-9]* tokens"):
        engine.prefill(tokens(2000), context=context)
    assert (len(context), ALLOWANCE.promised(context.cache)) == (720, 768)


def test_a_call_that_fails_gives_back(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(20))

    def fails(done: int, total: int) -> None:
        raise ArithmeticError

    for call in (
        lambda: engine.prefill(tokens(600), context=context, progress=fails),
        lambda: engine.generate(tokens(500), max_tokens=100, context=context, progress=fails),
        lambda: engine.prefill(tokens(600), progress=fails),
    ):
        with pytest.raises(ArithmeticError):
            call()
        gc.collect()
        assert ALLOWANCE.promised(context.cache) == 20
        engine.new_context(768).close()


def test_a_fork_counts_what_it_adds(engine: lce.Engine) -> None:
    context = engine.prefill(tokens(700))
    forks = [context.fork() for _ in range(4)]
    for fork in forks[:3]:
        engine.prefill(tokens(2), context=fork, length=1000)  # one chunk more than the fork has
    with pytest.raises(CapacityError, match="the longest that fits is 768 tokens"):
        engine.prefill(tokens(2), context=forks[3], length=1000)
    forks[0].close()
    engine.prefill(tokens(2), context=forks[3], length=1000)


def test_bytes_that_a_file_has_reserved_are_not_counted_twice(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "free_disk", lambda folder: 9 * CHUNK)
    method = lce.methods.LongHeads(chunk_size=8)
    options: dict[str, Any] = {"block": 16, "kv_host_budget": 100_000, "spill_dir": tmp_path}
    spilling = lce.load(tiny_model, method, **options)
    contexts = [spilling.new_context(2000) for _ in range(2)]
    assert all(context.cache.bytes_reserved > 1000 * TOKEN for context in contexts)


def test_many_threads_ask_at_once(engine: lce.Engine) -> None:
    def ask(_: int) -> lce.Context | None:
        try:
            return engine.new_context(256)
        except CapacityError:
            return None

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(32), timeout=60))
    assert sum(context is not None for context in found) == 3
