"""Vectors of 16 numbers: products, transpositions, dot products, the largest number, and a queue."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from lce.kernels.cpu import vectors

NEEDS_PAIRS = pytest.mark.skipif(not vectors.PAIRS, reason="this processor does not multiply pairs of bfloat16 numbers")
PAIRS = [False, pytest.param(True, marks=NEEDS_PAIRS)]
HALVES = [torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def words(x: Tensor) -> Any:
    """A tensor's bytes, as Numba takes them."""
    return x.contiguous().view(torch.uint8).numpy()


def paired(x: Tensor) -> Tensor:
    """Rows `2i` and `2i + 1` of `x [2n, columns]` side by side, as words of two numbers: `[n, columns, 2]`."""
    return x.unflatten(0, (-1, 2)).transpose(1, 2).contiguous()


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 4), (4, 2), (6, 4)])
def test_multiply_adds_a_product(rows: int, columns: int, pairs: bool) -> None:
    multiply = vectors.multiply(rows, columns, pairs)

    @numba.njit
    def run(a, b, c, a_stride, b_stride, n):  # type: ignore[no-untyped-def]
        multiply(a.ctypes.data, a_stride, b.ctypes.data, b_stride, c.ctypes.data, 64 * columns, n)

    dtype, n = (torch.bfloat16, 10) if pairs else (torch.float32, 5)
    a, b = random(rows, n, dtype=dtype, seed=1), random(n, 16 * columns, dtype=dtype, seed=2)
    c = random(rows, 16 * columns, dtype=torch.float32, seed=3)
    expected = c.double() + a.double() @ b.double()
    run(words(a), words(paired(b) if pairs else b), c.numpy(), 20, 64 * columns, 5)
    torch.testing.assert_close(c.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_multiply_widens_what_is_stored_in_half(dtype: torch.dtype) -> None:
    multiply = vectors.multiply(2, 1, False, dtype)

    @numba.njit
    def run(a, b, c):  # type: ignore[no-untyped-def]
        multiply(a.ctypes.data, 4 * a.shape[1], b.ctypes.data, 32, c.ctypes.data, 64, a.shape[1])

    a, b, c = random(2, 3, dtype=torch.float32, seed=1), random(3, 16, dtype=dtype, seed=2), torch.zeros(2, 16)
    run(a.numpy(), words(b), c.numpy())
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("dtype", "pairs"),
    [
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float16, False),
        pytest.param(torch.bfloat16, True, marks=NEEDS_PAIRS),
    ],
)
def test_dots(rows: int, dtype: torch.dtype, pairs: bool) -> None:
    dots, dim, n_keys = vectors.dots(rows, pairs, dtype), 64, 16 // rows

    @numba.njit
    def run(q, k, out, q_stride, k_stride, n):  # type: ignore[no-untyped-def]
        dots(q.ctypes.data, q_stride, k.ctypes.data, k_stride, out.ctypes.data, 4 * out.shape[1], n)

    q = random(rows, dim, dtype=torch.bfloat16 if pairs else torch.float32, seed=1)
    k, out = random(n_keys, dim, dtype=dtype, seed=2), torch.zeros(rows, n_keys)
    run(words(q), words(k), out.numpy(), dim * q.element_size(), dim * k.element_size(), dim // (32 if pairs else 16))
    torch.testing.assert_close(out.double(), q.double() @ k.double().T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_transpose(dtype: torch.dtype) -> None:
    transpose = vectors.transpose(dtype, False)

    @numba.njit
    def run(x, out, stride):  # type: ignore[no-untyped-def]
        transpose(x.ctypes.data, stride, out.ctypes.data, 64)

    x, out = random(16, 20, dtype=dtype, seed=1), torch.zeros(16, 16)
    run(words(x), out.numpy(), 20 * x.element_size())
    assert torch.equal(out, x[:, :16].T.float())


def test_transpose_keeps_pairs_together() -> None:
    transpose = vectors.transpose(torch.bfloat16, True)

    @numba.njit
    def run(x, out):  # type: ignore[no-untyped-def]
        transpose(x.ctypes.data, 64, out.ctypes.data, 64)

    x = torch.arange(256, dtype=torch.int32).view(16, 16)
    out = torch.zeros(16, 16, dtype=torch.int32)
    run(x.numpy(), out.numpy())
    assert torch.equal(out, x.T)


def test_largest() -> None:
    @numba.njit
    def run(x):  # type: ignore[no-untyped-def]
        return vectors_largest(x.ctypes.data, len(x))

    vectors_largest = vectors.largest
    for place in (0, 17, 47):
        x = -np.arange(1, 49, dtype=np.float32)
        x[place] = 3
        assert run(x) == 3


def test_a_queue_counts_up() -> None:
    take = vectors.take

    @numba.njit
    def run(queue):  # type: ignore[no-untyped-def]
        return take(queue.ctypes.data)

    queue = np.zeros(1, np.int64)
    assert [run(queue) for _ in range(3)] == [0, 1, 2]
