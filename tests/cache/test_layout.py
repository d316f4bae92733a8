"""Every byte count: budgets hold, the least one works, what cannot fit is refused, plans equal what is really held."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lce.attention import Attention
from lce.cache.disk import Disk
from lce.cache.kv import KVCache
from lce.cache.layout import AccessPattern, Budgets, CacheLayout, FileLayout, segment_of
from lce.cache.limits import Limits
from lce.cache.pool import Host, power_of_two, slab_bytes, slab_slots
from lce.cache.tier import UNBOUNDED
from lce.cache.tiers import TierStack
from lce.errors import CapacityError
from lce.methods import Driver, Rope, RopeConfig, make
from lce.sizes import enough_text
from tests.depth import pairs
from tests.late import LateDevice, disks_of, no_gpu
from tests.running import assert_are, cut, keys_of, vectors

CPU = torch.device("cpu")
LAYOUT = CacheLayout(3, 4, 2, 4, torch.float32, CPU, AccessPattern(8))
GPU = replace(LAYOUT, device=torch.device("cuda"))
CHUNK = LAYOUT.token_bytes * LAYOUT.chunk_size
KV_DTYPES = pytest.mark.parametrize("kv_dtype", ["auto", "int8"])


def with_host(layout: CacheLayout, host: int, folder: Path | None = None) -> CacheLayout:
    return replace(layout, budgets=Budgets(host=host, spill_dir=folder))


def read(cache: KVCache, keys: Tensor, start: int, stop: int) -> None:
    size, n_heads = cache.layout.chunk_size, cache.layout.n_kv_heads
    cache.reserve(stop)
    for layer, k in zip(cache.layers, keys, strict=True):
        layer.write(k[:, start:stop], -k[:, start:stop])
        for _ in layer.tiles(torch.arange(stop // size).expand(n_heads, 1, -1)):
            pass
        index = torch.arange(0, stop, 3)
        assert_are(layer.tokens(index), k[:, index])
    cache.commit()


def in_memory(cache: KVCache) -> int:
    """Bytes of keys and values in the first memory, whether or not in use."""
    buffers = sum(layer.buffer.k.nbytes + layer.buffer.v.nbytes for layer in cache.layers)
    return buffers + sum(stack.top.n_bytes for stack in cache.stacks)


def test_sizes_of_8_bits_on_the_device() -> None:
    """By hand: 2 KV heads of 4 numbers, 3 layers: 4 bytes and a scale for each key and each value."""
    layout = replace(LAYOUT, kv_dtype="int8-device")
    assert layout.token_bytes == 3 * 2 * 2 * (4 + 4)
    assert layout.page_bytes == layout.format.page_bytes == 8 * 2 * 2 * (4 + 4)
    cache = KVCache.empty(layout, 16)
    assert in_memory(cache) == Limits(layout).needs(16)["device"] == 16 * layout.token_bytes


def test_sizes_of_packed_pages() -> None:
    """By hand: 2 KV heads of 4 numbers. A row has 8 keys, 8 values and 2 scales; a page has 2 more."""
    layout = replace(LAYOUT, kv_dtype="int8")
    found = layout.format
    assert (found.row_bytes, found.page_rows, found.page_bytes) == (8 + 8 + 2 * 4, 8 + 2, 24 * 10)
    assert layout.page_bytes == LAYOUT.page_bytes == LAYOUT.format.page_bytes
    assert Limits(layout).n_pages(16) * layout.format.page_bytes == 2 * 3 * 240
    apart = replace(layout, access=AccessPattern(8, per_head=True))
    assert (apart.format.row_bytes, apart.format.page_bytes) == (4 + 4 + 4 + 4, 160), "rows are whole words of 8 bytes"
    large = replace(layout, n_kv_heads=8, head_dim=128, dtype=torch.bfloat16, access=AccessPattern(256))
    assert 0.5 < large.format.page_bytes / large.page_bytes < 0.53
    assert [layout.old(n) for n in (0, 7, 8, 9, 24)] == [0, 0, 8, 8, 24]
    assert replace(layout, access=AccessPattern(8, local=5)).old(20) == 8
    assert FileLayout(layout, 21).n_rows == 3 * 2 * 10, "the last 5 tokens are among what is small"


def test_spans_are_cut_at_whole_chunks() -> None:
    for read_size, segment in ((1, 8), (8, 8), (15, 8), (24, 24), (31, 24)):
        assert segment_of(replace(LAYOUT, read_size=read_size)) == segment
    layer = KVCache.empty(replace(LAYOUT, read_size=24)).layers[0]
    assert (list(layer.segments(5, 60)), list(layer.segments(24, 48))) == ([(5, 24), (24, 48), (48, 60)], [(24, 48)])
    assert list(layer.segments(7, 7)) == []


@given(data=st.data(), sinks=st.integers(0, 20), local=st.integers(0, 20), block=st.integers(1, 20), each=st.booleans())
@settings(max_examples=10, deadline=None)
@pytest.mark.slow
def test_the_least_budget_is_the_least(data: st.DataObject, sinks: int, local: int, block: int, each: bool) -> None:
    n_layers, n_kv_heads = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 4]))
    access = AccessPattern(data.draw(st.integers(1, 9)), sinks, local, each)
    plain = CacheLayout(n_layers, n_kv_heads, n_kv_heads, 4, torch.float32, CPU, access, block=block)
    with TemporaryDirectory() as folder:
        least = Limits(plain).least_budget
        layout = with_host(plain, least, Path(folder))
        n = least // layout.token_bytes + 40
        keys, cache = keys_of(layout, n), KVCache.empty(layout)
        for start in range(0, n, block):
            read(cache, keys, start, min(start + block, n))
            assert in_memory(cache) <= least
        assert cache.stacks
        for layer, k in zip(cache.layers, keys, strict=True):
            assert torch.equal(layer.span(0, n)[0], k)
        said = f"^a budget of .*; give --kv-host-budget {enough_text(least)} or more, or"
        with pytest.raises(CapacityError, match=said):
            KVCache.empty(with_host(plain, least - 1, Path(folder))).reserve(n)


def test_what_fits_is_not_tiered(tmp_path: Path) -> None:
    for n_chunks in range(7, 12):
        layout = with_host(LAYOUT, n_chunks * CHUNK, tmp_path)
        assert Limits(layout).resident_tokens == n_chunks * 8
        for n, fits in ((n_chunks * 8, True), (n_chunks * 8 + 1, False)):
            cache = KVCache.empty(layout, n)
            assert (not cache.stacks) is fits
            assert cache.bytes_by_tier["host"] == 0
            assert bool(cache.traffic) is not fits
    assert Limits(with_host(LAYOUT, 10 * CHUNK - 1)).resident_tokens == 72
    assert Limits(LAYOUT).resident_tokens == UNBOUNDED


def test_where_there_is_one_memory_the_smaller_budget_counts() -> None:
    def budget(layout: CacheLayout, device: int | None = None, host: int | None = None) -> int | None:
        return Limits(replace(layout, budgets=Budgets(device, host))).budget

    assert budget(LAYOUT, device=5, host=9) == budget(LAYOUT, device=9, host=5) == 5
    assert budget(LAYOUT, device=5) == budget(LAYOUT, host=5) == 5
    assert budget(LAYOUT) is None
    assert budget(GPU, device=9, host=5) == 9
    assert budget(GPU, host=5) is None


def test_without_a_folder_a_text_that_does_not_fit_is_refused() -> None:
    cache = KVCache.empty(with_host(replace(LAYOUT, block=4), 12 * CHUNK))
    cache.reserve(96)
    said = (
        r"^97 tokens need 19.5 KiB for keys and values, and the budget is 18.0 KiB: 96 tokens; give --spill-dir, or a"
    )
    with pytest.raises(CapacityError, match=said + r" larger budget\Z"):
        cache.reserve(97)
    read(cache, keys_of(LAYOUT, 96), 0, 96)


@KV_DTYPES
@pytest.mark.parametrize("chunks", [0, 3, 10])
@pytest.mark.covering
def test_reserved_space_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: int, kv_dtype: str) -> None:
    """Reading that has begun does not fail for lack of disk space, nor does its first copy."""
    layout = replace(LAYOUT, access=AccessPattern(8, 3, 9, per_head=True), block=10, kv_dtype=kv_dtype)
    layout = with_host(layout, Limits(layout).least_budget + chunks * CHUNK, tmp_path)
    cache = KVCache.empty(layout, 200)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("more space was asked for"))
    keys = keys_of(layout, 200)
    for start in range(0, 200, 10):
        read(cache, keys, start, start + 10)
    assert cache.stacks
    copy = cache.fork()
    for layer, k in zip(copy.layers, keys, strict=True):
        assert torch.equal(layer.span(0, 200)[0], k)


@pytest.fixture
def _no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu(monkeypatch)


@pytest.mark.usefixtures("_no_gpu_needed")
@pytest.mark.parametrize(
    ("host", "expected"),
    [(None, [("device", 2), ("host", UNBOUNDED)]), (3 * CHUNK, [("device", 2), ("host", 9)]), (0, [("device", 2)])],
)
def test_tiers_beside_a_gpu(host: int | None, expected: list[tuple[str, int]], tmp_path: Path) -> None:
    """Where the host may hold nothing, the file is below the device."""
    layout = replace(GPU, block=8)
    layout = replace(layout, budgets=Budgets(Limits(layout).least_budget + CHUNK // 3, host, tmp_path))
    tiers = TierStack.empty(layout, 1000, None)
    assert [(pool.name, pool.max_slots) for pool in tiers.pools] == expected
    assert isinstance(tiers.bottom, Disk)
    assert [tier.name for tier in tiers] == [*(name for name, _ in expected), "disk"]


@pytest.mark.usefixtures("_no_gpu_needed")
def test_a_host_that_cannot_hold_what_a_gpu_does_not() -> None:
    layout = replace(GPU, budgets=Budgets(20 * CHUNK, 30 * CHUNK))
    assert [pool.max_slots for pool in TierStack.empty(layout, 240, None).pools] == [20 * 3 - 6, 90]
    with pytest.raises(CapacityError, match=r"^241 tokens need .*, and the budget is 45\.0 KiB: 240 tokens; give"):
        TierStack.empty(layout, 241, None)
    assert disks_of(TierStack.empty(replace(layout, budgets=Budgets(20 * CHUNK)), 100_000, None)) == []


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dim", [4, 80])
def test_host_slabs_are_powers_of_two_in_the_budget(monkeypatch: pytest.MonkeyPatch, dim: int, kv_dtype: str) -> None:
    """Half of what is left behind whole slabs is used at least; one page more would take more than the budget."""
    plain = replace(GPU, head_dim=dim, kv_dtype=kv_dtype)
    page = plain.format.page_bytes
    for slab in (1, 16 * page, 100 * page):
        monkeypatch.setattr("lce.cache.pool.SLAB", power_of_two(slab))
        for budget in (0, 1, page - 1, page, 5 * page, 100 * page, 1000 * page + 7):
            layout = replace(plain, budgets=Budgets(host=budget))
            slots, size = Host.limit(layout), slab_bytes(layout)
            assert size == power_of_two(size) >= page
            assert Host.bytes_for(layout, slots) <= budget < Host.bytes_for(layout, slots + 1)
            used = slots // slab_slots(layout) * size + slots % slab_slots(layout) * page
            assert used >= budget // size * size + max(0, budget % size // 2 - page)
            assert Host.bytes_for(layout, 0) == 0
        unbounded = replace(plain, budgets=Budgets())
        assert Host.bytes_for(unbounded, slab_slots(layout) + 1) == 2 * size


# Plans: what is needed is what is held.
LENGTHS = [7, 100, 231, 300]


@pytest.mark.parametrize(("n", "apart", "kv_dtype"), pairs(LENGTHS, [False, True], ["auto", "int8"]), ids=str)
@pytest.mark.covering
def test_what_is_needed_on_a_cpu_is_what_is_held(tmp_path: Path, n: int, apart: bool, kv_dtype: str) -> None:
    layout = replace(LAYOUT, access=AccessPattern(8, 3, 9, apart), block=10, kv_dtype=kv_dtype)
    budget, keys = Limits(layout).least_budget + 3 * CHUNK + 5, keys_of(layout, n)
    for folder in (None, tmp_path):
        planned = with_host(layout, budget, folder)
        needs = Limits(planned).needs(n)
        assert sorted(needs) == (["device"] if folder is None else ["device", "disk"])
        if planned.whole_chunks(n) > Limits(planned).resident_tokens and folder is None:
            assert needs["device"] == planned.whole_chunks(n) * planned.token_bytes > budget
            continue
        cache = KVCache.empty(planned, n)
        for start in range(0, n, 10):
            read(cache, keys, start, min(start + 10, n))
        assert in_memory(cache) == needs["device"] <= budget
        assert cache.bytes_by_tier["disk"] <= cache.bytes_reserved == needs.get("disk", 0)


@pytest.mark.parametrize(
    ("n", "host", "folder", "kv_dtype"), pairs(LENGTHS, [None, 0, 5, 100], [False, True], ["auto", "int8"]), ids=str
)
@pytest.mark.covering
def test_what_is_needed_beside_a_gpu_is_at_least_what_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int, host: int | None, folder: bool, kv_dtype: str
) -> None:
    no_gpu(monkeypatch)
    layout = LateDevice(3, 4, 2, 4, torch.float32, CPU, AccessPattern(8, 3, 9), block=10, kv_dtype=kv_dtype)
    budgets = Budgets(Limits(layout).least_budget + 2 * CHUNK, host and host * CHUNK, tmp_path if folder else None)
    layout = replace(layout, budgets=budgets)
    keys, needs = keys_of(layout, n), Limits(layout).needs(n)
    try:
        cache = KVCache.empty(layout, n)
    except CapacityError:
        assert needs["host"] > (budgets.host or 0)
        return
    for start in range(0, n, 10):
        read(cache, keys, start, min(start + 10, n))
    held = cache.bytes_by_tier
    assert in_memory(cache) == needs["device"]
    assert held["host"] <= needs["host"]
    assert held["disk"] <= cache.bytes_reserved == needs.get("disk", 0)
    if host is None and cache.stacks:
        assert needs["host"] <= 3 * (held["host"] + 16 * layout.page_bytes)


METHODS = {
    **{name: {} for name in ("full", "rerope", "self_extend", "streaming")},
    "lm_infinite": {"top_k": 3},
    "longheads": {"chunk_size": 4, "chunks": 6},
    "quest": {"page": 4, "dense_layers": 0},
    "reattention": {"span": 4},
    "infllm": {"block_size": 4, "sinks": 4, "local": 10, "top_k": 6, "repr_tokens": 2},
    "esa": {"sinks": 4, "local": 10, "top_k": 24, "eps": 2, "compress": "pca", "low_dim": 8},
}


@pytest.mark.parametrize("block", [1, pytest.param(7, marks=pytest.mark.slow), 64])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.covering
def test_what_a_method_keeps_is_bounded_before_it_is_read(name: str, block: int) -> None:
    method = make(name, METHODS[name]).resolve(32)
    q, k, v = vectors(0, 4, 2, 200, 16)
    layout = CacheLayout(1, 4, 2, 16, torch.float32, CPU, method.access, block=max(block, 40), make_state=method.state)
    cache, driver = KVCache.empty(layout), Driver(method, Attention.choose("torch"), 32, 2)
    rope, start, most = Rope(RopeConfig(), 16, 32, 200), 0, 0
    for size in (40, *cut(160, block)):
        driver.attend(cache, rope, *(x[:, start : start + size] for x in (q, k, v)))
        start += size
        held = sum(state.n_bytes for state in cache.layers[0].state.values())
        assert held <= Limits(layout).state_bytes(start)
        most = max(most, held)
    assert Limits(layout).state_bytes(200) <= 2 * most
    assert Limits(layout).state_bytes(0) <= Limits(layout).state_bytes(1) <= Limits(layout).state_bytes(200)
    assert Limits(replace(layout, n_layers=5)).state_bytes(200) == 5 * Limits(layout).state_bytes(200)


def test_a_folder_without_the_space_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = replace(LAYOUT, block=4)
    cache = KVCache.empty(with_host(layout, Limits(layout).least_budget, tmp_path))
    keys = keys_of(LAYOUT, 200)
    read(cache, keys, 0, 16)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(CapacityError, match="No space left on device"):
            cache.reserve(200)
    assert not cache.stacks
    read(cache, keys, 16, 20)
    for start in range(20, 200, 4):
        read(cache, keys, start, start + 4)
