"""Budgets: what they allow is kept to, the least of them works, and what cannot fit is refused before it is begun."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lce.cache.tiering import Budgets, CacheShape, Tiering
from torch import Tensor

from lce.cache.kv import KVCache
from lce.cache.movers import Mover
from lce.errors import CapacityError
from lce.methods import make

CPU = torch.device("cpu")
SHAPE = CacheShape(n_layers=3, n_kv_heads=2, head_dim=4, chunk_size=8, dtype=torch.float32, device=CPU)
GPU = replace(SHAPE, device=torch.device("cuda"))
CHUNK = SHAPE.token_bytes * SHAPE.chunk_size


@dataclass(frozen=True)
class Reaching:
    pinned: tuple[int, int]
    apart: bool


def text(n: int, shape: CacheShape) -> Tensor:
    """Keys `[layers, G, N, D]`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape.n_layers, shape.n_kv_heads, n, shape.head_dim, generator=generator)


def read(cache: KVCache, keys: Tensor, start: int, stop: int) -> None:
    """A pass: reserve, write, look at every chunk and at some tokens, commit."""
    size, n_heads = cache.shape.chunk_size, cache.shape.n_kv_heads
    cache.reserve(stop)
    for layer, k in zip(cache.layers, keys, strict=True):
        layer.write(k[:, start:stop], -k[:, start:stop])
        for _ in layer.rounds(torch.arange(stop // size).expand(n_heads, 1, -1)):
            pass
        index = torch.arange(0, stop, 3)
        found = layer.tokens(index)
        assert torch.equal(found[0], k[:, index])
        assert torch.equal(found[1], -k[:, index])
    cache.commit()


def in_memory(cache: KVCache) -> int:
    """Bytes of keys and values in the first memory, whether or not in use."""
    buffers = sum(layer.k_buffer.nbytes + layer.v_buffer.nbytes for layer in cache.layers)
    return buffers + (0 if cache.archive is None else cache.archive.pools[0].n_bytes)


@given(
    data=st.data(), sinks=st.integers(0, 20), local=st.integers(0, 20), block=st.integers(1, 20), apart=st.booleans()
)
@settings(max_examples=15, deadline=None)
def test_the_least_budget_works_and_one_byte_less_is_refused(
    data: st.DataObject, sinks: int, local: int, block: int, apart: bool
) -> None:
    numbers = [data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 4])), 4, data.draw(st.integers(1, 9))]
    shape = CacheShape(*numbers, torch.float32, CPU)
    with TemporaryDirectory() as folder:
        tiering = Tiering(spill_dir=Path(folder), sinks=sinks, local=local, block=block, apart=apart)
        least = tiering.least(shape)
        n = least // shape.token_bytes + 40
        keys = text(n, shape)
        cache = KVCache(shape, tiering=replace(tiering, host=least))
        for start in range(0, n, block):
            read(cache, keys, start, min(start + block, n))
            assert in_memory(cache) <= least
        assert cache.archive is not None
        for layer, k in zip(cache.layers, keys, strict=True):
            assert torch.equal(layer.span(0, n)[0], k)
        with pytest.raises(CapacityError, match=f"^a budget of {least - 1} bytes .*; expected {least} or more, or a s"):
            KVCache(shape, tiering=replace(tiering, host=least - 1)).reserve(n)


@pytest.mark.parametrize("chunks", [0, 1, 5, 40])
def test_a_budget_is_kept_to(tmp_path: Path, chunks: int) -> None:
    """However long the text, and whether it is known from the start or not."""
    tiering = Tiering(spill_dir=tmp_path, sinks=3, local=9, block=10)
    tiering = replace(tiering, host=tiering.least(SHAPE) + chunks * CHUNK + 5)
    keys = text(240, SHAPE)
    for known in (0, 240):
        cache = KVCache(SHAPE, known, tiering)
        for start in range(0, 240, 10):
            read(cache, keys, start, start + 10)
            assert in_memory(cache) <= tiering.host
    assert (cache.archive is None) == (chunks == 40)


def test_what_fits_is_not_tiered(tmp_path: Path) -> None:
    for n_chunks in range(7, 12):
        tiering = Tiering(host=n_chunks * CHUNK, spill_dir=tmp_path)
        assert tiering.resident_tokens(SHAPE) == n_chunks * 8
        for n, fits in ((n_chunks * 8, True), (n_chunks * 8 + 1, False)):
            cache = KVCache(SHAPE, n, tiering)
            assert (cache.archive is None) is fits
            assert cache.bytes_by_tier["host"] == 0
            assert bool(cache.traffic) is not fits
    assert Tiering(host=10 * CHUNK - 1).resident_tokens(SHAPE) == 72
    assert Tiering().resident_tokens(SHAPE) is None


def test_where_there_is_one_memory_the_smaller_budget_counts() -> None:
    assert Tiering(device=5, host=9).budget(SHAPE) == Tiering(device=9, host=5).budget(SHAPE) == 5
    assert Tiering(device=5).budget(SHAPE) == Tiering(host=5).budget(SHAPE) == 5
    assert Tiering().budget(SHAPE) is None
    assert Tiering(device=9, host=5).budget(GPU) == 9
    assert Tiering(host=5).budget(GPU) is None


def test_what_a_method_reaches_is_kept_near() -> None:
    tiering = Tiering.of(Budgets(host=7, spill_dir=Path("x")), Reaching((3, 40), True), 16)
    assert tiering == Tiering(None, 7, Path("x"), sinks=3, local=40, block=16, apart=True)
    assert (tiering.n_pinned(SHAPE), tiering.recent_tokens(SHAPE)) == (1, 64)
    assert (tiering.pages(SHAPE).n_groups, tiering.pages(SHAPE).heads) == (2, 1)
    together = Tiering.of(Budgets(), Reaching((0, 0), False), 1)
    assert (together.n_pinned(SHAPE), together.pages(SHAPE).n_groups, together.pages(SHAPE).heads) == (0, 1, 2)
    longheads = make("longheads", {"chunk_size": 8}).resolve(64)
    assert Tiering.of(Budgets(), longheads, 4) == Tiering(sinks=8, local=8, block=4, apart=True)


def test_without_a_folder_a_text_that_does_not_fit_is_refused() -> None:
    tiering = Tiering(host=12 * CHUNK, block=4)
    cache = KVCache(SHAPE, tiering=tiering)
    cache.reserve(96)
    with pytest.raises(
        CapacityError,
        match=rf"^97 tokens need {13 * CHUNK} bytes of keys and values, and the budget is {12 * CHUNK}: 96 tokens; "
        r"give --spill-dir, or a larger budget\Z",
    ):
        cache.reserve(97)
    read(cache, text(96, SHAPE), 0, 96)


def test_a_folder_without_the_place_is_refused_and_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiering = Tiering(spill_dir=tmp_path, block=4)
    cache = KVCache(SHAPE, tiering=replace(tiering, host=tiering.least(SHAPE)))
    keys = text(200, SHAPE)
    read(cache, keys, 0, 16)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CapacityError, match="No space left on device"):
            cache.reserve(200)
    assert cache.archive is None
    read(cache, keys, 16, 20)
    for start in range(20, 200, 4):
        read(cache, keys, start, start + 4)


@pytest.mark.parametrize("chunks", [0, 3, 10])
def test_the_place_that_was_reserved_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """A reading that was begun does not end for want of disk, nor does its first copy."""
    tiering = Tiering(spill_dir=tmp_path, sinks=3, local=9, block=10, apart=True)
    tiering = replace(tiering, host=tiering.least(SHAPE) + chunks * CHUNK)
    cache = KVCache(SHAPE, 300, tiering)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("more place was asked for"))
    keys = text(300, SHAPE)
    for start in range(0, 300, 10):
        read(cache, keys, start, start + 10)
    copy = cache.copy()
    for layer, k in zip(copy.layers, keys, strict=True):
        assert torch.equal(layer.span(0, 300)[0], k)


# A machine with a GPU, without one: what its tiers are.


@pytest.fixture
def _no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lce.cache.tiering.Cuda", lambda device: Mover())
    monkeypatch.setattr("lce.cache.tiering.Pinned", Mover)


@pytest.mark.usefixtures("_no_gpu_needed")
@pytest.mark.parametrize(
    ("host", "expected"),
    [(None, [("device", 2), ("host", None)]), (3 * CHUNK, [("device", 2), ("host", 9)]), (0, [("device", 2)])],
)
def test_tiers_beside_a_gpu(host: int | None, expected: list[tuple[str, int | None]], tmp_path: Path) -> None:
    """Where the host may hold nothing, the file is next to the device."""
    tiering = Tiering(host=host, spill_dir=tmp_path, block=8)
    tiering = replace(tiering, device=tiering.least(GPU) + CHUNK // 3)
    archive = tiering.archive(GPU, 1000)
    assert [(pool.name, pool.limit) for pool in archive.pools] == expected
    assert archive.file is not None


@pytest.mark.usefixtures("_no_gpu_needed")
def test_a_host_that_cannot_hold_what_a_gpu_does_not() -> None:
    tiering = Tiering(device=20 * CHUNK, host=30 * CHUNK)
    assert [pool.limit for pool in tiering.archive(GPU, 240).pools] == [20 * 3 - 6, 90]
    with pytest.raises(CapacityError, match=f"^241 tokens need .*, and the budget is {30 * CHUNK}: 240 tokens; give"):
        tiering.archive(GPU, 241)
    assert replace(tiering, host=None).archive(GPU, 100_000).file is None
