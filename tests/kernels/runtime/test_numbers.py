"""Functions of numbers that kernels compute themselves, beside float64."""

import math

import torch
from numba import carray, float32

from lce.kernels.runtime.kernel import Kernel
from lce.kernels.runtime.numbers import log2, pointer


def logarithms(first, stop, memory, x_at, out_at):
    x, out = carray(pointer(x_at, float32), (stop,)), carray(pointer(out_at, float32), (stop,))
    for i in range(first, stop):
        out[i] = log2(x[i])


def test_logarithms_are_within_two_units_in_the_last_place() -> None:
    random = torch.Generator().manual_seed(1)
    wide, near = torch.rand(100_000, generator=random) * 253 - 126, torch.randn(100_000, generator=random) * 1e-3 + 1
    x = torch.cat([wide.exp2(), near, torch.arange(1, 70_000), torch.tensor([math.sqrt(0.5), 2.0**-126, 3.4e38])])
    out = torch.empty_like(x)
    Kernel(logarithms)(len(x), x.data_ptr(), out.data_ptr())
    exact = x.double().log2()
    size = exact.float().abs()
    unit = (size.nextafter(torch.tensor(math.inf)) - size).double()
    assert ((out - exact).abs() <= 2 * unit).all()
    x[0] = math.nan
    Kernel(logarithms)(1, x.data_ptr(), out.data_ptr())
    assert out[0].isnan()
