"""The archive: every page is found again with its own numbers, in whatever tier, in whatever order it was asked for."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from lce.cache.pool import Numbers, Pages, PageShape, Pool, grid
from lce.cache.rows import SpillFile
from lce.cache.tiering import CacheShape, Tiering
from numpy.typing import NDArray
from torch import Tensor

from lce.attention.attention import Attention
from lce.cache.kv import KVCache
from lce.cache.movers import Mover
from lce.cache.tiers import Archive
from lce.errors import CapacityError
from lce.methods import Step, make
from lce.methods.base import Method
from lce.models.config import RopeConfig
from lce.models.rope import Rope
from tests.running import cut, legal, vectors

CPU = torch.device("cpu")
N_LAYERS, N_HEADS, SIZE, DIM = 2, 2, 4, 2  # of most archives here
ORDERS = ("only what is waited for", "last first", "random")
TIERS = ("memory", "memory, file", "device, host", "device, host, file", "device, file")


class Late(Mover):
    """A device whose copies are late and come in a bad order; a slot holds NaN until what was put there has come."""

    asynchronous = True

    def __init__(self, order: str = ORDERS[0], seed: int = 0) -> None:
        self.order = order
        self.random = Random(seed)
        self.coming: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}  # by slot, the oldest first

    def slots(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)

    def put(self, k: Tensor, v: Tensor, slots: NDArray[np.int64], new_k: Tensor, new_v: Tensor) -> None:
        for page, slot in enumerate(slots.tolist()):
            k[slot] = v[slot] = torch.nan
            self.coming.pop(slot, None)
            self.coming[slot] = (k, v, new_k[page], new_v[page])

    def wait(self, slots: NDArray[np.int64]) -> None:
        waited = set(slots.tolist())
        order = list(reversed(self.coming))
        if self.order == "random":
            self.random.shuffle(order)
        for slot in order:
            if not waited & self.coming.keys():
                return
            if slot in waited or self.order != "only what is waited for":
                k, v, new_k, new_v = self.coming.pop(slot)
                k[slot], v[slot] = new_k, new_v


def page_shape(heads: int = 1) -> PageShape:
    return PageShape(N_LAYERS, N_HEADS // heads, heads, SIZE, DIM, torch.float32)


def make_pools(
    tiers: str, shape: PageShape, limit: int | None, below: int | None = None, order: str = ORDERS[0]
) -> list[Pool]:
    """Empty pools of these tiers: `limit` pages in the first, `below` in the second."""
    limits = {"memory": limit, "device": limit, "host": below}
    return [
        Pool(name, shape, Late(order) if name == "device" else Mover(), limits[name])
        for name in tiers.split(", ")
        if name != "file"
    ]


class Branch:
    """An archive, and beside it all that it should hold: `k[layer]` `[G, chunks, L, D]`; values are `-k`."""

    def __init__(self, archive: Archive, k: list[Tensor] | None = None) -> None:
        self.archive = archive
        self.k = k or [torch.zeros(N_HEADS, 0, SIZE, DIM)] * N_LAYERS
        self.asked: dict[int, Pages] = {}  # by layer, groups and chunks
        self.pinned: dict[int, NDArray[np.bool_]] = {}  # by layer, which pinned pages were there

    @property
    def first_pool(self) -> Pool:
        return self.archive.pools[0]

    def n_chunks(self, layer: int) -> int:
        return self.k[layer].shape[1]

    def held(self, layer: int) -> NDArray[np.bool_]:
        """Which pages of a layer are in the first pool, `[groups, chunks]`."""
        return self.first_pool.find(self.archive.lanes(layer)[:, None], np.arange(self.n_chunks(layer))) >= 0

    def add(self, layer: int, k: Tensor) -> None:
        self.archive.add(layer, self.n_chunks(layer), k, -k)
        self.k[layer] = torch.cat((self.k[layer], k), dim=1)

    def rounds(self, layer: int, wanted: NDArray[np.bool_]) -> None:
        """Every page that is wanted comes once, with its numbers; those that are there are hits, the others misses."""
        held, before = self.held(layer), replace(self.first_pool.traffic)
        expected = self.k[layer].unflatten(0, (-1, self.archive.shape.heads))  # [groups, P, chunks, L, D]
        seen = np.zeros_like(wanted)
        for table, k, v in self.archive.rounds(layer, wanted):
            here = table >= 0
            assert 0 < here.sum() <= self.archive.room
            assert not (seen & here).any()
            seen |= here
            groups, chunks = np.nonzero(here)
            assert torch.equal(k[:, table[here]], expected[groups, :, chunks].transpose(0, 1))
            assert torch.equal(v[:, table[here]], -expected[groups, :, chunks].transpose(0, 1))
        assert np.array_equal(seen, wanted)
        assert self.first_pool.traffic.hits - before.hits == (wanted & held).sum()
        assert self.first_pool.traffic.misses - before.misses == (wanted & ~held).sum()
        self.asked[layer] = np.nonzero(wanted)

    def chunks(self, layer: int, first: int, stop: int) -> None:
        """All is there, and is not brought in place of what was in the pool."""
        held, free = self.held(layer), self.first_pool.n_free
        k, v = self.archive.chunks(layer, first, stop)
        assert torch.equal(k, self.k[layer][:, first:stop])
        assert torch.equal(v, -self.k[layer][:, first:stop])
        fits = (~held[:, first:stop]).sum() <= free
        held[:, first:stop] |= fits
        assert np.array_equal(self.held(layer), held)

    def tokens(self, layer: int, index: Numbers) -> None:
        """A chunk of which half is asked comes whole, of the others the tokens alone."""
        held = self.held(layer)
        k, v = self.archive.tokens(layer, index)
        assert torch.equal(k, self.k[layer].flatten(1, 2)[:, index])
        assert torch.equal(v, -self.k[layer].flatten(1, 2)[:, index])
        n_groups = self.archive.shape.n_groups
        often = np.flatnonzero(np.bincount(index // SIZE, minlength=1) * 2 >= SIZE)[: self.archive.room // n_groups]
        assert self.held(layer)[:, often].all()
        others = np.setdiff1d(np.arange(self.n_chunks(layer)), often)
        assert not (self.held(layer) & ~held)[:, others].any()
        self.asked[layer] = grid(np.arange(n_groups), often)

    def prefetch(self, layer: int) -> None:
        """What was asked for the last time is there, half a pool of it, and counts as neither hit nor miss."""
        held, before = self.held(layer), replace(self.first_pool.traffic)
        self.archive.prefetch(layer)
        now = self.first_pool.traffic
        assert (now.hits, now.misses) == (before.hits, before.misses)
        if not self.first_pool.mover.asynchronous or layer not in self.asked:
            assert (now, self.held(layer).tolist()) == (before, held.tolist())
            return
        groups, chunks = (x[: self.archive.room // 2] for x in self.asked[layer])
        assert now.early - before.early == (~held[groups, chunks]).sum()
        assert self.held(layer)[groups, chunks].all()

    def everything(self) -> None:
        for layer in range(N_LAYERS):
            self.chunks(layer, 0, self.n_chunks(layer))


def chunks_of(n: int, seed: int = 0) -> Tensor:
    """Keys of `n` chunks, `[G, n, L, D]`."""
    return torch.randn(N_HEADS, n, SIZE, DIM, generator=torch.Generator().manual_seed(seed))


class AnyOrder(RuleBasedStateMachine):
    """Archives and their forks, read and written in any order, over a disk that now and then refuses a write."""

    branches = Bundle("branches")

    @initialize(
        target=branches, tiers=st.sampled_from(TIERS), heads=st.sampled_from([1, N_HEADS]), spare=st.integers(1, 3),
        below=st.integers(1, 9), n_pinned=st.integers(0, 1), order=st.sampled_from(ORDERS),
    )  # fmt: skip
    def start(self, tiers: str, heads: int, spare: int, below: int, n_pinned: int, order: str) -> Branch:
        shape = page_shape(heads)
        limit = None if tiers == "memory" else shape.n_groups * (spare + n_pinned * N_LAYERS)
        self.pools = lambda: make_pools(tiers, shape, limit, below if "file" in tiers else None, order)
        self.folder = TemporaryDirectory()
        self.file = SpillFile(Path(self.folder.name), shape.row_shape, shape.dtype) if "file" in tiers else None
        self.all = [Branch(Archive(shape, self.pools(), self.file, n_pinned))]
        self.seed = self.n_added = 0
        self.refused = False
        self.until_refusal: int | None = None
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(os, "pwrite", self.write)
        return self.all[0]

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        if self.until_refusal is not None:
            self.until_refusal -= 1
            if self.until_refusal < 0:
                self.refused = True
                raise OSError(errno.ENOSPC, "No space left on device")
        return PWRITE(descriptor, data, offset)

    def attempt(self, act: Callable[[], None]) -> None:
        """What fails for the disk's sake is done again when the disk is well."""
        try:
            act()
        except CapacityError:
            assert self.until_refusal is not None
            assert self.until_refusal < 0
            self.until_refusal = None
            act()

    @rule(k=st.integers(0, 6))
    def spoil(self, k: int) -> None:
        self.until_refusal = k

    @rule(branch=branches, layer=st.integers(0, N_LAYERS - 1), n=st.integers(1, 5))
    def add(self, branch: Branch, layer: int, n: int) -> None:
        self.seed += 1
        self.n_added += n * branch.archive.shape.n_groups
        self.attempt(lambda: branch.add(layer, chunks_of(n, self.seed)))

    @rule(branch=branches, layer=st.integers(0, N_LAYERS - 1), data=st.data())
    def rounds(self, branch: Branch, layer: int, data: st.DataObject) -> None:
        shape = (branch.archive.shape.n_groups, branch.n_chunks(layer))
        size = shape[0] * shape[1]
        wanted = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool).reshape(shape)
        self.attempt(lambda: branch.rounds(layer, wanted))

    @rule(branch=branches, layer=st.integers(0, N_LAYERS - 1), data=st.data())
    def chunks(self, branch: Branch, layer: int, data: st.DataObject) -> None:
        stop = data.draw(st.integers(0, branch.n_chunks(layer)))
        first = data.draw(st.integers(0, stop))
        self.attempt(lambda: branch.chunks(layer, first, stop))

    @rule(branch=branches, layer=st.integers(0, N_LAYERS - 1), data=st.data())
    def tokens(self, branch: Branch, layer: int, data: st.DataObject) -> None:
        n = branch.n_chunks(layer) * SIZE
        index = data.draw(st.lists(st.integers(0, max(n - 1, 0)), max_size=min(n, 30), unique=True))
        self.attempt(lambda: branch.tokens(layer, np.array(sorted(index), np.int64)))

    @rule(branch=branches, layer=st.integers(0, N_LAYERS - 1))
    def prefetch(self, branch: Branch, layer: int) -> None:
        self.attempt(lambda: branch.prefetch(layer))

    @rule(target=branches, branch=branches)
    def fork(self, branch: Branch) -> Branch:
        made: list[Archive] = []
        self.attempt(lambda: made.append(branch.archive.fork(self.pools())))
        self.all.append(Branch(made[0], list(branch.k)))
        return self.all[-1]

    @rule(branch=branches)
    def write_down(self, branch: Branch) -> None:
        if self.file is not None:
            self.attempt(branch.archive.write_down)

    @invariant()
    def pinned_pages_stay(self) -> None:
        """In an archive from the start, in a fork from when they came."""
        for branch in self.all:
            for layer in range(N_LAYERS):
                held = branch.held(layer)[:, : branch.archive.n_pinned]
                assert held.all() or branch is not self.all[0]
                stayed = branch.pinned.get(layer, held[:, :0])
                assert (held[:, : stayed.shape[1]] >= stayed).all()
                branch.pinned[layer] = held

    @invariant()
    def the_disk_saw_what_was_counted(self) -> None:
        if self.file is None:
            return
        assert sum(branch.archive.disk.bytes_out for branch in self.all) == self.file.bytes_read
        if not self.refused:
            assert sum(branch.archive.disk.bytes_in for branch in self.all) == self.file.bytes_written
            assert self.file.bytes_written <= self.n_added * self.all[0].archive.shape.n_bytes

    def teardown(self) -> None:
        self.patch.undo()
        for branch in self.all:
            branch.everything()
        self.folder.cleanup()


PWRITE = os.pwrite
AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase


# One thing at a time.


def archive_of(
    folder: Path, tiers: str, n: int, *, limit: int = 4, below: int | None = None, n_pinned: int = 0
) -> Branch:
    """An archive with `n` chunks in every layer, whole chunks to a page."""
    shape = page_shape(N_HEADS)
    file = SpillFile(folder, shape.row_shape, shape.dtype) if "file" in tiers else None
    branch = Branch(Archive(shape, make_pools(tiers, shape, limit, below), file, n_pinned))
    for layer in range(N_LAYERS):
        branch.add(layer, chunks_of(n, layer))
    return branch


def wanted(branch: Branch, layer: int, *chunks: int) -> NDArray[np.bool_]:
    table = np.zeros((branch.archive.shape.n_groups, branch.n_chunks(layer)), bool)
    table[:, list(chunks)] = True
    return table


def traffic(branch: Branch) -> list[tuple[int, int, int, int]]:
    """Hits, misses, and pages in and out, of every tier."""
    size = branch.archive.shape.n_bytes
    tiers = [*(pool.traffic for pool in branch.archive.pools), branch.archive.disk]
    return [(t.hits, t.misses, t.bytes_in // size, t.bytes_out // size) for t in tiers]


def test_a_round_is_no_larger_than_the_room_even_of_pages_in_slots_kept_for_pinned_ones(tmp_path: Path) -> None:
    shape = page_shape(N_HEADS)
    file = SpillFile(tmp_path, shape.row_shape, shape.dtype)
    branch = Branch(Archive(shape, make_pools("memory, file", shape, 1 + N_LAYERS), file, n_pinned=1))
    branch.add(1, chunks_of(5))
    assert branch.held(1).sum() > branch.archive.room + 1
    branch.rounds(1, np.array([[False, False, False, True, True]]))


def test_counters_of_memory_over_a_file(tmp_path: Path) -> None:
    branch = archive_of(tmp_path, "memory, file", 3, limit=4)  # layer 0: chunk 2; layer 1: 0, 1, 2; two written
    assert traffic(branch) == [(0, 0, 6, 2), (0, 0, 2, 0)]
    branch.rounds(1, wanted(branch, 1, 0, 2))
    assert traffic(branch) == [(2, 0, 6, 2), (0, 0, 2, 0)]
    branch.rounds(0, wanted(branch, 0, 0))  # in place of layer 0's chunk 2, which is written
    assert traffic(branch) == [(2, 1, 7, 3), (1, 0, 3, 1)]
    branch.rounds(0, wanted(branch, 0, 0, 1))  # in place of layer 1's chunk 1, which is written
    assert traffic(branch) == [(3, 2, 8, 4), (2, 0, 4, 2)]
    branch.rounds(1, wanted(branch, 1, 1))
    branch.rounds(1, wanted(branch, 1, 0))
    branch.archive.write_down()
    assert traffic(branch)[1][2] == 6, "every page is written once"
    assert branch.archive.file is not None
    assert branch.archive.file.bytes_written == 6 * branch.archive.shape.n_bytes


def test_counters_of_a_device_over_memory_over_a_file(tmp_path: Path) -> None:
    branch = archive_of(tmp_path, "device, host, file", 3, limit=2, below=3)
    # Layer 0's chunks went down one after the other, then layer 1's first, which took the first one's place in memory.
    assert traffic(branch) == [(0, 0, 6, 4), (0, 0, 4, 1), (0, 0, 1, 0)]
    branch.rounds(0, wanted(branch, 0, 2))
    # Read of memory; on the device it took the place of layer 1's chunk 1, that in memory of layer 0's chunk 1.
    assert traffic(branch) == [(0, 1, 7, 5), (1, 0, 5, 3), (0, 0, 2, 0)]
    branch.rounds(0, wanted(branch, 0, 2))
    assert traffic(branch) == [(1, 1, 7, 5), (1, 0, 5, 3), (0, 0, 2, 0)]
    branch.rounds(0, wanted(branch, 0, 0))
    assert traffic(branch)[0][:3] == (1, 2, 8)
    assert traffic(branch)[1][:2] == (1, 1)
    assert traffic(branch)[2][0] == 1


def test_a_page_that_memory_has_is_not_copied_there_again(tmp_path: Path) -> None:
    branch = archive_of(tmp_path, "device, host, file", 4, limit=2, below=8)
    for chunk in (0, 1, 2, 3) * 3:
        for layer in range(N_LAYERS):
            branch.rounds(layer, wanted(branch, layer, chunk))
    assert traffic(branch)[1][2] == 8
    assert traffic(branch)[2] == (0, 0, 0, 0)


def test_what_was_read_of_the_file_stays_in_memory_while_there_is_room(tmp_path: Path) -> None:
    branch = archive_of(tmp_path, "device, host, file", 4, limit=2, below=5)
    pools = make_pools("device, host", branch.archive.shape, 2, 5)
    fork = Branch(branch.archive.fork(pools), list(branch.k))
    for chunk in (0, 1, 2, 3) * 2:
        fork.rounds(0, wanted(fork, 0, chunk))
    assert traffic(fork)[1:] == [(4, 4, 4, 4), (4, 0, 0, 4)]


def test_a_device_that_grows_keeps_what_is_on_its_way(tmp_path: Path) -> None:
    branch = Branch(Archive(page_shape(), make_pools("device", page_shape(), None), None))
    for seed in range(20):
        branch.add(seed % N_LAYERS, chunks_of(5, seed))
    branch.everything()


def test_a_scan_drives_nothing_out(tmp_path: Path) -> None:
    branch = archive_of(tmp_path, "device, host, file", 9, limit=5, below=4)
    branch.rounds(1, wanted(branch, 1, 1, 4, 6))
    before = [branch.held(layer).tolist() for layer in range(N_LAYERS)]
    for _ in range(3):
        branch.everything()
    assert [branch.held(layer).tolist() for layer in range(N_LAYERS)] == before


@pytest.mark.parametrize("tiers", TIERS)
def test_pages_are_written_once(tmp_path: Path, tiers: str) -> None:
    branch = archive_of(
        tmp_path, tiers, 12, limit=None if tiers == "memory" else 5, below=5 if "file" in tiers else None
    )
    for chunk in (0, 5, 11, 0, 5, 7, 3, 11):
        for layer in range(N_LAYERS):
            branch.rounds(layer, wanted(branch, layer, chunk, (chunk + 4) % 12))
    if branch.archive.file is not None:
        written = branch.archive.file.bytes_written
        assert written <= 24 * branch.archive.shape.n_bytes
        branch.archive.write_down()
        fork = Branch(branch.archive.fork(make_pools(tiers, branch.archive.shape, 5, 5)), list(branch.k))
        fork.everything()
        assert branch.archive.file.bytes_written == 24 * branch.archive.shape.n_bytes
    branch.everything()


@pytest.mark.parametrize("tiers", TIERS)
def test_a_fork_is_its_own(tmp_path: Path, tiers: str) -> None:
    branch = archive_of(
        tmp_path, tiers, 6, limit=None if tiers == "memory" else 5, below=5 if "file" in tiers else None
    )
    pools = make_pools(tiers, branch.archive.shape, None if tiers == "memory" else 5, 5 if "file" in tiers else None)
    fork = Branch(branch.archive.fork(pools), list(branch.k))
    for seed in range(4):
        branch.add(0, chunks_of(2, 10 + seed))
        fork.add(0, chunks_of(3, 20 + seed))
    branch.everything()
    fork.everything()
    fork.rounds(0, wanted(fork, 0, *range(18)))


def test_pinned_chunks_stay(tmp_path: Path) -> None:
    """In an archive from the start, in a fork once they were asked for."""
    branch = archive_of(tmp_path, "memory, file", 9, limit=4, n_pinned=1)  # two for sinks, two for others
    fork = Branch(branch.archive.fork(make_pools("memory", branch.archive.shape, 4)), list(branch.k))
    for layer in range(N_LAYERS):
        fork.rounds(layer, wanted(fork, layer, 0))
    for each in (branch, fork):
        for chunk in range(9):
            each.rounds(1, wanted(each, 1, chunk))
            assert each.held(0)[:, 0].all()
            assert each.held(1)[:, 0].all()
        each.rounds(0, wanted(each, 0, *range(9)))


def test_single_tokens_come_without_their_chunk(tmp_path: Path) -> None:
    branch = archive_of(tmp_path, "memory, file", 9, limit=4)
    before = branch.held(0)
    out, row = branch.archive.disk.bytes_out, branch.archive.shape.n_bytes // SIZE
    branch.tokens(0, np.array([0, 4, 8, 12]))
    assert np.array_equal(branch.held(0), before)
    assert branch.archive.disk.bytes_out == out + 4 * row
    branch.tokens(0, np.array([0, 5, 7, 8, 10]))  # chunks 1 and 2 come whole
    assert np.flatnonzero(branch.held(0)).tolist() == [1, 2]
    assert branch.archive.disk.bytes_out == out + 5 * row + 2 * branch.archive.shape.n_bytes


def test_without_a_file_what_does_not_fit_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    branch = archive_of(tmp_path, "device, host", 3, limit=2, below=5)
    with pytest.raises(
        CapacityError, match=r"^the cache of keys and values is full; give --spill-dir, or a larger .*\Z"
    ):
        branch.add(0, chunks_of(2, 5))
    branch.everything()
    branch.rounds(1, wanted(branch, 1, 0, 1, 2))


def test_prefetching_makes_hits_of_misses(tmp_path: Path) -> None:
    branch = archive_of(tmp_path, "device, host, file", 9, limit=8, below=4)
    branch.prefetch(1)  # nothing was asked yet
    branch.rounds(1, wanted(branch, 1, 1, 2, 3))
    branch.rounds(0, wanted(branch, 0, *range(8)))
    assert not branch.held(1).any()
    branch.prefetch(1)
    before = branch.first_pool.traffic.hits
    branch.rounds(1, wanted(branch, 1, 2, 3, 4))
    assert branch.first_pool.traffic.early == 3
    assert branch.first_pool.traffic.hits == before + 2


def test_where_copies_are_not_late_nothing_is_prefetched(tmp_path: Path) -> None:
    branch = archive_of(tmp_path, "memory, file", 9, limit=8)
    branch.rounds(1, wanted(branch, 1, 1, 2, 3))
    branch.rounds(0, wanted(branch, 0, *range(8)))
    branch.prefetch(1)
    assert not branch.held(1).any()


# A disk that refuses the k-th request and those after it until it is well again, for every k.


class Refusals:
    """Stands in for a call of the system's."""

    def __init__(self, name: str, number: int) -> None:
        self.call = getattr(os, name)
        self.number = number
        self.left: int | None = None  # how many requests are still granted; None: all
        self.fired = False

    def __call__(self, *args: object) -> object:
        if self.left == 0:
            self.fired = True
            raise OSError(self.number, os.strerror(self.number))
        if self.left is not None:
            self.left -= 1
        return self.call(*args)


CALLS = {"pwrite": errno.EIO, "posix_fallocate": errno.ENOSPC}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("tiers", ["memory, file", "device, host, file"])
def test_any_refusal_loses_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: str, call: str) -> None:
    monkeypatch.setattr("lce.cache.rows.GROWTH", 0)
    refusals = Refusals(call, CALLS[call])
    monkeypatch.setattr(os, call, refusals)

    def attempt(branch: Branch, act: Callable[[], Archive | None]) -> Archive | None:
        try:
            return act()
        except CapacityError:
            assert refusals.fired
            refusals.left = None
            branch.everything()
            return act()

    k, refusals.fired = 0, True
    while refusals.fired:
        branch = archive_of(tmp_path, tiers, 0, limit=5, below=3, n_pinned=1)
        refusals.left, refusals.fired = k, False
        for seed in range(4):
            for layer in range(N_LAYERS):
                attempt(branch, partial(branch.add, layer, chunks_of(3, 2 * seed + layer)))
                attempt(branch, partial(branch.rounds, layer, wanted(branch, layer, 0, seed, 2 * seed)))
        fork = attempt(branch, partial(branch.archive.fork, make_pools(tiers, branch.archive.shape, 5, 3)))
        branch.everything()
        assert fork is not None
        Branch(fork, branch.k).everything()
        k += 1
    assert k > 1


@pytest.mark.parametrize("call", CALLS)
def test_a_cache_survives_any_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """With the smallest budget: a pass that is refused leaves the cache as it was, and goes well the next time."""
    monkeypatch.setattr("lce.cache.rows.GROWTH", 0)
    refusals = Refusals(call, CALLS[call])
    monkeypatch.setattr(os, call, refusals)
    shape = CacheShape(N_LAYERS, N_HEADS, DIM, SIZE, torch.float32, CPU)
    tiering = Tiering(spill_dir=tmp_path, sinks=5, local=3, block=6, apart=True)
    tiering = replace(tiering, host=tiering.least(shape))
    text = torch.randn(N_LAYERS, N_HEADS, 48, DIM, generator=torch.Generator().manual_seed(0))

    def one_pass(start: int) -> None:
        try:
            cache.reserve(start + 6)
            for layer in cache.layers:
                layer.write(text[layer.index, :, start : start + 6], -text[layer.index, :, start : start + 6])
                for _ in layer.rounds(torch.arange(layer.first // SIZE).view(1, 1, -1).expand(N_HEADS, 1, -1)):
                    pass
        except CapacityError:
            cache.discard()
            raise
        cache.commit()

    k, refusals.fired = 0, True
    while refusals.fired:
        cache = KVCache(shape, tiering=tiering)
        refusals.left, refusals.fired = k, False
        for start in range(0, 48, 6):
            try:
                one_pass(start)
            except CapacityError:
                assert refusals.fired
                assert cache.length == start
                refusals.left = None
                one_pass(start)
            for layer in cache.layers:
                keys, values = layer.span(0, cache.length)
                assert torch.equal(keys, text[layer.index, :, : cache.length])
                assert torch.equal(values, -keys)
        k += 1
    assert k > 1


# Whole methods over a device whose copies are late.

WINDOW = 32
METHODS: dict[str, tuple[str, dict[str, object]]] = {
    "longheads": ("longheads", {"chunk_size": 4, "chunks": 6}),
    "longheads, heads together": ("longheads", {"chunk_size": 8, "chunks": 4, "share": "layer"}),
    "esa": ("esa", {"sinks": 4, "local": 10, "top_k": 24, "eps": 2, "compress": "none"}),
    "infllm": ("infllm", {"block_size": 4, "sinks": 4, "local": 10, "top_k": 6, "repr_tokens": 2}),
    "full": ("full", {}),
    "dca": ("dca", {"chunk_size": 20}),
}


@dataclass(frozen=True)
class OnDevice(Tiering):
    """A device whose copies are late, over `below` pages of memory, over a file; `spare` more pages than the least."""

    below: int | None = None
    order: str = ORDERS[0]
    spare: int = 0

    def pools(self, shape: CacheShape) -> list[Pool]:
        (memory,) = super().pools(shape)
        assert memory.limit is not None
        return make_pools("device, host", memory.shape, memory.limit + self.spare, self.below, self.order)


def read_text(
    method: Method, text: tuple[Tensor, ...], blocks: list[int], tiering: Tiering | None, prefetch: bool = True
) -> tuple[Tensor, KVCache]:
    """The method's outputs `[layers, H, N, D]` for a text of several layers, read as the engine does; and its cache."""
    method = method.resolve(WINDOW)
    n_layers, _, n, dim = text[0].shape
    chunk = 4 if type(method).cache_chunk is Method.cache_chunk else method.cache_chunk
    shape = CacheShape(n_layers, text[1].shape[1], dim, chunk, torch.float32, CPU, segment=24)
    cache = KVCache(shape, tiering=None if tiering is None else legal(tiering, shape, method, max(blocks)))
    rope, attention = Rope(RopeConfig(), dim, WINDOW, n), Attention.choose("torch")
    out, start = torch.empty(text[0].shape), 0
    for size in blocks:
        step = Step(start, start + size, rope, attention, WINDOW, shape.n_kv_heads)
        cache.reserve(start + size)
        for layer in cache.layers:
            q, k, v = (x[layer.index][:, start : start + size] for x in text)
            if size == 1 and prefetch:
                cache.prefetch(layer.index + 1)
            method.keep(k, v, layer, step)
            out[layer.index, :, start : start + size] = method.attend(q, layer, step)
        cache.commit()
        start += size
    return out, cache


def text_of(n_layers: int, n: int, n_decoded: int) -> tuple[Tensor, ...]:
    """`q [layers, H, N, D]`, `k v [layers, G, N, D]`; the last queries ask for much the same, one after another."""
    q, k, v = (torch.stack(x) for x in zip(*(vectors(layer, 4, 2, n, 16) for layer in range(n_layers)), strict=True))
    q[:, :, n - n_decoded :] = 0.2 * q[:, :, n - n_decoded :] + q[:, :, n - n_decoded - 1 : n - n_decoded]
    return q, k, v


BLOCKS = [30, 1, 1, *cut(6 * WINDOW - 47, 37), *cut(15, 1)]


@pytest.mark.parametrize(("name", "knobs"), METHODS.values(), ids=METHODS)
def test_no_method_sees_what_has_not_arrived(name: str, knobs: dict[str, object], tmp_path: Path) -> None:
    """To the bit as if all were resident: with the least room there may be, and with some to spare."""
    text = text_of(3, sum(BLOCKS), 15)
    calm, _ = read_text(make(name, knobs), text, BLOCKS, None)
    for (spare, below), order in zip(((0, 1), (7, 3), (40, None)), ORDERS, strict=True):
        tiering = OnDevice(host=0, spill_dir=tmp_path, below=below, order=order, spare=spare)
        out, cache = read_text(make(name, knobs), text, BLOCKS, tiering)
        assert torch.equal(out, calm), f"{spare} pages to spare"
        assert cache.archive is not None
        assert cache.traffic["device"].bytes_in > 0
        assert (cache.traffic["disk"].bytes_in > 0) == (below is not None)


@pytest.mark.parametrize(("called", "spare"), [("longheads", 30), ("infllm", 12), ("esa", 20)])
def test_a_method_finds_more_of_what_was_prefetched(called: str, spare: int, tmp_path: Path) -> None:
    """Where the device holds what two layers ask for, and not what four do."""
    method, text = make(*METHODS[called]), text_of(4, sum(BLOCKS), 15)
    tiering = OnDevice(host=0, spill_dir=tmp_path, below=50, spare=spare)
    out, cache = read_text(method, text, BLOCKS, tiering)
    without, plain = read_text(method, text, BLOCKS, tiering, prefetch=False)
    assert torch.equal(out, without)
    assert cache.traffic["device"].early > plain.traffic["device"].early == 0
    assert cache.traffic["device"].hits > plain.traffic["device"].hits * 1.1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("below", [0, 3, None])
def test_a_gpu_finds_every_page_again(tmp_path: Path, below: int | None) -> None:
    """Copies on a stream of their own, while the model's stream is busy, are there when they are used."""
    shape = CacheShape(4, 2, 64, 16, torch.bfloat16, torch.device("cuda"))
    tiering = Tiering(spill_dir=tmp_path, sinks=16, local=16, block=64, apart=True)
    chunk = shape.token_bytes * shape.chunk_size
    tiering = replace(tiering, device=tiering.least(shape) + chunk, host=None if below is None else below * chunk)
    text = torch.randn(4, 2, 1024, 64, dtype=torch.bfloat16, device="cuda")
    cache, busy = KVCache(shape, 1024, tiering), torch.randn(2048, 2048, device="cuda")
    for start in [*range(0, 960, 64), *range(960, 1024)]:
        stop = start + (64 if start < 960 else 1)
        for layer in cache.layers:
            keys = text[layer.index]
            cache.prefetch(layer.index + 1)
            busy = (busy @ busy).clamp(-1, 1)
            layer.write(keys[:, start:stop], -keys[:, start:stop])
            chosen = torch.arange(stop // 16, device="cuda")[torch.randperm(stop // 16, device="cuda")[:4]]
            for table, k, v in layer.rounds(chosen.view(1, 1, -1).expand(4, 1, -1)):
                for chunk_id in chosen.tolist() if table is not None else ():
                    for head in range(2):
                        if (slot := int(table[head, chunk_id])) >= 0:
                            found, value = (x[slot // x.shape[1], slot % x.shape[1]] for x in (k, v))
                            assert torch.equal(found, keys[head, chunk_id * 16 : chunk_id * 16 + 16])
                            assert torch.equal(value, -found)
        cache.commit()
    for layer in cache.layers:
        assert torch.equal(layer.span(0, 1024)[0], text[layer.index])
        index = torch.arange(0, 1024, 3, device="cuda")
        assert torch.equal(layer.tokens(index)[1], -text[layer.index][:, index])
    assert cache.traffic["device"].early > 0
    assert torch.equal(cache.copy().layers[3].span(0, 1024)[0], text[3])
