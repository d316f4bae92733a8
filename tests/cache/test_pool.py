"""Pools of slots: who leaves when there is no room, who never does, and what is found again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lce.cache.pool import Numbers, Pages, PageShape, Pool, Table
from torch import Tensor

from lce.cache.movers import Mover
from lce.errors import CapacityError

SHAPE = PageShape(n_layers=2, n_groups=2, heads=1, chunk_size=4, head_dim=2, dtype=torch.float32)


def pool(limit: int | None) -> Pool:
    return Pool("host", SHAPE, Mover(), limit)


def at(*pages: tuple[int, int]) -> Pages:
    """Pages by lane and chunk."""
    lanes, chunks = np.array(pages, np.int64).reshape(-1, 2).T
    return lanes, chunks


def content(pages: Pages) -> Tensor:
    """Keys of pages `[m, P, L, D]` such as no other page has."""
    base = torch.from_numpy(pages[0] * 1000 + pages[1]).float()
    return (base[:, None] + torch.arange(8) / 8).view(-1, 1, 4, 2)


def put(to: Pool, tick: int, *pages: tuple[int, int]) -> Numbers:
    """Make room for pages that the pool has not, and put them there; their slots."""
    slots = to.victims(len(pages), tick)
    to.drop(slots[to.lane[slots] >= 0])
    to.fill(slots, at(*pages), content(at(*pages)), -content(at(*pages)), tick)
    return slots


def has(of: Pool, lane: int = 0) -> list[int]:
    """Chunks of a lane that the pool holds."""
    return np.flatnonzero(of.find(np.array([lane]), np.arange(60)) >= 0).tolist()


def test_sizes_of_pages() -> None:
    assert SHAPE.row_shape == (2, 1, 2)
    assert SHAPE.n_bytes == 2 * 4 * 2 * 4
    assert (pool(5).n_slots, pool(5).n_bytes) == (5, 5 * SHAPE.n_bytes)


def test_what_is_put_is_found_and_taken() -> None:
    ours = pool(4)
    pages = at((0, 3), (3, 3), (1, 50))
    slots = put(ours, 1, (0, 3), (3, 3), (1, 50))
    assert np.array_equal(ours.find(*pages), slots)
    k, v = ours.take(slots[::-1].copy())
    assert torch.equal(k, content(pages).flip(0))
    assert torch.equal(v, -k)
    assert ours.find(np.arange(4), np.array([3])).tolist() == [slots[0], -1, -1, slots[1]]
    assert (ours.traffic.bytes_in, ours.traffic.bytes_out) == (3 * SHAPE.n_bytes, 3 * SHAPE.n_bytes)


def test_what_is_taken_is_a_copy() -> None:
    ours = pool(1)
    slots = put(ours, 1, (0, 0))
    ours.take(slots)[0].zero_()
    assert torch.equal(ours.take(slots)[0], content(at((0, 0))))


def test_free_slots_are_filled_before_anyone_leaves() -> None:
    ours = pool(5)
    for chunk in range(5):
        assert ours.n_free == 5 - chunk
        put(ours, chunk + 1, (0, chunk))
    assert ours.n_free == 0
    assert has(ours) == [0, 1, 2, 3, 4]
    ours.drop(ours.find(*at((0, 2))))
    assert ours.n_free == 1
    put(ours, 9, (0, 7))
    assert has(ours) == [0, 1, 3, 4, 7]


def test_the_least_recently_used_leaves_first() -> None:
    ours = pool(3)
    for chunk in range(3):
        put(ours, chunk + 1, (0, chunk))
    ours.used[ours.find(*at((0, 0)))] = 4
    put(ours, 5, (0, 3))
    assert has(ours) == [0, 2, 3]
    put(ours, 6, (0, 4))
    assert has(ours) == [0, 3, 4]
    put(ours, 7, (0, 5))
    assert has(ours) == [3, 4, 5]


def test_pinned_pages_never_leave() -> None:
    ours = pool(3)
    slots = put(ours, 1, (0, 0))
    ours.pinned[slots] = True
    for chunk in range(1, 40):
        put(ours, chunk + 1, (0, chunk))
        assert 0 in has(ours)
    assert has(ours) == [0, 38, 39]
    with pytest.raises(CapacityError):
        ours.victims(3, 100)
    ours.drop(slots)  # by name they do, and leave no pin behind
    put(ours, 50, (0, 40))
    put(ours, 51, (0, 41), (0, 42), (0, 43))
    assert has(ours) == [41, 42, 43]


def test_pages_in_use_do_not_leave() -> None:
    ours = pool(3)
    put(ours, 5, (0, 0), (0, 1))
    put(ours, 4, (0, 2))
    assert ours.victims(1, 5).tolist() == ours.find(*at((0, 2))).tolist()
    with pytest.raises(CapacityError, match=r"^the host cache has no room for 2 more pages; give it a larger budget\Z"):
        ours.victims(2, 5)
    assert has(ours) == [0, 1, 2]
    assert len(ours.victims(3, 6)) == 3


@pytest.mark.parametrize(("limit", "n"), [(0, 1), (3, 4), (3, 1000)])
def test_more_than_there_are_slots(limit: int, n: int) -> None:
    with pytest.raises(CapacityError, match=f"no room for {n} more pages"):
        pool(limit).victims(n, 1)
    assert pool(limit).victims(0, 1).tolist() == []


def test_without_a_limit_it_grows_and_keeps_what_it_has() -> None:
    ours, sizes = pool(None), set()
    for chunk in range(0, 1000, 10):
        put(ours, chunk + 1, *((lane, chunk + i) for lane in range(4) for i in range(10)))
        sizes.add(ours.n_slots)
        assert (ours.lane >= 0).sum() <= ours.n_slots <= max(16, 40 + (ours.lane >= 0).sum() * 3 // 2)
    assert len(sizes) < 20
    pages = at(*((lane, chunk) for lane in range(4) for chunk in range(1000)))
    assert torch.equal(ours.take(ours.find(*pages))[0], content(pages))


def test_a_page_that_was_put_twice_is_the_later_one_whoever_leaves() -> None:
    ours = pool(3)
    first = put(ours, 1, (0, 0))
    second = put(ours, 2, (0, 0))
    assert ours.find(*at((0, 0))).tolist() == second.tolist() != first.tolist()
    ours.drop(first)
    assert ours.find(*at((0, 0))).tolist() == second.tolist()
    ours.drop(second)
    assert has(ours) == []


@given(
    limit=st.one_of(st.none(), st.integers(3, 9)),
    steps=st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 25)), max_size=3, unique=True), max_size=30),
)
@settings(max_examples=80, deadline=None)
def test_it_holds_what_was_used_last(limit: int | None, steps: list[list[tuple[int, int]]]) -> None:
    """Against a dictionary of when each page was used."""
    ours, used = pool(limit), dict[tuple[int, int], int]()
    for tick, pages in enumerate(steps, 1):
        slots = ours.find(*at(*pages))
        assert (slots >= 0).tolist() == [page in used for page in pages]
        ours.used[slots[slots >= 0]] = tick
        put(ours, tick, *(page for page in pages if page not in used))
        used |= dict.fromkeys(pages, tick)
        held = [page for page in used if ours.find(*at(page))[0] >= 0]
        left = [used.pop(page) for page in set(used) - set(held)]
        assert len(held) == min(limit or len(held), len(held) + len(left)) == (ours.lane >= 0).sum()
        assert set(pages) <= set(held)
        assert max(left, default=0) <= min(used.values(), default=0)
        k, v = ours.take(ours.find(*at(*held)))
        assert torch.equal(k, content(at(*held)))
        assert torch.equal(v, -content(at(*held)))


def test_a_table_is_minus_one_until_it_is_set() -> None:
    table = Table(SHAPE)
    pages = at((0, 0), (3, 5), (2, 5000))
    assert table[pages].tolist() == [-1, -1, -1]
    table[pages] = np.array([7, 8, 9])
    table[at((1, 70_000))] = 3
    assert table[pages].tolist() == [7, 8, 9]
    assert table[at((1, 70_000), (0, 70_000))].tolist() == [3, -1]
    assert table[np.arange(4), np.array([5])].tolist() == [-1, -1, -1, 8]
    assert table[at()].tolist() == []


def test_a_copied_table_is_its_own() -> None:
    table = Table(SHAPE)
    table[at((0, 0))] = 1
    copy = table.copy()
    copy[at((0, 0), (1, 500))] = 2
    table[at((2, 2))] = 3
    assert table[at((0, 0), (1, 500), (2, 2))].tolist() == [1, -1, 3]
    assert copy[at((0, 0), (1, 500), (2, 2))].tolist() == [2, 2, -1]


@given(
    sets=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400), st.integers(0, 99)), max_size=40),
    asked=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 500)), max_size=40),
)
@settings(max_examples=60, deadline=None)
def test_a_table_is_a_dictionary(sets: list[tuple[int, int, int]], asked: list[tuple[int, int]]) -> None:
    table, model = Table(SHAPE), dict[tuple[int, int], int]()
    for lane, chunk, value in sets:
        table[at((lane, chunk))] = value
        model[lane, chunk] = value
    assert table[at(*asked)].tolist() == [model.get(page, -1) for page in asked]
