"""Tiers: every page is found again with its own numbers, in whatever tier it is, in whatever order it is asked for."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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

from lce.cache.kv import KVCache
from lce.cache.layout import UNBOUNDED, AccessPattern, Budgets, CacheLayout, power_of_two
from lce.cache.movers import Mover
from lce.cache.pages import PageTable
from lce.cache.row_file import RowFile, SpillFile
from lce.cache.tiers import Disk, Nowhere, Numbers, PageIndex, Pages, Pool, Tier, TierStack, Traffic
from lce.errors import CapacityError, DataError
from tests.interrupts import interrupted, places
from tests.late import ORDERS, Late, LateDevice, disks_of, no_gpu
from tests.running import rounded

CPU = torch.device("cpu")
N_LAYERS, N_HEADS, SIZE, DIM = 2, 2, 4, 2  # of most layouts here
TIERS = ("memory", "memory, file", "device, host", "device, host, file", "device, file")


def layout_of(heads: int = 1, *, pinned: int = 0) -> CacheLayout:
    """Pages of so many heads; the first chunks stay on the device."""
    access = AccessPattern(SIZE, sinks=pinned * SIZE, per_head=heads == 1)
    return CacheLayout(N_LAYERS, N_HEADS, N_HEADS, DIM, torch.float32, CPU, access)


def tiers_of(
    tiers: str, *, heads: int = 1, limit: int = UNBOUNDED, below: int = UNBOUNDED, pinned: int = 0,
    kv_dtype: str = "auto",
) -> CacheLayout:  # fmt: skip
    """A layout with these tiers: `limit` pages in the first, `below` in the host's."""
    plain = replace(layout_of(heads, pinned=pinned), kv_dtype=kv_dtype)
    budget = None
    if limit != UNBOUNDED:
        budget = plain.recent_tokens * plain.token_bytes + limit * plain.page_bytes
    if "memory" in tiers:
        return replace(plain, budgets=Budgets(host=budget))
    host = None if below == UNBOUNDED else below * power_of_two(plain.format.page_bytes)
    late = LateDevice(N_LAYERS, N_HEADS, N_HEADS, DIM, torch.float32, CPU, plain.access, kv_dtype=kv_dtype)
    return replace(late, budgets=Budgets(budget, host if "host" in tiers else 0))


def file_for(tiers: str, layout: CacheLayout, folder: Path) -> RowFile | None:
    return SpillFile(folder, layout.format) if "file" in tiers else None


def stack(layout: CacheLayout, file: RowFile | None) -> TierStack:
    return TierStack(layout, Nowhere() if file is None else Disk(layout, file, Nowhere()))


def disk_of(tiers: TierStack) -> Traffic:
    """What went through the files of a stack."""
    return disks_of(tiers)[0].traffic if disks_of(tiers) else Traffic()


def at(*pages: tuple[int, int]) -> Pages:
    """Pages by group and chunk."""
    return Pages(*np.array(pages, np.int64).reshape(-1, 2).T)


# Pages and their index


def test_a_grid_is_every_group_with_every_chunk() -> None:
    grid = Pages.grid(np.array([3, 5]), np.array([7, 8, 9]))
    assert list(zip(*grid, strict=True)) == [(3, 7), (3, 8), (3, 9), (5, 7), (5, 8), (5, 9)]
    assert list(zip(*grid.at(np.array([5, 0])), strict=True)) == [(5, 9), (3, 7)]
    assert list(zip(*grid.at(slice(2, 4)), strict=True)) == [(3, 9), (5, 7)]


@given(
    sets=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400), st.integers(0, 99)), max_size=40),
    asked=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 500)), max_size=40),
)
@settings(max_examples=60, deadline=None)
def test_an_index_is_a_dictionary(sets: list[tuple[int, int, int]], asked: list[tuple[int, int]]) -> None:
    index, model = PageIndex(layout_of()), dict[tuple[int, int], int]()
    for group, chunk, value in sets:
        index[at((group, chunk))] = value
        model[group, chunk] = value
    assert index[at(*asked)].tolist() == [model.get(page, -1) for page in asked]


# A pool above a tier that has and takes anything


def content(pages: Pages) -> Tensor:
    """Keys of pages `[m, P, L, D]` such as no other page has."""
    base = torch.from_numpy(pages.group * 1000 + pages.chunk).float()
    return (base[:, None] + torch.arange(8) / 8).view(-1, 1, 4, 2)


@dataclass
class Everything(Tier):
    """Has every page that is in `have`, and takes any; `None` has all."""

    name = "everything"
    format = layout_of().plain
    have: set[tuple[int, int]] | None = None
    written: list[tuple[int, int]] = field(default_factory=list)
    n_bytes = 0

    def holds(self, pages: Pages) -> NDArray[np.bool_]:
        return np.array([self.have is None or page in self.have for page in zip(*pages, strict=True)], bool)

    def read(self, pages: Pages) -> tuple[Tensor, Tensor]:
        assert self.holds(pages).all()
        return content(pages), -content(pages)

    def read_rows(self, pages: Pages, offsets: Numbers) -> Tensor:
        rows = torch.arange(len(offsets)), slice(None), torch.from_numpy(offsets)
        return torch.stack((content(pages)[rows], -content(pages)[rows]), dim=1)

    def write(self, pages: Pages, k: Tensor, v: Tensor) -> None:
        assert self.have is not None
        assert torch.equal(k, content(pages))
        assert torch.equal(v, -k)
        new = [(int(group), int(chunk)) for group, chunk in zip(*pages, strict=True)]
        assert not self.have & set(new), "written twice"
        self.have.update(new)
        self.written += new

    def forget(self, pages: Pages) -> None:
        assert self.have is not None
        self.have.difference_update((int(group), int(chunk)) for group, chunk in zip(*pages, strict=True))


def pool(limit: int, below: Tier | None = None, pinned: int = 0) -> Pool:
    return Pool("host", layout_of().plain, layout_of(), Mover(), below or Everything(), limit, pinned)


def put(to: Pool, *pages: tuple[int, int]) -> Numbers:
    """Write pages that the pool has not; their slots."""
    to.write(at(*pages), content(at(*pages)), -content(at(*pages)))
    return to.find(at(*pages))


def chunks_in(of: Pool, group: int = 0) -> list[int]:
    """Chunks of a group that the pool holds."""
    return np.flatnonzero(of.find(Pages.grid(np.array([group]), np.arange(60))) >= 0).tolist()


def test_the_least_recently_used_leaves_first() -> None:
    ours = pool(3)
    for chunk in range(3):
        put(ours, (0, chunk))
    ours.bring(at((0, 0)))
    put(ours, (0, 3))
    assert chunks_in(ours) == [0, 2, 3]
    put(ours, (0, 4))
    assert chunks_in(ours) == [0, 3, 4]
    ours.read(at((0, 3)))
    put(ours, (0, 5))
    assert chunks_in(ours) == [3, 4, 5]
    ours.read_rows(at((0, 3)), np.zeros(1, np.int64))
    ours.bring(at((0, 6), (0, 7)))
    assert chunks_in(ours) == [3, 6, 7]


def test_pages_that_no_tier_below_has_move_down_first() -> None:
    below = Everything({(0, 1)})
    ours = pool(3, below)
    for chunk in range(3):
        put(ours, (0, chunk))
    put(ours, (0, 3), (0, 4))
    assert below.written == [(0, 0)], "the other one is there"
    assert chunks_in(ours) == [2, 3, 4]
    assert ours.holds(at((0, 0), (0, 1), (0, 2), (0, 5))).tolist() == [True, True, True, False]
    ours.bring(at((0, 0), (0, 1)))
    assert sorted(below.written) == [(0, 0), (0, 2), (0, 3)]


def test_pinned_pages_never_leave() -> None:
    ours = pool(2 + 4, pinned=1)  # one chunk of two layers with two groups each
    put(ours, (0, 0))
    for chunk in range(1, 40):
        put(ours, (0, chunk))
        assert 0 in chunks_in(ours)
    assert chunks_in(ours) == [0, 35, 36, 37, 38, 39]
    assert ours.capacity == 2
    with pytest.raises(CapacityError):
        ours.bring(at(*((1, chunk) for chunk in range(6))))
    put(ours, (0, 0), (0, 40))  # written again by a call that follows a failed one
    assert 0 in chunks_in(ours)
    assert ours.find(at((0, 0)))[0] >= 0


def test_pages_in_use_do_not_leave() -> None:
    ours = pool(3)
    put(ours, (0, 2))
    put(ours, (0, 0), (0, 1))
    ours.bring(at((0, 0), (0, 1), (0, 3)))
    assert chunks_in(ours) == [0, 1, 3]
    with pytest.raises(
        CapacityError, match=r"^the host cache has no space for 2 more pages; give it a larger budget\Z"
    ):
        ours.bring(at((0, 0), (0, 1), (0, 4), (0, 5)))
    assert chunks_in(ours) == [0, 1, 3]
    ours.bring(at((0, 4), (0, 5), (0, 6)))
    assert chunks_in(ours) == [4, 5, 6]


@given(
    limit=st.one_of(st.just(UNBOUNDED), st.integers(3, 9)),
    steps=st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 25)), max_size=3, unique=True), max_size=30),
)
@settings(max_examples=80, deadline=None)
def test_it_holds_what_was_used_last(limit: int, steps: list[list[tuple[int, int]]]) -> None:
    """Against a dictionary of when each page was used."""
    ours, used = pool(limit), dict[tuple[int, int], int]()
    for tick, pages in enumerate(steps, 1):
        assert (ours.find(at(*pages)) >= 0).tolist() == [page in used for page in pages]
        slots = ours.bring(at(*pages))
        assert ours.find(at(*pages)).tolist() == slots.tolist()
        used |= dict.fromkeys(pages, tick)
        held = [page for page in used if ours.find(at(page))[0] >= 0]
        left = [used.pop(page) for page in set(used) - set(held)]
        assert len(held) == min(limit, len(held) + len(left)) == (ours.group >= 0).sum()
        assert set(pages) <= set(held)
        assert max(left, default=0) <= min(used.values(), default=0)
        k, v = ours.take(ours.find(at(*held)))
        assert torch.equal(k, content(at(*held)))
        assert torch.equal(v, -content(at(*held)))


# A chain of two files


def test_a_spill_file_above_a_saved_one(tmp_path: Path) -> None:
    """What the lower one has is not written again; both count as one tier; a fork has pages of its own above it."""
    layout = layout_of()
    lower, upper = (SpillFile(tmp_path, layout.format) for _ in range(2))
    base = Disk(layout, lower, Nowhere())
    old, new = at((0, 0), (3, 0), (1, 2)), at((2, 0), (0, 1))
    base.write(old, content(old), -content(old))
    disk = Disk(layout, upper, base)
    assert disk.holds(at((0, 0), (2, 0))).tolist() == [True, False]
    disk.write(new, content(new), -content(new))
    assert (lower.n_rows, upper.n_rows) == (3 * SIZE, 2 * SIZE)
    assert (disk.n_bytes, base.n_bytes) == (upper.n_bytes, lower.n_bytes)
    pages = at((2, 0), (3, 0), (0, 1), (0, 0), (1, 2))
    k, v = disk.read(pages)
    assert torch.equal(k, content(pages))
    assert torch.equal(v, -content(pages))
    offsets = np.array([3, 0, 1, 2, 2])
    rows = disk.read_rows(pages, offsets)
    assert torch.equal(rows[:, 0], content(pages)[torch.arange(5), :, torch.from_numpy(offsets)])
    assert torch.equal(rows[:, 1], -rows[:, 0])
    only_old = at((0, 0))
    assert torch.equal(disk.read(only_old)[0], content(only_old))
    assert disk.traffic is base.traffic
    assert disk.traffic.hits == 6
    assert disk.traffic.bytes_in == lower.bytes_written + upper.bytes_written
    assert disk.traffic.bytes_out == lower.bytes_read + upper.bytes_read
    fork = disk.fork()
    more = at((2, 9))
    fork.write(more, content(more), -content(more))
    assert fork.holds(at((2, 9), (2, 0), (0, 0))).all()
    assert not disk.holds(more).any()
    assert fork.traffic is not disk.traffic
    assert torch.equal(disk.read(pages)[0], fork.read(pages)[0])


def test_nowhere_has_nothing_and_takes_nothing() -> None:
    nowhere, pages = Nowhere(), at((0, 0), (1, 5))
    assert nowhere.holds(pages).tolist() == [False, False]
    with pytest.raises(CapacityError, match=r"^the cache of keys and values is full; give --spill-dir, or a larger b"):
        nowhere.write(pages, content(pages), content(pages))
    for read in (lambda: nowhere.read(pages), lambda: nowhere.read_rows(pages, np.zeros(2, np.int64))):
        with pytest.raises(AssertionError, match="a page that is in no tier"):
            read()


# Stacks


class Branch:
    """A stack of tiers, and beside it all that it should hold: `k[layer] [G, chunks, L, D]`; values are `-k`."""

    def __init__(self, tiers: TierStack, k: list[Tensor] | None = None) -> None:
        self.tiers = tiers
        self.layout = tiers.layout
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
        return self.top.find(pages).reshape(self.layout.n_groups, -1) >= 0

    def add(self, layer: int, k: Tensor) -> None:
        flat = k.flatten(1, 2)  # [G, m·L, D]
        self.tiers.add(layer, self.n_chunks(layer), flat, -flat)
        self.k[layer] = torch.cat((self.k[layer], k), dim=1)

    def rounds(self, layer: int, wanted: NDArray[np.bool_]) -> None:
        """Every page that is wanted comes once, with its numbers; those that are there are hits, the others misses.

        One round alone has others, too.
        """
        held, before, per_page = self.held(layer), replace(self.top.traffic), self.layout.page_heads
        seen = torch.zeros(N_HEADS, wanted.shape[1], dtype=torch.bool)
        for tiles in self.tiers.rounds(layer, wanted):
            here = tiles.index >= 0
            assert here.shape == seen.shape
            here &= torch.from_numpy(wanted.repeat(per_page, axis=0))
            assert 0 < int(here.sum()) <= self.top.capacity * per_page
            assert not (seen & here).any()
            seen |= here
            assert torch.equal(tiles.k[tiles.index[here]], self.k[layer][here])
            assert torch.equal(tiles.v[tiles.index[here]], -self.k[layer][here])
        assert np.array_equal(seen.numpy(), wanted.repeat(per_page, axis=0))
        assert self.top.traffic.hits - before.hits == (wanted & held).sum()
        assert self.top.traffic.misses - before.misses == (wanted & ~held).sum()
        self.asked[layer] = Pages(*np.nonzero(wanted))

    def chunks(self, layer: int, first: int, stop: int) -> None:
        """All is there, and is not brought in place of what was in the pool."""
        held, free = self.held(layer), self.top.n_free
        k, v = self.tiers.chunks(layer, first, stop)
        assert torch.equal(k, self.k[layer][:, first:stop].flatten(1, 2))
        assert torch.equal(v, -self.k[layer][:, first:stop].flatten(1, 2))
        fits = (~held[:, first:stop]).sum() <= free
        held[:, first:stop] |= fits
        assert np.array_equal(self.held(layer), held)

    def tokens(self, layer: int, index: Numbers) -> None:
        """A chunk of which half is asked comes whole, of the others the tokens alone."""
        held = self.held(layer)
        k, v = self.tiers.tokens(layer, index)
        assert torch.equal(k, self.k[layer].flatten(1, 2)[:, index])
        assert torch.equal(v, -self.k[layer].flatten(1, 2)[:, index])
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


class AnyOrder(RuleBasedStateMachine):
    """Stacks and their forks, read and written in any order, over a disk that now and then refuses a write."""

    branches = Bundle("branches")

    @initialize(
        target=branches, tiers=st.sampled_from(TIERS), heads=st.sampled_from([1, N_HEADS]), spare=st.integers(1, 3),
        below=st.integers(1, 9), pinned=st.integers(0, 1), order=st.sampled_from(ORDERS),
        kv_dtype=st.sampled_from(["auto", "int8"]), slab=st.sampled_from([1, 512]),
    )  # fmt: skip
    def start(
        self, tiers: str, heads: int, spare: int, below: int, pinned: int, order: str, kv_dtype: str,
        slab: int,
    ) -> Branch:  # fmt: skip
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(os, "pwrite", self.write)
        no_gpu(self.patch, order, slab)
        limit = UNBOUNDED if tiers == "memory" else N_HEADS // heads * (spare + pinned * N_LAYERS)
        below = below if "file" in tiers else UNBOUNDED
        self.layout = tiers_of(tiers, heads=heads, limit=limit, below=below, pinned=pinned, kv_dtype=kv_dtype)
        self.folder = TemporaryDirectory()
        file = file_for(tiers, self.layout, Path(self.folder.name))
        self.files = [] if file is None else [file]
        self.all = [Branch(stack(self.layout, file))]
        self.seed = self.n_added = 0
        self.refused = False
        self.until_refusal: int | None = None
        return self.all[0]

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        if self.until_refusal is not None:
            self.until_refusal -= 1
            if self.until_refusal < 0:
                self.refused = True
                raise OSError(errno.ENOSPC, "No space left on device")
        return PWRITE(descriptor, data, offset)

    def attempt(self, act: Callable[[], None]) -> None:
        """What the disk refused is done again when the disk works."""
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
        bottom = Disk(self.layout, self.files[-1], branch.tiers.bottom.fork())
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
                held = branch.held(layer)[:, : self.layout.pinned_chunks]
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
        if not self.refused:
            written = sum(x.bytes_written for x in self.files)
            assert sum(disk_of(branch.tiers).bytes_in for branch in self.all) == written
            assert written <= self.n_added * self.layout.format.page_bytes

    def teardown(self) -> None:
        if not hasattr(self, "all"):
            return
        self.until_refusal = None
        for branch in self.all:
            branch.everything()
        self.patch.undo()
        self.folder.cleanup()


PWRITE = os.pwrite
AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase


# One thing at a time.


@pytest.fixture(autouse=True)
def _late_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu(monkeypatch)


def branch_of(folder: Path, tiers: str, n: int, *, limit: int = 4, below: int = UNBOUNDED, pinned: int = 0) -> Branch:
    """A stack with `n` chunks in every layer, whole chunks to a page."""
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
    return [
        (t.hits, t.misses, t.bytes_in // size, t.bytes_out // size) for t in (tier.traffic for tier in branch.tiers)
    ]


def file_of(branch: Branch) -> RowFile:
    assert isinstance(branch.tiers.bottom, Disk)
    return branch.tiers.bottom.file


def test_a_stack_is_a_chain(tmp_path: Path) -> None:
    expected = {
        "memory": ["device"], "memory, file": ["device", "disk"], "device, host": ["device", "host"],
        "device, host, file": ["device", "host", "disk"], "device, file": ["device", "disk"],
    }  # fmt: skip
    for tiers, names in expected.items():
        branch = branch_of(tmp_path, tiers, 2, limit=UNBOUNDED if tiers == "memory" else 4, below=5)
        assert [tier.name for tier in branch.tiers] == names
        assert [pool.limit for pool in branch.tiers.pools] == [4 if tiers != "memory" else UNBOUNDED, 5][
            : len(branch.tiers.pools)
        ]
        assert len(disks_of(branch.tiers)) == ("file" in tiers)
        assert branch.tiers.groups(1).tolist() == [1]


def test_a_round_is_no_larger_than_the_capacity_even_of_pages_in_slots_kept_for_pinned_ones(tmp_path: Path) -> None:
    layout = tiers_of("memory, file", heads=N_HEADS, limit=1 + N_LAYERS, pinned=1)
    branch = Branch(stack(layout, file_for("memory, file", layout, tmp_path)))
    branch.add(1, chunks_of(5))
    assert branch.held(1).sum() > branch.top.capacity + 1
    branch.rounds(1, np.array([[False, False, False, True, True]]))


def test_counters_of_a_device_over_memory_over_a_file(tmp_path: Path) -> None:
    branch = branch_of(tmp_path, "device, host, file", 3, limit=2, below=3)
    # Layer 0's chunks were copied as they came. Layer 1's first went down when its last came, in place of one of them.
    assert traffic(branch) == [(0, 0, 6, 4), (0, 0, 4, 1), (0, 0, 1, 0)]
    branch.rounds(0, wanted(branch, 0, 2))
    # Read from memory; on the device it took the place of layer 1's chunk 1, that in memory of layer 0's chunk 1.
    assert traffic(branch) == [(0, 1, 7, 5), (1, 0, 5, 3), (0, 0, 2, 0)]
    branch.rounds(0, wanted(branch, 0, 2))
    assert traffic(branch) == [(1, 1, 7, 5), (1, 0, 5, 3), (0, 0, 2, 0)]
    branch.rounds(0, wanted(branch, 0, 0))
    assert traffic(branch)[0][:3] == (1, 2, 8)
    assert traffic(branch)[1][:2] == (1, 1)
    assert traffic(branch)[2][0] == 1


def test_a_request_beyond_the_pool_evicts_little(tmp_path: Path) -> None:
    """Resident pages come first; the missing ones cycle through a quarter of the slots."""
    branch = branch_of(tmp_path, "memory, file", 40, limit=16)
    branch.rounds(0, wanted(branch, 0, *range(16)))
    branch.rounds(0, wanted(branch, 0, *range(40)))
    assert branch.held(0)[:, :16].sum() >= 12
    misses = branch.top.traffic.misses
    branch.rounds(0, wanted(branch, 0, *range(40)))
    assert branch.top.traffic.misses == misses + 24


def test_shrinking_starts_over_over_the_same_file(tmp_path: Path) -> None:
    """With fewer slots, beside larger buffers; what was counted stays counted."""
    branch = branch_of(tmp_path, "device, host, file", 9, limit=12, below=4)
    branch.tiers.write_down()
    branch.rounds(1, wanted(branch, 1, 3, 4))
    before, layout = traffic(branch), branch.layout
    fewer = 2 * layout.chunk_size
    branch.tiers.shrink(layout.recent_tokens + fewer)
    assert branch.top.limit == 12 - fewer * layout.token_bytes // layout.page_bytes
    assert traffic(branch) == before
    assert not branch.held(1).any()
    branch.everything()
    branch.rounds(0, wanted(branch, 0, *range(9)))
    with pytest.raises(CapacityError, match="too small for blocks"):
        branch.tiers.shrink(layout.recent_tokens + 100 * layout.chunk_size)
    branch.everything()


def test_pinned_chunks_stay(tmp_path: Path) -> None:
    """In a stack from the start, in a fork once they were asked for."""
    branch = branch_of(tmp_path, "memory, file", 9, limit=4, pinned=1)  # two for sinks, two for others
    fork = branch.fork()
    for layer in range(N_LAYERS):
        fork.rounds(layer, wanted(fork, layer, 0))
    for each in (branch, fork):
        for chunk in range(9):
            each.rounds(1, wanted(each, 1, chunk))
            assert each.held(0)[:, 0].all()
            assert each.held(1)[:, 0].all()
        each.rounds(0, wanted(each, 0, *range(9)))


def test_single_tokens_come_without_their_chunk(tmp_path: Path) -> None:
    branch = branch_of(tmp_path, "memory, file", 9, limit=4)
    before = branch.held(0)
    disk, row = disk_of(branch.tiers), branch.layout.format.row_bytes
    out = disk.bytes_out
    branch.tokens(0, np.array([0, 4, 8, 12]))
    assert np.array_equal(branch.held(0), before)
    assert disk.bytes_out == out + 4 * row
    branch.tokens(0, np.array([0, 5, 7, 8, 10]))  # chunks 1 and 2 come whole
    assert np.flatnonzero(branch.held(0)).tolist() == [1, 2]
    assert disk.bytes_out == out + 5 * row + 2 * branch.layout.page_bytes


def test_without_a_file_what_does_not_fit_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    branch = branch_of(tmp_path, "device, host", 3, limit=2, below=6)
    with pytest.raises(
        CapacityError, match=r"^the cache of keys and values is full; give --spill-dir, or a larger .*\Z"
    ):
        branch.add(0, chunks_of(2, 5))
    branch.everything()
    branch.rounds(1, wanted(branch, 1, 0, 1, 2))


def test_what_cannot_be_fetched_early_is_refused_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    """Each was copied to the host when it came; the host has each once."""
    branch = Branch(stack(tiers_of("device, host", limit=6, kv_dtype=kv_dtype), None))
    monkeypatch.setattr(Pool, "_hand_down", lambda *_: fail(AssertionError("a copy")))
    for seed in range(6):
        for layer in range(N_LAYERS):
            branch.add(layer, chunks_of(3, seed + 10 * layer))
            branch.rounds(layer, wanted(branch, layer, 0, seed))
    device, host = branch.tiers.pools
    assert (host.group >= 0).sum() == 6 * 3 * N_LAYERS * N_HEADS
    assert host.traffic.bytes_in == (host.group >= 0).sum() * host.page_bytes
    assert device.below.holds(Pages(device.group, device.chunk)).all()
    branch.everything()


def test_the_host_takes_slabs_and_copies_nothing_when_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu(monkeypatch, slab=512)
    branch = Branch(stack(tiers_of("device, host", limit=4), None))
    host = branch.tiers.pools[1]
    assert host.n_bytes == host.n_slots == 0
    firsts = []
    for seed in range(9):
        branch.add(seed % N_LAYERS, chunks_of(2, seed))
        held = host._slots.slabs
        firsts = [*firsts, *held[len(firsts) :]]
        assert all(x is y for x, y in zip(held, firsts, strict=True))
        assert host.n_bytes == len(held) * 512 == branch.layout.slab_bytes_for((seed + 1) * 2 * N_HEADS)
    assert host.n_slots == len(firsts) * 8
    branch.everything()


@pytest.mark.parametrize("tiers", TIERS)
def test_pools_that_grew_in_inference_mode_are_used_outside_it(tmp_path: Path, tiers: str) -> None:
    """A context is opened outside it, generates in it, and is forked, saved and taken back outside it."""
    limit = UNBOUNDED if tiers == "memory" else 5
    branch = branch_of(tmp_path, tiers, 2, limit=limit, below=4 if "file" in tiers else UNBOUNDED)
    with torch.inference_mode():
        for seed in range(9):
            branch.add(seed % N_LAYERS, chunks_of(3, seed))
        branch.rounds(0, wanted(branch, 0, 1, 3, 7))
        branch.prefetch(0)
    branch.rounds(0, wanted(branch, 0, 2, 4, 8))
    branch.prefetch(0)
    branch.add(1, chunks_of(2, 20))
    fork = branch.fork()
    for each in (branch, fork):
        each.everything()
        each.add(0, chunks_of(2, 21))
        each.rounds(0, wanted(each, 0, 0, 5, 9))


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


# The page table of a device


def test_a_page_table_on_the_device_is_that_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, mover, random = layout_of(), Late(), np.random.default_rng(0)
    table, uploads = PageTable(layout, mover), []
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
    table[at((1, 5), (1, 6))] = 7
    table.on_device(slice(0, 2), 100)
    assert uploads[n_uploads:] == [4]


def test_without_a_device_a_page_table_is_not_copied() -> None:
    table = PageTable(layout_of(), Mover())
    table[at((1, 5))] = 7
    assert table.on_device(slice(1, 2), 6).tolist() == [[-1, -1, -1, -1, -1, 7]]
    assert np.shares_memory(table.on_device(slice(0, 4), 6).numpy(), table._numbers)


# A disk that refuses the k-th request and those after it until it works again, for every k.


class Refusals:
    """Stands in for a system call."""

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
def test_a_cache_survives_any_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """With the smallest budget: a pass that is refused leaves the cache as it was, and goes well the next time."""
    monkeypatch.setattr("lce.cache.row_file.GROWTH", 0)
    refusals = Refusals(call, CALLS[call])
    monkeypatch.setattr(os, call, refusals)
    layout = CacheLayout(
        N_LAYERS,
        N_HEADS,
        N_HEADS,
        DIM,
        torch.float32,
        CPU,
        AccessPattern(SIZE, sinks=5, local=3, per_head=True),
        block=6,
    )
    layout = replace(layout, budgets=Budgets(host=layout.least_budget, spill_dir=tmp_path))
    text = torch.randn(N_LAYERS, N_HEADS, 48, DIM, generator=torch.Generator().manual_seed(0))

    def one_pass(start: int) -> None:
        try:
            cache.reserve(start + 6)
            for layer in cache.layers:
                layer.write(text[layer.index, :, start : start + 6], -text[layer.index, :, start : start + 6])
                for _ in layer.tiles(torch.arange(layer.buffer.first // SIZE).view(1, 1, -1).expand(N_HEADS, 1, -1)):
                    pass
        except CapacityError:
            cache.discard()
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
                keys, values = layer.span(0, cache.length)
                assert torch.equal(keys, text[layer.index, :, : cache.length])
                assert torch.equal(values, -keys)
        k += 1
    assert k > 1


# Ctrl-C


FILES = ("tiers.py", "pool.py", "disk.py", "tier.py", "movers.py", "pages.py", "slots.py", "fetching.py")


def check_interruptions(
    tiers: str, every: int, folder: Path, patch: pytest.MonkeyPatch, *where: str, kv_dtype: str = "auto"
) -> None:
    """Add pages, interrupted anywhere; add them again, with others: all are found, with their latest contents."""
    no_gpu(patch)
    layout = tiers_of(tiers, limit=6, kv_dtype=kv_dtype)

    def pages(first: int, stop: int, seed: int) -> tuple[Tensor, Tensor]:
        k = rounded(torch.randn(N_HEADS, 12 * SIZE, DIM, generator=torch.Generator().manual_seed(seed)), SIZE)
        return k[:, first * SIZE : stop * SIZE], -k[:, first * SIZE : stop * SIZE]

    def add(to: TierStack, seed: int) -> None:
        for layer in range(N_LAYERS):
            to.add(layer, 4, *pages(4, 9, seed + layer))
            to.chunks(layer, 2, 6)
            to.prefetch(1 - layer)
            list(to.rounds(layer, np.ones((N_HEADS, 5), bool)))

    def filled() -> TierStack:
        made = stack(layout, file_for(tiers, layout, folder))
        for layer in range(N_LAYERS):
            made.add(layer, 0, *pages(0, 6, layer))  # of which two are to be replaced
        return made

    probe = filled()
    for place, nth in places(lambda: add(probe, 10), every, *(where or FILES)):
        under_test = filled()
        interrupted(lambda under_test=under_test: add(under_test, 10), place, nth)
        add(under_test, 20)
        under_test.top.bring(Pages.grid(under_test.groups(0), np.arange(2)))
        for each in (under_test, under_test.fork()):
            for layer in range(N_LAYERS):
                found = each.chunks(layer, 0, 9)
                for x, old, new in zip(found, pages(0, 4, layer), pages(4, 9, 20 + layer), strict=True):
                    assert torch.equal(x, torch.cat((old, new), dim=1)), place


@pytest.mark.parametrize(("tiers", "kv_dtype"), [*((x, "auto") for x in TIERS[1:]), ("device, host, file", "int8")])
def test_an_interruption_anywhere_leaves_tiers_that_can_be_used(
    tiers: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_interruptions(tiers, 61, tmp_path, monkeypatch, kv_dtype=kv_dtype)


def test_an_interruption_while_slots_change_hands_loses_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every bytecode of it."""
    check_interruptions("memory, file", 1, tmp_path, monkeypatch, "Pool._fill.")


@pytest.mark.slow
@pytest.mark.parametrize("tiers", TIERS[1:])
def test_an_interruption_at_any_bytecode_leaves_tiers_that_can_be_used(
    tiers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_interruptions(tiers, 1, tmp_path, monkeypatch)


def test_pages_that_are_added_again_replace_the_old_ones(tmp_path: Path) -> None:
    """As after a truncation: in the pool, in the file, and when they leave the pool."""
    layout = tiers_of("memory, file", limit=6)
    tiers = stack(layout, file_for("memory, file", layout, tmp_path))
    old, new = torch.randn(2, N_HEADS, 9 * SIZE, DIM)
    tiers.add(0, 0, old, -old)
    tiers.write_down()
    tiers.add(0, 4, new[:, 4 * SIZE :], -new[:, 4 * SIZE :])
    for _ in range(2):
        assert torch.equal(tiers.chunks(0, 0, 9)[0], torch.cat((old[:, : 4 * SIZE], new[:, 4 * SIZE :]), dim=1))
        for chunk in range(4):
            tiers.top.bring(Pages.grid(tiers.groups(0), np.array([chunk])))
