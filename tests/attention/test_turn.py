"""Rotations: each pair of dimensions as one complex number, for every shape that broadcasts."""

from __future__ import annotations

import torch

from lce.attention import Turn, append, rotate
from tests.attention.truth import random, turned, turns_of
from tests.pretended import Gpus
from tests.pretended.launches import launched


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


def test_keys_are_appended_where_a_tensor_says() -> None:
    joined, turn = random(5, 3, 16, seed=2), turns_of(3, 1).at(slice(None), 0)
    k, v = joined[:2], joined[2:4]
    for turns in (turn, None):
        into, there = torch.zeros(2, 2, 9, 16), torch.zeros(2, 2, 9, 16)
        append(k, v, into[0], into[1], 4, turns)
        append(k, v, there[0], there[1], torch.tensor([4]), turns)
        torch.testing.assert_close(there, into, rtol=1e-6, atol=1e-6)


def test_on_a_gpu_each_is_one_launch(triton_gpus: Gpus) -> None:
    joined, turn = random(5, 1, 16, seed=2), turns_of(1, 1).at(slice(None), 0)
    into = torch.zeros(2, 2, 9, 16)
    append(joined[:2], joined[2:4], into[0], into[1], 4, turn)
    on_gpu, placed = joined.cuda(), Turn(turn.cos.cuda(), turn.sin.cuda())
    for at in (4, torch.tensor([4], device="cuda")):
        there = torch.zeros(2, 2, 9, 16, device="cuda")
        with triton_gpus.counting() as counts:
            append(on_gpu[:2], on_gpu[2:4], there[0], there[1], at, placed)
            result = rotate(on_gpu[:2], placed)
        assert launched(counts) == ["_append", "_rotate"]
        torch.testing.assert_close(there.cpu(), into, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result.cpu(), into[0, :, 4:5], rtol=1e-6, atol=1e-6)
