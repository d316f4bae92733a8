"""Numbers as kernels read and write them, and powers."""

from __future__ import annotations

import math

import numba
import numpy as np
import pytest
import torch

from lce.kernels.cpu.numbers import READ, STORED, WRITE, exp, exp2

SPECIAL = [0.0, -0.0, 1.0, -1.5, 65504.0, 1e-8, 3.0e38, float("inf"), float("-inf"), float("nan"), 1 / 3]


@pytest.mark.parametrize("dtype", STORED)
def test_numbers_are_read_and_rounded_as_pytorch_does(dtype: torch.dtype) -> None:
    read, write = READ[dtype], WRITE[dtype]

    @numba.njit
    def there_and_back(x, stored, back):  # type: ignore[no-untyped-def]
        for i in range(len(x)):
            stored[i] = write(x[i])
            back[i] = read(stored[i])

    x = torch.cat([torch.tensor(SPECIAL), torch.randn(1000, generator=torch.Generator().manual_seed(1))])
    stored = np.zeros(len(x), np.float32 if dtype == torch.float32 else np.uint16)
    back = torch.zeros(len(x))
    there_and_back(x.numpy(), stored, back.numpy())
    torch.testing.assert_close(back, x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("power", "expected"), [(exp, np.exp), (exp2, np.exp2)])
def test_powers(power: object, expected: np.ufunc) -> None:
    @numba.njit
    def run(x, out):  # type: ignore[no-untyped-def]
        for i in range(len(x)):
            out[i] = power(x[i])  # type: ignore[operator]

    x = np.linspace(-80, 0, 4001, dtype=np.float32)
    out = np.zeros_like(x)
    run(x, out)
    truth = expected(x.astype(np.float64))
    assert np.abs(out / truth - 1).max() < 4e-7


def test_what_is_far_below_is_zero() -> None:
    @numba.njit
    def run(x):  # type: ignore[no-untyped-def]
        return exp2(np.float32(x))

    assert run(-127.0) == 0
    assert run(-3e38) == 0
    assert run(-np.inf) == 0
    assert math.isnan(run(np.nan))
