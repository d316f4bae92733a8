"""Rotations: each pair of dimensions as one complex number, for every shape that broadcasts."""

from __future__ import annotations

import torch

from lce.attention import Turn, rotate
from tests.attention.truth import random, turned, turns_of


def test_rotate_turns_pairs_as_complex_numbers() -> None:
    x, turns = random(3, 7, 16, seed=1), turns_of(7, 1).at(slice(None), 0)
    for head in range(3):
        for t in range(7):
            truth = turned(x[head, t], turns.cos[t], turns.sin[t])
            torch.testing.assert_close(rotate(x, turns)[head, t], truth, rtol=0, atol=1e-5)


def test_turns_broadcast_over_heads_and_slots() -> None:
    x, turns = random(3, 7, 16, seed=1), turns_of(7, 4)
    every = rotate(x[:, :, None], turns)
    assert every.shape == (3, 7, 4, 16)
    for slot in range(4):
        assert torch.equal(every[:, :, slot], rotate(x, turns.at(slice(None), slot)))


def test_a_turn_back_undoes_a_turn() -> None:
    x, turns = random(3, 7, 16, seed=1), turns_of(7, 1).at(slice(None), 0)
    torch.testing.assert_close(rotate(rotate(x, turns), Turn(turns.cos, -turns.sin)), x, rtol=0, atol=1e-5)
