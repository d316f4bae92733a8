"""Norms, gates, rotations and copies against their definitions in float64, in every layout that callers have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lce.kernels.cpu import elementwise
from lce.kernels.cpu.elementwise import take_rows
from tests.kernels import truth
from tests.kernels.truth import EPS, normed, random, rotated

MANY = elementwise.ALONE // 16  # rows of 16 numbers that several threads share


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Within the rounding of the result."""
    truth.assert_close(got, expected, 1e-6 * expected.abs().clamp(min=1))


@pytest.mark.parametrize("n", [1, 5, MANY])
def test_the_norm_of_rows_and_of_heads(n: int, dtype: torch.dtype) -> None:
    weight, rows = random(16, dtype=dtype, seed=2), random(n, 3, 16, dtype=dtype)
    for x in (rows[:, 1].contiguous(), rows[:, 1], rows.transpose(0, 1)):
        got = elementwise.rms_norm(x, weight, EPS)
        assert got.shape == x.shape
        assert_close(got, normed(x, weight))


@pytest.mark.parametrize("n", [1, 5, MANY])
def test_the_gate_of_an_mlp(n: int, dtype: torch.dtype) -> None:
    x = random(n, 46, dtype=dtype) * 8
    assert_close(elementwise.silu_mul(x), truth.gate(x))


@pytest.mark.parametrize("n", [1, 7, MANY])
@pytest.mark.parametrize("layout", ["heads", "tokens first", "one turn", "slots", "rows"])
def test_rotations_broadcast(n: int, layout: str, dtype: torch.dtype) -> None:
    x, turns = random(3, n, 16, dtype=dtype), random(2, n, 8, dtype=dtype, seed=2)
    match layout:
        case "tokens first":
            x = random(n, 3, 16, dtype=dtype).transpose(0, 1)
        case "one turn":
            turns = turns[:, :1]
        case "slots":
            x, turns = x[:, :, None], random(2, n, 4, 8, dtype=dtype, seed=2)
        case "rows":
            x = x[0]
    got = elementwise.rotate(x, *turns)
    assert got.is_contiguous()
    assert_close(got, rotated(x, *turns))


@pytest.mark.parametrize("n", [1, 7, MANY])
@pytest.mark.parametrize("turned", [False, True])
def test_append_writes_its_rows_and_no_others(n: int, turned: bool, dtype: torch.dtype) -> None:
    joined = random(n, 5, 16, dtype=dtype).transpose(0, 1)
    k, v, turns = joined[1:3], joined[3:], random(2, n, 8, dtype=dtype, seed=2)
    into = torch.zeros(2, 2, n + 4, 16, dtype=dtype)
    elementwise.append(k, v, *into, 3, *(turns if turned else (None, None)))
    assert torch.equal(into[0, :, 3 : n + 3], elementwise.rotate(k, *turns) if turned else k)
    assert torch.equal(into[1, :, 3 : n + 3], v)
    assert not into[:, :, :3].any()
    assert not into[:, :, n + 3 :].any()


def test_numbers_are_rounded_as_pytorch_does(dtype: torch.dtype) -> None:
    special = [0.0, -0.0, 1.0, -1.5, 65504.0, 1e-8, 3.0e38, float("inf"), float("-inf"), float("nan"), 1 / 3]
    x = torch.cat([torch.tensor(special), torch.randn(1001)])[:, None].to(dtype)
    cos = torch.randn(len(x), 1).to(dtype)
    got = elementwise.rotate(torch.cat([x, torch.zeros_like(x)], dim=1), cos, torch.zeros_like(cos))[:, :1]
    torch.testing.assert_close(got, (x.float() * cos.float()).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_rows_behind_the_end_are_refused() -> None:
    k, into = torch.zeros(2, 3, 16), torch.zeros(2, 8, 16)
    for at in (-1, 6):
        with pytest.raises(AssertionError):
            elementwise.append(k, k, into, into.clone(), at, None, None)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 90, 3), (3, 200, 64)])
def test_rows_are_those_of_the_index(stored: torch.dtype, shape: tuple[int, int, int]) -> None:
    one, two = ((torch.randn(shape[0], shape[1] + 3, shape[2]) * 9).to(stored)[:, 2:-1] for _ in range(2))
    for index in (torch.arange(shape[1]), torch.randint(shape[1], (77,)), torch.zeros(0, dtype=torch.int64)):
        taken = take_rows((one, two), index)
        assert all(torch.equal(a, x[:, index]) for a, x in zip(taken, (one, two), strict=True))


def test_rows_go_where_the_caller_wants_them() -> None:
    tensors, index = (torch.randn(2, 90, 4), torch.randn(2, 90, 4)), torch.tensor([3, 3, 80])
    buffer = torch.empty(50)
    taken = take_rows(tensors, index, buffer)
    assert all(torch.equal(a, x[:, index]) for a, x in zip(taken, tensors, strict=True))
    assert taken[0].data_ptr() == buffer.data_ptr()
    assert taken[1].data_ptr() == buffer[24:].data_ptr()
    assert torch.equal(take_rows(tensors, index, buffer[:47])[1], tensors[1][:, index])  # too small: not used
