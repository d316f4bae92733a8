"""Tiers: every page is found again with its own numbers, in whatever tier it is, in whatever order it is asked for."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.disk import Disk, SpillFile
from lce.cache.kv import KVCache
from lce.cache.layout import AccessPattern, Budgets, CacheLayout
from lce.cache.limits import Limits
from lce.cache.movers import Fetch, Numbers
from lce.cache.pool import Pool, power_of_two
from lce.cache.row_file import RowFile
from lce.cache.tier import UNBOUNDED, Nowhere, PageIndex, Pages, Tier, Traffic
from lce.cache.tiers import TierStack
from lce.errors import CapacityError, DataError
from tests.interrupts import interrupted, places
from tests.late import ORDERS, Late, LateDevice, disks_of, no_gpu
from tests.running import assert_are, rounded

CPU = torch.device("cpu")
N_LAYERS, N_HEADS, SIZE, DIM = 2, 2, 4, 2  # of most layouts here
TIERS = ("memory", "memory, file", "device, host", "device, host, file", "device, file")


def layout_of(heads: int = 1, *, pinned: int = 0) -> CacheLayout:
    access = AccessPattern(SIZE, sinks=pinned * SIZE, per_head=heads == 1)
    return CacheLayout(N_LAYERS, N_HEADS, N_HEADS, DIM, torch.float32, CPU, access)


def tiers_of(
    tiers: str,
    *,
    heads: int = 1,
    limit: int = UNBOUNDED,
    below: int = UNBOUNDED,
    pinned: int = 0,
    kv_dtype: str = "auto",
) -> CacheLayout:
    """A layout with these tiers: `limit` pages in the first, `below` in the host's."""
    plain = replace(layout_of(heads, pinned=pinned), kv_dtype=kv_dtype)
    least = Limits(plain).recent_tokens * plain.token_bytes
    budget = None if limit == UNBOUNDED else least + limit * plain.page_bytes
    if "memory" in tiers:
        return replace(plain, budgets=Budgets(host=budget))
    host = None if below == UNBOUNDED else below * power_of_two(plain.format.page_bytes)
    late = LateDevice(N_LAYERS, N_HEADS, N_HEADS, DIM, torch.float32, CPU, plain.access, kv_dtype=kv_dtype)
    return replace(late, budgets=Budgets(budget, host if "host" in tiers else 0))


def file_for(tiers: str, layout: CacheLayout, folder: Path) -> RowFile | None:
    return SpillFile(folder, layout.format) if "file" in tiers else None


def stack(layout: CacheLayout, file: RowFile | None) -> TierStack:
    return TierStack(layout, Nowhere() if file is None else Disk(layout, Nowhere(), file))


def disk_of(tiers: TierStack) -> Traffic:
    return disks_of(tiers)[0].traffic if disks_of(tiers) else Traffic()


class Branch:
    """A stack of tiers, and beside it all that it should hold: `k[layer] [G, chunks, L, D]`; values are `-k`."""

    def __init__(self, tiers: TierStack, k: list[Tensor] | None = None) -> None:
        self.tiers, self.layout = tiers, tiers.layout
        self.k = k or [torch.zeros(N_HEADS, 0, SIZE, DIM)] * N_LAYERS
        self.asked: dict[int, Pages] = {}  # by layer, groups and chunks
        self.pinned: dict[int, NDArray[np.bool_]] = {}  # by layer, which pinned pages were there

    @property
    def top(self) -> Pool:
        return self.tiers.top

    def n_chunks(self, layer: int) -> int:
        return self.k[layer].shape[1]

    def held(self, layer: int) -> NDArray[np.bool_]:
        """Which pages of a layer are in the first pool, `[groups, chunks]`."""
        self.tiers.settle()
        pages = Pages.grid(self.tiers.groups(layer), np.arange(self.n_chunks(layer)))
        return self.top.index[pages].reshape(self.layout.n_groups, -1) >= 0

    def add(self, layer: int, k: Tensor) -> None:
        flat = k.flatten(1, 2)  # [G, m·L, D]
        self.tiers.add(layer, self.n_chunks(layer), flat, -flat)
        self.k[layer] = torch.cat((self.k[layer], k), dim=1)

    def rounds(self, layer: int, wanted: NDArray[np.bool_]) -> None:
        """Every page that is wanted comes once, with its numbers, after a KV head's earlier pages.

        Pages that are there are hits, the others misses, except for a quarter of the slots if there are several rounds,
        and one for each page that comes to stay in a slot. One round alone has others, too.
        """
        held, before, per_page = self.held(layer), replace(self.top.traffic), self.layout.page_heads
        seen = torch.zeros(N_HEADS, wanted.shape[1], dtype=torch.bool)
        for tiles in self.tiers.rounds(layer, wanted):
            here = tiles.index >= 0
            assert here.shape == seen.shape
            here &= torch.from_numpy(wanted.repeat(per_page, axis=0))
            for old, new in zip(seen, here, strict=True):
                assert not old.any() or not new.any() or old.nonzero().max() < new.nonzero().min()
            assert 0 < int(here.sum()) <= self.top.capacity * per_page
            assert not (seen & here).any()
            seen |= here
            assert_are((tiles.k[tiles.index[here]], tiles.v[tiles.index[here]]), self.k[layer][here])
        assert np.array_equal(seen.numpy(), wanted.repeat(per_page, axis=0))
        misses, missing = self.top.traffic.misses - before.misses, wanted & ~held
        staying = missing[:, : self.layout.access.sinks // SIZE].sum()
        left = 0 if wanted.sum() <= self.top.capacity else max(1, self.top.capacity // 4) + staying
        assert 0 <= misses - missing.sum() <= left
        assert self.top.traffic.hits - before.hits == wanted.sum() - misses
        self.asked[layer] = Pages(*np.nonzero(wanted))

    def chunks(self, layer: int, first: int, stop: int) -> None:
        """All is there, and is not brought in place of what was in the pool."""
        held, free = self.held(layer), self.top.n_free
        assert_are(self.tiers.chunks(layer, first, stop), self.k[layer][:, first:stop].flatten(1, 2))
        fits = (~held[:, first:stop]).sum() <= free
        held[:, first:stop] |= fits
        assert np.array_equal(self.held(layer), held)

    def tokens(self, layer: int, index: Numbers) -> None:
        """A chunk of which half is asked comes whole, of the others the tokens alone."""
        held = self.held(layer)
        assert_are(self.tiers.tokens(layer, index), self.k[layer].flatten(1, 2)[:, index])
        n_groups = self.layout.n_groups
        often = np.flatnonzero(np.bincount(index // SIZE, minlength=1) * 2 >= SIZE)[: self.top.capacity // n_groups]
        assert self.held(layer)[:, often].all()
        others = np.setdiff1d(np.arange(self.n_chunks(layer)), often)
        assert not (self.held(layer) & ~held)[:, others].any()
        self.asked[layer] = Pages.grid(np.arange(n_groups), often)

    def prefetch(self, layer: int) -> None:
        """What was asked for the last time is there, half a pool of it, and counts as neither hit nor miss."""
        held, before = self.held(layer), replace(self.top.traffic)
        self.tiers.prefetch(layer)
        self.tiers.settle()
        now = self.top.traffic
        assert (now.hits, now.misses) == (before.hits, before.misses)
        if not self.top.mover.asynchronous or layer not in self.asked:
            assert (now, self.held(layer).tolist()) == (before, held.tolist())
            return
        asked = self.asked[layer].at(slice(self.top.capacity // 2))
        assert now.early - before.early == (~held[asked]).sum()
        assert self.held(layer)[asked].all()

    def everything(self) -> None:
        for layer in range(N_LAYERS):
            self.chunks(layer, 0, self.n_chunks(layer))

    def fork(self) -> Branch:
        return Branch(self.tiers.fork(), list(self.k))


def chunks_of(n: int, seed: int = 0) -> Tensor:
    """Keys of `n` chunks, `[G, n, L, D]`, which are the same in 8 bits."""
    return rounded(torch.randn(N_HEADS, n, SIZE, DIM, generator=torch.Generator().manual_seed(seed)), SIZE)


class Refusals:
    """Stands in for a system call, which refuses all requests once none is `left`."""

    def __init__(self, name: str, number: int) -> None:
        self.call, self.number = getattr(os, name), number
        self.left: int | None = None  # how many requests are still granted; None: all
        self.fired = False

    def __call__(self, *args: object) -> object:
        if self.left == 0:
            self.fired = True
            raise OSError(self.number, os.strerror(self.number))
        if self.left is not None:
            self.left -= 1
        return self.call(*args)


class AnyOrder(RuleBasedStateMachine):
    """Stacks and their forks, read and written in any order, over a disk that now and then refuses a write."""

    branches = Bundle("branches")

    @initialize(
        target=branches,
        tiers=st.sampled_from(TIERS),
        heads=st.sampled_from([1, N_HEADS]),
        spare=st.integers(1, 3),
        below=st.integers(1, 9),
        pinned=st.integers(0, 1),
        devices=st.tuples(st.sampled_from(ORDERS), st.sampled_from([1, 512])),
        kv_dtype=st.sampled_from(["auto", "int8"]),
    )
    def start(
        self, tiers: str, heads: int, spare: int, below: int, pinned: int, devices: tuple[str, int], kv_dtype: str
    ) -> Branch:
        self.patch, self.refusals = pytest.MonkeyPatch(), Refusals("pwrite", errno.ENOSPC)
        self.patch.setattr(os, "pwrite", self.refusals)
        no_gpu(self.patch, *devices)
        limit = UNBOUNDED if tiers == "memory" else N_HEADS // heads * (spare + pinned * N_LAYERS)
        below = below if "file" in tiers else UNBOUNDED
        self.layout = tiers_of(tiers, heads=heads, limit=limit, below=below, pinned=pinned, kv_dtype=kv_dtype)
        self.folder = TemporaryDirectory()
        file = file_for(tiers, self.layout, Path(self.folder.name))
        self.files = [] if file is None else [file]
        self.all = [Branch(stack(self.layout, file))]
        self.seed = self.n_added = 0
        return self.all[0]

    def attempt(self, act: Callable[[], None]) -> None:
        """What the disk refused is done again when the disk works."""
        try:
            act()
        except CapacityError:
            assert self.refusals.left == 0
            self.refusals.left = None
            act()

    @rule(k=st.integers(0, 6))
    def spoil(self, k: int) -> None:
        self.refusals.left = k

    @rule(branch=branches, layer=st.integers(0, N_LAYERS - 1), n=st.integers(1, 5))
    def add(self, branch: Branch, layer: int, n: int) -> None:
        self.seed += 1
        self.n_added += n * self.layout.n_groups
        self.attempt(lambda: branch.add(layer, chunks_of(n, self.seed)))

    @rule(branch=branches, layer=st.integers(0, N_LAYERS - 1), data=st.data())
    def rounds(self, branch: Branch, layer: int, data: st.DataObject) -> None:
        shape = (self.layout.n_groups, branch.n_chunks(layer))
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
        made: list[Branch] = []
        self.attempt(lambda: made.append(branch.fork()))
        self.all.append(made[0])
        return self.all[-1]

    @rule(target=branches, branch=branches)
    def spill_above(self, branch: Branch) -> Branch:
        """Another stack over the files of this one, which writes to a file of its own: as over a saved context."""
        if not self.files or len(disks_of(branch.tiers)) > 2:
            return branch
        self.attempt(branch.tiers.write_down)
        assert isinstance(branch.tiers.bottom, Disk)
        self.files.append(SpillFile(Path(self.folder.name), self.layout.format))
        bottom = Disk(self.layout, branch.tiers.bottom.fork(), self.files[-1])
        self.all.append(Branch(TierStack(self.layout, bottom), list(branch.k)))
        return self.all[-1]

    @rule(branch=branches)
    def write_down(self, branch: Branch) -> None:
        if self.files:
            self.attempt(branch.tiers.write_down)

    @invariant()
    def pinned_pages_stay(self) -> None:
        """In the first stack always, in a fork from when they came."""
        for branch in self.all:
            for layer in range(N_LAYERS):
                held = branch.held(layer)[:, : Limits(self.layout).pinned_chunks]
                assert held.all() or branch is not self.all[0]
                stayed = branch.pinned.get(layer, held[:, :0])
                assert (held[:, : stayed.shape[1]] >= stayed).all()
                branch.pinned[layer] = held

    @invariant()
    def the_disk_saw_what_was_counted(self) -> None:
        if not self.files:
            return
        for branch in self.all:
            branch.tiers.settle()
        assert sum(disk_of(branch.tiers).bytes_out for branch in self.all) == sum(x.bytes_read for x in self.files)
        if not self.refusals.fired:
            written = sum(x.bytes_written for x in self.files)
            assert sum(disk_of(branch.tiers).bytes_in for branch in self.all) == written
            assert written <= self.n_added * self.layout.format.page_bytes

    def teardown(self) -> None:
        if not hasattr(self, "all"):
            return
        self.refusals.left = None
        for branch in self.all:
            branch.everything()
        self.patch.undo()
        self.folder.cleanup()


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestAnyOrder = pytest.mark.slow(AnyOrder.TestCase)


# One thing at a time.
@pytest.fixture(autouse=True)
def _late_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu(monkeypatch)


def branch_of(folder: Path, tiers: str, n: int, *, limit: int = 4, below: int = UNBOUNDED, pinned: int = 0) -> Branch:
    layout = tiers_of(tiers, heads=N_HEADS, limit=limit, below=below, pinned=pinned)
    branch = Branch(stack(layout, file_for(tiers, layout, folder)))
    for layer in range(N_LAYERS):
        branch.add(layer, chunks_of(n, layer))
    return branch


def wanted(branch: Branch, layer: int, *chunks: int) -> NDArray[np.bool_]:
    table = np.zeros((branch.layout.n_groups, branch.n_chunks(layer)), bool)
    table[:, list(chunks)] = True
    return table


def traffic(branch: Branch) -> list[tuple[int, int, int, int]]:
    """Hits, misses, and pages in and out, of every tier."""
    size = branch.layout.page_bytes
    found = [tier.traffic for tier in branch.tiers]
    return [(t.hits, t.misses, t.bytes_in // size, t.bytes_out // size) for t in found]


def file_of(branch: Branch) -> RowFile:
    assert isinstance(branch.tiers.bottom, Disk)
    return branch.tiers.bottom.file


@given(
    limit=st.integers(3, 9),
    steps=st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=3, unique=True), max_size=30),
)
@settings(max_examples=60, deadline=None)
def test_a_pool_holds_what_was_used_last(limit: int, steps: list[list[tuple[int, int]]]) -> None:
    with TemporaryDirectory() as folder:
        layout = tiers_of("memory, file", limit=limit)
        tiers, used = stack(layout, file_for("memory, file", layout, Path(folder))), dict[tuple[int, int], int]()
        for layer in range(N_LAYERS):
            tiers.add(layer, 0, *[chunks_of(10, layer).flatten(1, 2)] * 2)
        tiers.write_down()
        tiers.shrink(0)
        every = Pages.grid(np.arange(4), np.arange(10))
        for tick, names in enumerate(steps, 1):
            pages = Pages(*np.array(names, np.int64).reshape(-1, 2).T)
            assert (tiers.top.index[pages] >= 0).tolist() == [page in used for page in names]
            slots = tiers.top.bring(pages)
            assert tiers.top.index[pages].tolist() == slots.tolist()
            used |= dict.fromkeys(names, tick)
            there = every.at(tiers.top.index[every] >= 0)
            held = {(int(group), int(chunk)) for group, chunk in zip(*there, strict=True)}
            left = [used.pop(page) for page in set(used) - held]
            assert len(held) == min(limit, len(held) + len(left))
            assert set(names) <= held
            assert max(left, default=0) <= min(used.values(), default=0)
        with pytest.raises(CapacityError, match=r"^the device cache has no space for \d+ more pages; give it a"):
            tiers.top.bring(every.at(slice(limit + 1)))


def test_a_request_beyond_the_pool_evicts_little(tmp_path: Path) -> None:
    branch = branch_of(tmp_path, "memory, file", 40, limit=16)
    branch.rounds(0, wanted(branch, 0, *range(16)))
    branch.rounds(0, wanted(branch, 0, *range(40)))
    assert branch.held(0)[:, :16].sum() >= 12
    misses = branch.top.traffic.misses
    branch.rounds(0, wanted(branch, 0, *range(40)))
    assert misses + 24 <= branch.top.traffic.misses <= misses + 28


def test_without_a_file_what_does_not_fit_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    branch = branch_of(tmp_path, "device, host", 3, limit=2, below=6)
    said = r"^the cache of keys and values is full; give --spill-dir, or a larger .*\Z"
    with pytest.raises(CapacityError, match=said):
        branch.add(0, chunks_of(2, 5))
    branch.everything()
    branch.rounds(1, wanted(branch, 1, 0, 1, 2))


def test_what_cannot_be_fetched_early_is_refused_when_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    branch = branch_of(tmp_path, "device, file", 9, limit=8)
    branch.rounds(1, wanted(branch, 1, 1, 2, 3))
    branch.rounds(0, wanted(branch, 0, *range(8)))
    before = branch.held(0)
    with monkeypatch.context() as patch:
        patch.setattr(RowFile, "read_pages", lambda *_: fail(DataError("the disk does not read")))
        branch.tiers.prefetch(1)
        assert not branch.held(1).any()
        with pytest.raises(DataError, match="the disk does not read"):
            list(branch.tiers.rounds(1, wanted(branch, 1, 1, 2, 3)))
        patch.setattr(RowFile, "read_pages", lambda *_: fail(MemoryError()))
        branch.tiers.prefetch(1)
        with pytest.raises(MemoryError):  # nobody's bad luck, but a fault
            branch.tiers.settle()
        branch.tiers.settle()
    assert (branch.held(0) <= before).all()
    branch.everything()
    branch.prefetch(1)


def fail(error: Exception) -> Tensor:
    raise error


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_pages_leave_a_device_without_a_copy(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    branch = Branch(stack(tiers_of("device, host", limit=6, kv_dtype=kv_dtype), None))
    monkeypatch.setattr(Pool, "_hand_down", lambda *_: fail(AssertionError("a copy")))
    for seed in range(6):
        for layer in range(N_LAYERS):
            branch.add(layer, chunks_of(3, seed + 10 * layer))
            branch.rounds(layer, wanted(branch, layer, 0, seed))
    device, host = branch.tiers.pools
    assert (host.slots.group >= 0).sum() == 6 * 3 * N_LAYERS * N_HEADS
    assert host.traffic.bytes_in == (host.slots.group >= 0).sum() * host.format.page_bytes
    assert device.below.holds(Pages(device.slots.group, device.slots.chunk)).all()
    branch.everything()


def test_the_host_takes_slabs_and_copies_nothing_when_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu(monkeypatch, slab=512)
    branch = Branch(stack(tiers_of("device, host", limit=4), None))
    host = branch.tiers.pools[1]
    assert host.n_bytes == host.n_slots == 0
    firsts = []
    for seed in range(9):
        branch.add(seed % N_LAYERS, chunks_of(2, seed))
        held = host.slots.slabs
        firsts = [*firsts, *held[len(firsts) :]]
        assert all(x is y for x, y in zip(held, firsts, strict=True))
        assert host.n_bytes == len(held) * 512 == host.bytes_for(branch.layout, (seed + 1) * 2 * N_HEADS)
    assert host.n_slots == len(firsts) * 8
    branch.everything()


def test_single_tokens_are_read_without_their_chunks(tmp_path: Path) -> None:
    branch = branch_of(tmp_path, "memory, file", 9, limit=4)
    before = disk_of(branch.tiers).bytes_out
    branch.tokens(0, np.array([0, SIZE, 2 * SIZE, 3 * SIZE]))
    assert disk_of(branch.tiers).bytes_out == before + 4 * branch.layout.format.row_bytes


def test_a_fork_above_a_file_that_takes_no_pages_gets_copies_of_what_is_new(tmp_path: Path) -> None:
    """As an opened context with a budget for the device and none for the host."""
    branch = branch_of(tmp_path, "device, host, file", 4, limit=4)
    branch.tiers.write_down()
    file_of(branch).writable = False
    for seed in range(3):
        branch.add(0, chunks_of(3, seed))
    fork = branch.fork()
    fork.add(0, chunks_of(2, 7))
    branch.everything()
    fork.everything()
    assert disk_of(fork.tiers).bytes_in == 0


def test_a_page_table_on_the_device_is_that_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, mover, random = layout_of(), Late(), np.random.default_rng(0)
    table, uploads = PageIndex(layout, mover), []
    monkeypatch.setattr(Late, "upload", lambda self, x: uploads.append(x.numel()) or x)
    for step in range(60):
        for _ in range(int(random.integers(0, 4)) if step % 20 else 100):
            pages = Pages(random.integers(0, 4, 3), random.integers(0, 20 + 2 * step, 3))
            table[pages] = int(random.integers(-1, 99))
        with torch.inference_mode(step % 3 == 0):
            found = table.on_device(slice(1, 3), 10 + 2 * step)
        assert found.tolist() == table[Pages.grid(np.arange(1, 3), np.arange(10 + 2 * step))].reshape(2, -1).tolist()
    n_uploads = len(uploads)
    table.on_device(slice(0, 2), 100)
    assert len(uploads) == n_uploads, "nothing has changed"
    table[Pages(np.array([1, 1]), np.array([5, 6]))] = 7
    table.on_device(slice(0, 2), 100)
    assert uploads[n_uploads:] == [4]


# A disk that refuses the k-th request and those after it until it works again, for every k.
CALLS = {"pwrite": errno.EIO, "posix_fallocate": errno.ENOSPC}


@pytest.mark.parametrize("call", CALLS)
def test_a_cache_survives_any_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """With the smallest budget: a pass that is refused leaves the cache as it was, and goes well the next time."""
    monkeypatch.setattr("lce.cache.disk.GROWTH", 0)
    refusals = Refusals(call, CALLS[call])
    monkeypatch.setattr(os, call, refusals)
    layout = replace(layout_of(), access=AccessPattern(SIZE, sinks=5, local=3, per_head=True), block=6)
    layout = replace(layout, budgets=Budgets(host=Limits(layout).least_budget, spill_dir=tmp_path))
    text = torch.randn(N_LAYERS, N_HEADS, 48, DIM, generator=torch.Generator().manual_seed(0))

    def one_pass(start: int) -> None:
        try:
            cache.reserve(start + 6)
            for layer in cache.layers:
                layer.write(text[layer.index, :, start : start + 6], -text[layer.index, :, start : start + 6])
                for _ in layer.tiles(torch.arange(layer.buffer.first // SIZE).view(1, 1, -1).expand(N_HEADS, 1, -1)):
                    pass
        except CapacityError:
            cache.settle()
            raise
        cache.commit()

    k, refusals.fired = 0, True
    while refusals.fired:
        cache = KVCache.empty(layout)
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
                assert_are(layer.span(0, cache.length), text[layer.index, :, : cache.length])
        k += 1
    assert k > 1


FILES = ("tiers.py", "pool.py", "disk.py", "tier.py", "movers.py")
INTERRUPTED = [  # tiers, format, of how many places one is tried, and where they are
    *((tiers, "auto", 61, FILES) for tiers in TIERS[1:]),
    ("device, host, file", "int8", 61, FILES),
    ("memory, file", "auto", 1, ("Pool._fill.",)),  # while slots change hands: at every bytecode
    *(pytest.param(tiers, "auto", 5, FILES, marks=pytest.mark.slow) for tiers in TIERS[1:]),
]


@pytest.mark.parametrize(("tiers", "kv_dtype", "every", "where"), INTERRUPTED)
def test_an_interruption_anywhere_leaves_tiers_that_can_be_used(
    tiers: str, kv_dtype: str, every: int, where: tuple[str, ...], tmp_path: Path
) -> None:
    """Add pages, interrupted anywhere; add them again, with others: all are found, with their latest contents."""
    layout = tiers_of(tiers, limit=6, kv_dtype=kv_dtype)

    def pages(first: int, stop: int, seed: int) -> tuple[Tensor, Tensor]:
        k = chunks_of(12, seed)[:, first:stop].flatten(1, 2)
        return k, -k

    def add(to: TierStack, seed: int) -> None:
        for layer in range(N_LAYERS):
            to.add(layer, 4, *pages(4, 9, seed + layer))
            to.chunks(layer, 2, 6)
            to.prefetch(1 - layer)
            list(to.rounds(layer, np.ones((N_HEADS, 5), bool)))

    def filled() -> TierStack:
        made = stack(layout, file_for(tiers, layout, tmp_path))
        for layer in range(N_LAYERS):
            made.add(layer, 0, *pages(0, 6, layer))  # of which two are to be replaced
        return made

    probe = filled()
    for place, nth in places(lambda: add(probe, 10), every, *where):
        under_test = filled()
        interrupted(lambda under_test=under_test: add(under_test, 10), place, nth)
        add(under_test, 20)
        under_test.top.bring(Pages.grid(under_test.groups(0), np.arange(2)))
        for each in (under_test, under_test.fork()):
            for layer in range(N_LAYERS):
                truth = torch.cat((pages(0, 4, layer)[0], pages(4, 9, 20 + layer)[0]), dim=1)
                assert_are(each.chunks(layer, 0, 9), truth)


class Shelf(Tier):
    """A tier of one class: pages in a list."""

    name = "shelf"

    def __init__(self, layout: CacheLayout, below: Tier) -> None:
        super().__init__(layout, below)
        self.pages: list[tuple[Tensor, ...]] = []

    @classmethod
    def limit(cls, layout: CacheLayout) -> int:
        return UNBOUNDED

    @property
    def n_bytes(self) -> int:
        return len(self.pages) * self.page_bytes

    def take(self, place: Numbers) -> tuple[Tensor, ...]:
        return tuple(torch.stack(parts) for parts in zip(*(self.pages[i] for i in place), strict=True))

    def take_rows(self, place: Numbers, offsets: Numbers) -> Tensor:
        (pages,) = self.take(place)
        return pages[torch.arange(len(place)), torch.from_numpy(offsets)]

    def write(self, pages: Pages, *parts: Tensor) -> None:
        self.index[pages] = len(self.pages) + np.arange(len(pages.group))
        self.pages += [tuple(x.clone() for x in page) for page in zip(*parts, strict=True)]


def test_a_tier_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lce.cache.limits.kinds", lambda: (Shelf,))
    plain = layout_of(pinned=1)
    layout = replace(plain, budgets=Budgets(host=Limits(plain).least_budget + 3 * plain.page_bytes))
    cache, k = KVCache.empty(layout, 80), torch.randn(N_LAYERS, N_HEADS, 80, DIM)
    for layer in cache.layers:
        layer.write(k[layer.index], -k[layer.index])
    cache.commit()
    cache.reserve(81)
    for layer in cache.layers:
        layer.retire()
        assert torch.equal(layer.span(0, 80)[0], k[layer.index])
        assert torch.equal(layer.tokens(torch.arange(0, 80, 3))[1], -k[layer.index][:, ::3])
    assert [tier.name for tier in cache.tiers] == ["device", "shelf"]
    assert 0 < cache.bytes_by_tier["shelf"] <= Limits(layout).needs(80)["shelf"] == 80 * layout.token_bytes
    assert cache.traffic.keys() == {"device", "shelf"}


def test_an_interruption_at_any_bytecode_loses_no_work_of_a_fetch() -> None:
    """The thread does it or the caller, who comes back for it."""

    def use(fetch: Fetch) -> None:
        fetch.begin()
        fetch.finish()

    for place, nth in places(lambda: use(Fetch(lambda: None)), 1, "Fetch."):
        done: list[str] = []
        fetch = Fetch(lambda done=done: done.append(threading.current_thread().name))  # type: ignore[misc]
        interrupted(lambda fetch=fetch: use(fetch), place, nth)  # type: ignore[misc]
        assert fetch.finish() is None
        assert done
        assert len({name for name in done if name.startswith("lce-fetch")}) <= 1
