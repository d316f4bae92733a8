"""Forks: they share the memory of what was there, and nothing that one of them does is seen by another."""

import gc
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from torch import Tensor

from lce.cache import shared
from lce.cache.formats import FORMATS
from lce.cache.kv import KVCache, expect
from lce.cache.layout import AccessPattern, CacheLayout
from lce.cache.method_state import MethodState, Staged, Summaries, TokenRows
from lce.system import give_back_freed_memory
from tests.command import within
from tests.interrupts import interrupted, places

CPU = torch.device("cpu")


def states(layout: CacheLayout) -> dict[str, MethodState]:
    summaries, staged = Summaries(32, layout.chunk_size), Staged(lambda n, block: 4)
    return {"rows": TokenRows(12), "summaries": summaries, "staged": staged}


LAYOUT = CacheLayout(2, 4, 2, 8, torch.float32, CPU, AccessPattern(4, local=5), block=64, make_state=states)


def read(cache: KVCache, ids: list[int]) -> None:
    """Append tokens: what is kept of each depends on its id, its place and the layer."""
    start = cache.length
    cache.begin()
    for layer in cache.layers:
        x = torch.tensor(ids) * 7.0 + torch.arange(start, start + len(ids)) + layer.index
        x = x[:, None].expand(2, -1, 8) + torch.arange(8) / 10
        layer.write(x, -x)
        layer.kept(TokenRows, "rows").write(x[0, :, :3], start)
        done, now = start // 4, (start + len(ids)) // 4
        if now > done:
            layer.kept(Summaries, "summaries").write(layer.span(done * 4, now * 4)[0][:, ::4], done)
        layer.kept(Staged, "staged").stage(x[0, -1:, 0])
    cache.commit()


def held(cache: KVCache) -> list[Tensor]:
    """All that a cache has of its tokens but what passes replace, copied."""
    found = []
    for layer in cache.layers:
        n = layer.length
        states = (layer.kept(TokenRows, "rows"), layer.kept(Summaries, "summaries"))
        found += [*layer.span(0, n), *(x for state in states if (x := state.committed(n)[0]) is not None)]
    return [x.clone() for x in found]


class AnyOrder(RuleBasedStateMachine):
    """Contexts that are forked, read on, go back and are closed in any order, each beside one that was never forked."""

    caches = Bundle("caches")

    @initialize(target=caches, kv_dtype=st.sampled_from(sorted(FORMATS)), n=st.integers(0, 60))
    def start(self, kv_dtype: str, n: int) -> list[KVCache]:
        pair = [KVCache.empty(replace(LAYOUT, kv_dtype=kv_dtype)) for _ in range(2)]
        self.all = [pair]
        if n:
            self.read(pair, [5] * n)
        return pair

    @rule(pair=caches, ids=st.lists(st.integers(0, 99), min_size=1, max_size=40))
    def read(self, pair: list[KVCache], ids: list[int]) -> None:
        for cache in pair:
            read(cache, ids)

    @rule(pair=caches, share=st.floats(0, 1))
    def go_back(self, pair: list[KVCache], share: float) -> None:
        n = int(pair[0].length * share)
        for cache in pair:
            cache.truncate(cache.nearest(n))

    @rule(pair=caches, ids=st.lists(st.integers(0, 99), min_size=1, max_size=9))
    def interrupt(self, pair: list[KVCache], ids: list[int]) -> None:
        for cache in pair:
            mark = cache.mark()
            read(cache, ids)
            cache.go_back(mark)

    @rule(target=caches, pair=caches)
    def fork(self, pair: list[KVCache]) -> list[KVCache]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared, "_available", lambda: False)
            plain = pair[1].fork()
        self.all.append([pair[0].fork(), plain])
        return self.all[-1]

    @precondition(lambda self: len(self.all) > 1)
    @rule(pair=consumes(caches))
    def close(self, pair: list[KVCache]) -> None:
        self.all = [each for each in self.all if each is not pair]
        pair.clear()

    @invariant()
    def both_have_the_same(self) -> None:
        for ours, plain in getattr(self, "all", []):
            assert all(torch.equal(a, b) for a, b in zip(held(ours), held(plain), strict=True))


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def process_bytes() -> int:
    """The bytes of this process's own pages, and of file pages in memory, each once; without freed memory."""
    give_back_freed_memory()  # an engine that another test loaded has set the allocator to keep it
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    return sum(int(line[1]) * 1024 for line in lines if line[0] in ("Anonymous:", "Pss_Shmem:"))


def test_forks_add_what_they_append() -> None:
    layout = CacheLayout(8, 4, 4, 64, torch.float32, CPU)
    cache, x = KVCache.empty(layout), torch.randn(4, 256, 64)
    for _ in range(16):
        for layer in cache.layers:
            layer.write(x, x)
        cache.commit()
    whole, before = cache.length * layout.token_bytes, process_bytes()
    first = cache.fork()
    where = [layer.buffer.k.data_ptr() for layer in cache.layers]
    forks = [first, *(cache.fork() for _ in range(9))]
    assert [layer.buffer.k.data_ptr() for layer in cache.layers] == where, "the first fork moves it, no other one"
    for fork in forks:
        for layer in fork.layers:
            layer.write(x[:, :9], x[:, :9])
        fork.commit()
    pages = 10 * 8 * 2 * 4 * (9 * 64 * 4 + 4096)
    assert process_bytes() - before <= whole / 10 + 2 * pages


def test_forked_contexts_hold_no_file_descriptors_and_give_their_memory_back() -> None:
    def family() -> list[KVCache]:
        cache = KVCache.empty(LAYOUT)
        read(cache, [1] * 30)
        return [cache, cache.fork()]

    kept = family()
    n_open, n_bytes = len(os.listdir("/proc/self/fd")), file_bytes()
    more = [family()]
    of_one = file_bytes() - n_bytes
    more += [family() for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) <= n_open
    assert file_bytes() - n_bytes > 10 * of_one > 0
    more.clear()
    assert (file_bytes(), kept[1].length) == (n_bytes, 30)


def file_bytes() -> int:
    gc.collect()
    assert shared._file is not None
    return os.fstat(shared._file).st_blocks * 512


def test_a_process_that_is_forked_keeps_its_own() -> None:
    cache = KVCache.empty(LAYOUT)
    read(cache, [1] * 30)
    fork = cache.fork()
    from_child, to_parent = os.pipe()
    child = os.fork()
    if not child:
        read(cache, [9] * 8)
        os.write(to_parent, b"%d" % int(cache.layers[0].buffer.k[0, 30, 0]))
        os._exit(0)
    within(lambda: os.waitpid(child, 0))
    said = os.read(from_child, 9)
    os.close(from_child)
    os.close(to_parent)
    read(cache, [2] * 8)
    assert (int(said), int(cache.layers[0].buffer.k[0, 30, 0]), fork.length) == (9 * 7 + 30, 2 * 7 + 30, 30)


def test_where_memory_cannot_be_shared_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache.empty(LAYOUT)
    read(cache, [1] * 30)
    monkeypatch.setattr(shared, "_file", None)
    monkeypatch.setattr(os, "memfd_create", Mock(side_effect=OSError(24, "Too many open files")))
    fork = cache.fork()
    assert not any(x.can_share(0) for each in (cache, fork) for layer in each.layers for x, _, _ in layer.shareable())
    read(fork, [2] * 9)
    assert (cache.length, fork.length) == (30, 39)


def test_a_fork_that_is_interrupted_changes_nothing() -> None:
    def use(cache: KVCache) -> None:
        fork = cache.fork()
        read(cache, [3] * 5)
        cache.truncate(cache.nearest(20))
        read(cache, [4] * 30)
        read(fork, [5] * 9)

    def made() -> KVCache:
        cache = KVCache.empty(LAYOUT)
        read(cache, [1] * 30)
        return cache

    expected = made()
    use(expected)
    for place, nth in places(lambda: use(made()), 5, "shared.py", "KVBuffer.fork", "LayerCache.fork", "KVCache.fork"):
        cache = made()
        interrupted(lambda cache=cache: use(cache), place, nth)  # type: ignore[misc]
        other = cache.fork()
        cache.truncate(0)
        other.truncate(0)
        for each in (cache, other):
            read(each, [1] * 30)
            use(each)
            assert all(torch.equal(a, b) for a, b in zip(held(each), held(expected), strict=True)), place


def huge(x: Tensor) -> bool:
    """Whether huge pages were asked for a tensor's memory."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.startswith("VmFlags"):
            first, _, rest = line.partition(" ")[0].partition("-")
            if rest:
                inside = int(first, 16) <= x.data_ptr() < int(rest, 16)
        elif inside:
            return "hg" in line.split()
    raise AssertionError("no mapping has the tensor")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc/self/smaps")
def test_huge_pages_are_asked_for_memory_that_a_text_fills_by_half() -> None:
    layout = CacheLayout(2, 4, 2, 64, torch.float32, CPU, AccessPattern(4))
    for capacity, expected in ((400, True), (4000, False)):
        cache = KVCache.empty(layout, capacity)
        expect(cache, 300)
        assert [huge(rows.tensor) for layer in cache.layers for rows in layer.buffer.rows] == [expected] * 4
    cache.reserve(5000)
    assert not huge(cache.layers[0].buffer.k), "nothing was written yet"
