"""The chunk table: its rows follow the tokens, its summaries the complete chunks, its counts the choices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lce.cache.chunks import ChunkTable
from torch import Tensor

CPU = torch.device("cpu")


def summaries(n: int, start: int = 0) -> Tensor:
    """`[2, n, 3]`, each chunk's filled with its number."""
    return torch.arange(start, start + n).float()[None, :, None].expand(2, n, 3)


def test_rows_say_which_tokens_a_chunk_holds() -> None:
    table = ChunkTable(16, CPU)
    assert (table.n_chunks, table.first.tolist(), table.summary) == (0, [], None)
    table.cover(40)
    assert table.first.tolist() == [0, 16, 32]
    assert table.length.tolist() == [16, 16, 8]
    table.cover(48)
    assert table.length.tolist() == [16, 16, 16]
    table.cover(49)
    assert table.first.tolist() == [0, 16, 32, 48]
    assert table.length.tolist() == [16, 16, 16, 1]


@given(size=st.integers(1, 20), lengths=st.lists(st.integers(0, 200), min_size=1, max_size=15))
@settings(max_examples=100, deadline=None)
def test_rows_follow_any_growing_and_shrinking(size: int, lengths: list[int]) -> None:
    table = ChunkTable(size, CPU)
    for n in lengths:
        table.cover(n)
        expected = [(start, min(size, n - start)) for start in range(0, n, size)]
        assert list(zip(table.first.tolist(), table.length.tolist(), strict=True)) == expected
        assert table.n_chunks == len(expected) == len(table.last_use)
        assert len(table.last_use) == len(table.times_selected) == len(expected)


def test_summaries_are_kept_in_order() -> None:
    table = ChunkTable(4, CPU)
    table.cover(4 * 40 + 1)
    start = 0
    for n in (1, 3, 0, 30, 6):
        table.add_summaries(summaries(n, start))
        start += n
        assert table.n_summaries == start
        assert table.summary is not None
        assert torch.equal(table.summary, summaries(start))


def test_summaries_may_be_of_any_shape() -> None:
    table = ChunkTable(4, CPU)
    table.cover(8)
    table.add_summaries(torch.ones(5, 2, 4, 7, dtype=torch.bfloat16))
    assert table.summary is not None
    assert table.summary.shape == (5, 2, 4, 7)
    assert table.summary.dtype == torch.bfloat16


def test_summaries_of_a_discarded_pass_go_with_it() -> None:
    table = ChunkTable(4, CPU)
    table.cover(11)
    table.add_summaries(summaries(1))  # a method may summarise later than a chunk is complete
    table.commit()
    table.cover(30)
    table.add_summaries(summaries(5, 100))
    table.discard(11)
    assert (table.n_chunks, table.n_summaries) == (3, 1)
    table.cover(30)
    assert table.n_summaries == 1, "complete again, but with other tokens"
    table.add_summaries(summaries(5, 200))
    table.commit()
    copy = table.copy()
    copy.add_summaries(summaries(1))
    copy.discard(30)
    assert (copy.n_summaries, table.n_summaries) == (6, 6)
    assert copy.summary is not None
    assert torch.equal(copy.summary[:, :1], summaries(1))
    assert torch.equal(copy.summary[:, 1:], summaries(5, 200))


def test_choices_are_counted() -> None:
    table = ChunkTable(4, CPU)
    table.cover(20)
    table.note_use(torch.tensor([[[0, 2, -1], [0, 3, -1]], [[-1, -1, -1], [0, 2, 3]]]), step=7)
    assert table.times_selected.tolist() == [3, 0, 2, 2, 0]
    assert table.last_use.tolist() == [7, 0, 7, 7, 0]
    table.note_use(torch.tensor([2, -1]), step=9)
    assert table.times_selected.tolist() == [3, 0, 3, 2, 0]
    assert table.last_use.tolist() == [7, 0, 9, 7, 0]
    table.note_use(torch.tensor([-1]), step=11)
    assert table.last_use.tolist() == [7, 0, 9, 7, 0]


@given(
    choices=st.lists(st.lists(st.integers(-1, 6), min_size=1, max_size=30), max_size=6),
)
@settings(max_examples=50, deadline=None)
def test_counts_are_those_of_the_choices(choices: list[list[int]]) -> None:
    table = ChunkTable(3, CPU)
    table.cover(20)
    for step, chosen in enumerate(choices, start=1):
        table.note_use(torch.tensor(chosen), step)
    for chunk in range(7):
        assert table.times_selected[chunk] == sum(chosen.count(chunk) for chosen in choices)
        used = [step for step, chosen in enumerate(choices, start=1) if chunk in chosen]
        assert table.last_use[chunk] == max(used, default=0)


def test_a_new_chunk_has_not_been_used() -> None:
    """Also where one was before, of a pass that was discarded."""
    table = ChunkTable(4, CPU)
    table.cover(12)
    table.note_use(torch.tensor([0, 1, 2]), step=12)
    table.cover(5)
    table.cover(12)
    assert table.times_selected.tolist() == [1, 1, 0]
    assert table.last_use.tolist() == [12, 12, 0]


def test_counts_outlive_growth() -> None:
    table = ChunkTable(1, CPU)
    table.cover(2)
    table.note_use(torch.tensor([0, 1, 1]), step=3)
    table.cover(500)
    assert table.times_selected[:3].tolist() == [1, 2, 0]
    assert table.times_selected.sum() == 3


def test_a_copy_is_its_own() -> None:
    table = ChunkTable(4, CPU)
    table.cover(10)
    table.add_summaries(summaries(2))
    table.note_use(torch.tensor([1]), step=5)
    copy = table.copy()
    table.note_use(torch.tensor([1]), step=6)
    table.cover(12)
    table.cover(30)
    table.add_summaries(summaries(5, 50))
    assert copy.summary is not None
    assert torch.equal(copy.summary, summaries(2))
    assert copy.length.tolist() == [4, 4, 2]
    assert copy.times_selected.tolist() == [0, 1, 0]
    assert copy.last_use.tolist() == [0, 5, 0]
    copy.cover(17)
    copy.add_summaries(summaries(2, 9))
    assert table.n_summaries == 7
    assert copy.summary[0, :, 0].tolist() == [0, 1, 9, 10]
    assert table.summary is not None
    assert table.summary[0, :, 0].tolist() == [0, 1, 50, 51, 52, 53, 54]


def test_a_copy_of_an_empty_table() -> None:
    copy = ChunkTable(4, CPU).copy()
    assert copy.summary is None
    copy.cover(9)
    assert copy.length.tolist() == [4, 4, 1]


@pytest.mark.parametrize("n", [1, 100, 3000])
def test_growing_a_token_at_a_time_moves_seldom(n: int) -> None:
    table = ChunkTable(1, CPU)
    moves, before = 0, table.first.data_ptr()
    for length in range(1, n + 1):
        table.cover(length)
        moves += table.first.data_ptr() != before
        before = table.first.data_ptr()
    assert moves <= 3 + 2.5 * torch.tensor(float(n)).log2()
    assert table.first.tolist() == list(range(n))


def test_bytes_are_those_of_the_buffers() -> None:
    table = ChunkTable(4, CPU)
    assert table.n_bytes == 0
    table.cover(40)
    assert table.n_bytes == 10 * 4 * 8
    table.add_summaries(summaries(10))
    assert table.n_bytes == 10 * 4 * 8 + 2 * 16 * 3 * 4
