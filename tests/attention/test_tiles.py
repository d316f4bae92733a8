"""Tiles by chunk and KV head, and queries as each of their slots sees them."""

from __future__ import annotations

import pytest
import torch

from lce.attention import Tiles, rotate
from lce.attention import tiles as tiles_module
from lce.attention.tiles import SlotQueries
from tests.attention.truth import random, turns_of


def test_the_tile_of_each_choice() -> None:
    index = torch.tensor([[5, -1, 3], [0, 2, -1]])  # two KV heads, three chunks
    tiles = Tiles(random(6, 4, 16, seed=1), random(6, 4, 16, seed=2), index)
    chunk_ids = torch.tensor([[[0, 2]], [[1, -1]], [[0, 1]], [[2, -1]]])  # four query heads, one query, two slots
    assert tiles.chosen(chunk_ids).tolist() == [5, 3, -1, -1, 0, 2, -1, -1]


def test_chunks_of_a_buffer_are_tiles_without_a_copy() -> None:
    k, v = random(2, 3, 4, 16, seed=1), random(2, 3, 4, 16, seed=2)
    tiles = Tiles.of_chunks(k, v)
    assert tiles.index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tiles.k.data_ptr() == k.data_ptr()
    assert torch.equal(tiles.v[4], v[1, 1])


@pytest.mark.parametrize("per_slot", [True, False])
def test_rows_are_the_same_rotated_at_once_or_as_they_are_taken(
    per_slot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, turns = random(4, 9, 16, seed=1), turns_of(9, 3 if per_slot else 1)
    every = rotate(q[:, :, None], turns).expand(4, 9, 3, 16).reshape(-1, 16)
    rows = torch.randint(len(every), (50,), generator=torch.Generator().manual_seed(2))
    for at_once in (1 << 20, 0):
        monkeypatch.setattr(tiles_module, "AT_ONCE", at_once)
        assert torch.equal(SlotQueries(q, turns, 3).take(rows), every[rows])


def test_queries_of_a_transposed_projection() -> None:
    q, turns = random(9, 4, 16, seed=1).transpose(0, 1), turns_of(9, 3)
    rows = torch.arange(4 * 9 * 3)
    assert torch.equal(SlotQueries(q, turns, 3).take(rows), rotate(q[:, :, None], turns).reshape(-1, 16))
