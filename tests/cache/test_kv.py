"""The KV cache: what is written is kept once it is committed, in place, and copies are their own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lce.cache.layer import LayerCache
from lce.cache.tiering import CacheShape
from torch import Tensor

from lce.cache.kv import KVCache

CPU = torch.device("cpu")
SHAPE = CacheShape(n_layers=3, n_kv_heads=2, head_dim=4, chunk_size=8, dtype=torch.float32, device=CPU)


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(2, n, 4, generator=torch.Generator().manual_seed(seed))


def write(cache: KVCache, n: int, seed: int = 0) -> None:
    for layer in cache.layers:
        layer.write(rows(n, seed + layer.index), -rows(n, seed + layer.index))


def append(cache: KVCache, n: int, seed: int = 0) -> None:
    write(cache, n, seed)
    cache.commit()


def held(layer: LayerCache, kind: str) -> Tensor:
    return layer.span(0, layer.stop)["kv".index(kind)]


def where(cache: KVCache) -> list[int]:
    return [buffer.data_ptr() for layer in cache.layers for buffer in (layer.k_buffer, layer.v_buffer)]


def test_what_is_appended_stands_in_order() -> None:
    cache = KVCache(SHAPE)
    for seed, n in enumerate((5, 1, 17)):
        append(cache, n, seed * 10)
    assert cache.length == 23
    for layer in cache.layers:
        expected = torch.cat([rows(n, seed * 10 + layer.index) for seed, n in enumerate((5, 1, 17))], dim=1)
        assert torch.equal(held(layer, "k"), expected)
        assert torch.equal(held(layer, "v"), -expected)


def test_the_block_under_way_is_seen_before_it_is_committed() -> None:
    cache = KVCache(SHAPE)
    append(cache, 5)
    write(cache, 3, 10)
    layer = cache.layers[1]
    assert (layer.length, layer.stop, cache.length) == (5, 8, 5)
    assert torch.equal(held(layer, "k"), torch.cat((rows(5, 1), rows(3, 11)), dim=1))
    cache.commit()
    assert (layer.length, layer.stop, cache.length) == (8, 8, 8)


def test_a_discarded_block_leaves_nothing() -> None:
    cache = KVCache(SHAPE)
    append(cache, 13)
    cache.layers[0].stage("kept", torch.ones(1))
    cache.commit()
    for layer in cache.layers[:2]:  # an interrupted pass reached two layers of three
        layer.write(rows(20, 50), rows(20, 51))
        layer.stage("kept", torch.zeros(1))
        layer.stage("new", torch.zeros(1))
    cache.discard()
    for layer in cache.layers:
        assert layer.length == layer.stop == 13
        assert torch.equal(held(layer, "k"), rows(13, layer.index))
        assert layer.chunks.length.tolist() == [8, 5]
    cache.commit()
    assert cache.length == 13
    assert list(cache.layers[0].state) == ["kept"]
    assert cache.layers[0].state["kept"] == 1
    append(cache, 4, 70)
    assert torch.equal(held(cache.layers[2], "k"), torch.cat((rows(13, 2), rows(4, 72)), dim=1))


def test_staged_state_takes_effect_with_the_commit() -> None:
    layer = KVCache(SHAPE).layers[0]
    layer.write(rows(3), rows(3))
    layer.stage("pending", torch.tensor(1))
    assert layer.state == {}
    layer.commit()
    assert layer.state == {"pending": torch.tensor(1)}


def test_appending_to_reserved_room_moves_nothing() -> None:
    cache = KVCache(SHAPE, capacity=100)
    before = where(cache)
    for _ in range(100):
        append(cache, 1)
    assert where(cache) == before
    append(cache, 5)  # the room is in whole chunks: 104
    assert where(cache) != before
    assert cache.length == 105


def test_reserving_keeps_what_is_there() -> None:
    cache = KVCache(SHAPE)
    append(cache, 13)
    cache.reserve(1000)
    before = where(cache)
    append(cache, 900, 10)
    assert where(cache) == before
    assert torch.equal(held(cache.layers[0], "k"), torch.cat((rows(13), rows(900, 10)), dim=1))
    cache.reserve(10)
    assert where(cache) == before


def test_growth_is_seldom_and_not_excessive() -> None:
    """A token at a time to 2,000: a dozen moves or so, and never more than half as much room again, in whole chunks."""
    cache = KVCache(SHAPE)
    moves, before = 0, where(cache)
    for n in range(1, 2001):
        append(cache, 1)
        moves += where(cache) != before
        before = where(cache)
        assert cache.layers[0].k_buffer.shape[1] <= max(8, n * 3 // 2 + 8)
    assert moves <= 16


@given(
    blocks=st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=12),
    capacity=st.integers(0, 60),
    size=st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_any_blocks_kept_or_discarded(blocks: list[tuple[int, bool]], capacity: int, size: int) -> None:
    shape = CacheShape(n_layers=1, n_kv_heads=2, head_dim=4, chunk_size=size, dtype=torch.float32, device=CPU)
    cache, kept = KVCache(shape, capacity), [rows(0)]
    layer = cache.layers[0]
    for seed, (n, keep) in enumerate(blocks):
        write(cache, n, seed)
        assert torch.equal(held(layer, "k"), torch.cat((*kept, rows(n, seed)), dim=1))
        if keep:
            cache.commit()
            kept.append(rows(n, seed))
        else:
            cache.discard()
        assert torch.equal(held(layer, "k"), torch.cat(kept, dim=1))
        assert torch.equal(held(layer, "v"), -torch.cat(kept, dim=1))
        assert int(layer.chunks.length.sum()) == layer.length


def test_spans_are_views() -> None:
    cache = KVCache(SHAPE)
    append(cache, 20)
    layer = cache.layers[0]
    k, v = layer.span(8, 20)
    assert k.data_ptr() == layer.k_buffer[:, 8:].data_ptr()
    assert torch.equal(k, rows(20)[:, 8:])
    assert torch.equal(v, -rows(20)[:, 8:])


@pytest.mark.parametrize("n", [0, 5, 8, 20])
def test_a_copy_is_its_own(n: int) -> None:
    cache = KVCache(SHAPE, capacity=64)
    if n:
        append(cache, n)
    cache.layers[0].stage("pending", torch.ones(2))
    cache.commit()
    copy = cache.copy()
    assert copy.length == n
    assert not set(where(copy)) & set(where(cache)) or n == 0
    append(cache, 4, 20)
    append(copy, 6, 40)
    cache.layers[0].state["pending"].zero_()
    for ours, theirs in zip(cache.layers, copy.layers, strict=True):
        assert torch.equal(held(ours, "k"), torch.cat((rows(n, ours.index), rows(4, 20 + ours.index)), dim=1))
        assert torch.equal(held(theirs, "k"), torch.cat((rows(n, ours.index), rows(6, 40 + ours.index)), dim=1))
        assert ours.chunks.length.sum() == n + 4
        assert theirs.chunks.length.sum() == n + 6
    assert copy.layers[0].state["pending"].tolist() == [1, 1]


def test_a_copy_takes_only_what_is_committed() -> None:
    cache = KVCache(SHAPE, capacity=1000)
    append(cache, 20)
    copy = cache.copy()
    assert copy.layers[0].k_buffer.shape[1] == 24
    assert copy.bytes_by_tier["device"] < cache.bytes_by_tier["device"] / 20


def test_bytes_are_counted() -> None:
    assert SHAPE.token_bytes == 2 * 3 * 2 * 4 * 4
    cache = KVCache(SHAPE, capacity=64)
    held = cache.bytes_by_tier
    assert held == {"device": 64 * SHAPE.token_bytes, "host": 0, "disk": 0}
    append(cache, 20)
    with_rows = cache.bytes_by_tier["device"]
    assert held["device"] < with_rows < held["device"] + 3 * 16 * 64
    cache.layers[0].stage("pending", torch.zeros(10))
    cache.layers[1].chunks.add_summaries(torch.zeros(4, 2, 4))
    cache.commit()
    assert cache.bytes_by_tier["device"] == with_rows + 40 + 4 * 16 * 4 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_are_held_in_the_dtype_of_the_cache(dtype: torch.dtype) -> None:
    shape = CacheShape(n_layers=1, n_kv_heads=2, head_dim=4, chunk_size=8, dtype=dtype, device=CPU)
    cache = KVCache(shape)
    append(cache, 20)
    assert held(cache.layers[0], "k").dtype == held(cache.copy().layers[0], "v").dtype == dtype
    assert torch.equal(held(cache.layers[0], "k"), rows(20).to(dtype))


def test_layers_are_numbered() -> None:
    layers: list[LayerCache] = KVCache(SHAPE).layers
    assert [layer.index for layer in layers] == [0, 1, 2]
    assert KVCache(SHAPE).length == 0
