"""The KV cache: what is written is kept once it is committed, wherever it is, and copies are their own."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lce.cache.context_file import Draft, restored, write_rows
from lce.cache.kv import KVCache
from lce.cache.layer import LayerCache
from lce.cache.layout import AccessPattern, Budgets, CacheLayout, FileLayout
from lce.cache.limits import Limits
from lce.cache.method_state import MethodState, Staged, Summaries
from lce.errors import CapacityError, UsageError
from lce.sizes import size_text
from tests.running import assert_are, keys_of

CPU = torch.device("cpu")


def states(layout: CacheLayout) -> Mapping[str, MethodState]:
    return {"pending": Staged(lambda n_tokens, block: 8), "summaries": Summaries(32, layout.chunk_size)}


LAYOUT = CacheLayout(3, 4, 2, 4, torch.float32, CPU, AccessPattern(8))
WITH_STATE = replace(LAYOUT, make_state=states)
SMALL = replace(LAYOUT, access=AccessPattern(8, sinks=3, local=9), block=10)  # buffers of 32 tokens if `tight`


def tight(folder: Path, layout: CacheLayout = SMALL, chunks: int = 2) -> CacheLayout:
    """The layout with the least budget, and `chunks` chunks more, over a spill file."""
    more = chunks * layout.chunk_size * layout.token_bytes
    return replace(layout, budgets=Budgets(host=Limits(layout).least_budget + more, spill_dir=folder))


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(2, n, 4, generator=torch.Generator().manual_seed(seed))


def write(cache: KVCache, n: int, seed: int = 0) -> None:
    for layer in cache.layers:
        layer.write(rows(n, seed + layer.index), -rows(n, seed + layer.index))


def append(cache: KVCache, n: int, seed: int = 0) -> None:
    write(cache, n, seed)
    cache.commit()


def where(cache: KVCache) -> list[int]:
    return [buffer.data_ptr() for layer in cache.layers for buffer in (layer.buffer.k, layer.buffer.v)]


def staged(layer: LayerCache) -> Staged:
    return layer.kept(Staged, "pending")


def test_appending_to_reserved_space_moves_nothing() -> None:
    cache = KVCache.empty(LAYOUT, capacity=100)
    before = where(cache)
    for _ in range(100):
        append(cache, 1)
    assert where(cache) == before
    append(cache, 5)  # the space is in whole chunks: 104
    assert cache.length == 105
    moves, before = 0, where(cache)
    for n in range(106, 2001):
        append(cache, 1)
        moves += where(cache) != before
        before = where(cache)
        assert cache.layers[0].buffer.capacity <= n * 3 // 2 + 8
    assert moves <= 10, "growth is seldom"


@given(
    blocks=st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=12),
    capacity=st.integers(0, 60),
    size=st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_any_blocks_kept_or_discarded(blocks: list[tuple[int, bool]], capacity: int, size: int) -> None:
    layout = CacheLayout(1, 2, 2, 4, torch.float32, CPU, AccessPattern(size))
    cache, kept = KVCache.empty(layout, capacity), [rows(0)]
    layer = cache.layers[0]
    for seed, (n, keep) in enumerate(blocks):
        cache.begin()
        write(cache, n, seed)
        assert_are(layer.span(0, layer.stop), torch.cat((*kept, rows(n, seed)), dim=1))
        if keep:
            cache.commit()
            kept.append(rows(n, seed))
        else:
            cache.settle()
        assert_are(layer.span(0, layer.stop), torch.cat(kept, dim=1))


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache.empty(LAYOUT)
    append(cache, 13)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", Mock(side_effect=RuntimeError("DefaultCPUAllocator: can't allocate memory")))
        said = (
            r"^no memory for 1,000 tokens in the cache: 62.5 KiB a layer for keys and values; ask for fewer tokens, or "
        )
        with pytest.raises(CapacityError, match=said + r"give --kv-host-budget and --spill-dir\Z"):
            cache.reserve(1000)
        cache.begin()
        with pytest.raises(CapacityError):
            write(cache, 10)
    cache.settle()
    append(cache, 4, 70)
    assert_are(cache.layers[1].span(0, 17), torch.cat((rows(13, 1), rows(4, 71)), dim=1))


@given(data=st.data(), tiered=st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_truncated_cache_is_as_if_no_more_had_been_read(data: st.DataObject, tiered: bool) -> None:
    with TemporaryDirectory() as folder:
        cache, k, start = KVCache.empty(tight(Path(folder)) if tiered else SMALL), keys_of(SMALL, 0), 0
        for seed in range(data.draw(st.integers(1, 4))):
            stop = start + data.draw(st.integers(0, 150))
            k = torch.cat((k[:, :, :start], keys_of(SMALL, stop - start, seed)), dim=2)
            append_text(cache, k, start)
            assert_has(cache, k)
            start = data.draw(st.integers(0, stop))
            cache.truncate(start)
            assert_has(cache, k[:, :, :start])
            assert_has(cache.fork(), k[:, :, :start])


def append_text(cache: KVCache, k: Tensor, start: int) -> None:
    n = k.shape[2]
    for at in range(start, n, 10):
        cache.reserve(min(at + 10, n))
        for layer, x in zip(cache.layers, k[:, :, at : at + 10], strict=True):
            layer.write(x, -x)
        cache.commit()


def assert_has(cache: KVCache, k: Tensor) -> None:
    n = k.shape[2]
    assert cache.length == n
    for layer, x in zip(cache.layers, k, strict=True):
        for start in (0, n // 3, max(0, n - 5)):
            assert_are(layer.span(start, n), x[:, start:])
        index = torch.arange(0, n, 3)
        assert torch.equal(layer.tokens(index)[1], -x[:, index])
        if n >= 8:
            check_tiles(layer, torch.arange(n // 8).expand(4, 1, -1), x)


def test_what_is_gone_is_said() -> None:
    cache = KVCache.empty(WITH_STATE)
    append(cache, 13)
    staged(cache.layers[1]).stage(torch.ones(1))
    cache.commit()
    assert [cache.nearest(n) for n in (0, 12, 13)] == [0, 0, 13]
    said = r"^cannot go back to 12 tokens: .* go back to 0, and prefill the rest again\Z"
    with pytest.raises(UsageError, match=said):
        cache.truncate(12)
    for n in (-1, 14):
        with pytest.raises(UsageError, match=rf"^cannot go back to {n} tokens; expected 0 to 13\Z"):
            cache.truncate(n)
    cache.truncate(13)
    assert cache.length == 13
    cache.truncate(0)
    assert staged(cache.layers[1]).value is None


def test_a_commit_that_was_interrupted_is_completed_by_whatever_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if what should have completed it at once was interrupted too."""
    for then in (KVCache.settle, KVCache.fork, KVCache.mark, KVCache.tensors, KVCache.begin):
        cache = KVCache.empty(LAYOUT)
        cache.begin()
        write(cache, 13)
        with monkeypatch.context() as patch:
            patch.setattr(cache.layers[1], "commit", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                cache.commit()
        assert [layer.length for layer in cache.layers] == [13, 0, 0]
        then(cache)
        assert [layer.length for layer in cache.layers] == [13, 13, 13]
        cache.begin()
        write(cache, 5)
        then(cache)
        assert [layer.stop for layer in cache.layers] == [13, 13, 13]


def check_tiles(layer: LayerCache, chosen: Tensor, k: Tensor) -> None:
    """Every choice `[H, T, K]` is in exactly one round, with the numbers of `k [G, N, D]`."""
    size, seen = layer.layout.chunk_size, torch.zeros(chosen.shape, dtype=torch.int64)
    heads = torch.arange(len(chosen))[:, None, None] // (len(chosen) // len(k))
    expected = k[:, : layer.stop // size * size].unflatten(1, (-1, size))[heads, chosen.clamp(min=0)]
    for tiles in layer.tiles(chosen):
        assert tiles.index.shape == (len(k), layer.stop // size) or not layer.buffer.first
        number = tiles.chosen(chosen).view(chosen.shape)
        here = number >= 0
        assert_are((tiles.k[number[here]], tiles.v[number[here]]), expected[here])
        seen = seen + here
    assert torch.equal(seen, (chosen >= 0).long())


@given(data=st.data(), apart=st.booleans(), tiered=st.booleans(), chunks=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_tiles_are_the_chunks_they_stand_for(data: st.DataObject, apart: bool, tiered: bool, chunks: int) -> None:
    with TemporaryDirectory() as folder:
        layout = replace(SMALL, access=AccessPattern(8, 3, 9, apart))
        layout = tight(Path(folder), layout, chunks) if tiered else layout
        n, cache = data.draw(st.integers(8, 120)), KVCache.empty(layout)
        k = rows(n)
        for start in range(0, n, 10):
            cache.reserve(min(start + 10, n))
            for layer in cache.layers:
                layer.write(k[:, start : start + 10], -k[:, start : start + 10])
            if start + 10 < n:  # the last block is under way
                cache.commit()
        for layer in cache.layers:
            shape = (4, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6)))
            numbers = st.lists(st.integers(-1, n // 8 - 1), min_size=prod(shape), max_size=prod(shape))
            check_tiles(layer, torch.tensor(data.draw(numbers)).view(shape), k)


def filled(cache: KVCache, n: int, start: int = 0) -> None:
    append_text(cache, keys_of(SMALL, n), start)


def test_a_cache_that_outgrows_its_budget_becomes_tiered(tmp_path: Path) -> None:
    layout = tight(tmp_path)
    cache = KVCache.empty(layout)
    filled(cache, Limits(layout).resident_tokens)
    assert all(layer.stack is None for layer in cache.layers)
    assert cache.stacks == []
    copy = cache.fork()
    filled(cache, 120, Limits(layout).resident_tokens)
    assert cache.growing
    assert all(layer.stack is cache.stacks[0] for layer in cache.layers)
    assert all(layer.buffer.capacity == Limits(layout).recent_tokens for layer in cache.layers)
    assert all(120 - layer.buffer.first >= layout.access.local for layer in cache.layers)
    assert_has(cache, keys_of(SMALL, 120))
    assert (list(cache.traffic), (copy.stacks, cache.in_file)) == (["device", "disk"], ([], 0))
    assert_has(copy, keys_of(SMALL, Limits(layout).resident_tokens))
    with pytest.raises(AssertionError, match="everything is in the buffer"):
        _ = copy.layers[0].tiers


def opened(folder: Path, layout: CacheLayout, n: int) -> KVCache:
    cache = KVCache.empty(SMALL)
    filled(cache, n)
    draft = Draft.create(folder / "draft", FileLayout(SMALL, n))
    write_rows(cache, draft.rows)
    return restored(layout, draft.rows, n, {}, own=False)


def test_an_opened_cache_grows_at_the_cost_of_its_pool(tmp_path: Path) -> None:
    """Within the budget, and is refused beyond it with nothing lost; what it counted stays counted."""
    budget = Limits(SMALL).least_budget + 10 * 8 * SMALL.token_bytes
    cache = opened(tmp_path, replace(SMALL, budgets=Budgets(host=budget)), 100)
    assert cache.stacks
    assert not cache.growing
    slots, n = [cache.stacks[0].top.n_slots], 100
    assert_has(cache, keys_of(SMALL, 100))
    with pytest.raises(CapacityError, match=f"^a budget of {size_text(budget)} for keys"):  # noqa: PT012  # any of them may be it
        while n < 400:
            counted = cache.traffic["device"].bytes_in
            filled(cache, n + 10, n)
            n += 10
            assert_has(cache, keys_of(SMALL, n))
            assert cache.traffic["device"].bytes_in >= counted > 0
            slots.append(cache.stacks[0].top.n_slots)
            held = sum(layer.buffer.n_bytes for layer in cache.layers) + cache.stacks[0].top.n_bytes
            assert held <= budget
    assert n > 150
    assert slots == sorted(slots, reverse=True)
    assert slots[0] > slots[-1] >= 1
    assert_has(cache, keys_of(SMALL, n))
    assert_has(cache.fork(), keys_of(SMALL, n))
