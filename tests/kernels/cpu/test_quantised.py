"""Packed matrices: their error, and products, rows and unpacked weights that agree with each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lce.kernels.cpu import quantised
from lce.kernels.cpu.compiling import MOST_ROWS

ERRORS = {8: 0.008, 4: 0.075}  # of Gaussian weights, relative


def packed(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor | None]:
    parts = {
        name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in quantised.parts(bits, *weight.shape).items()
    }
    matrix = parts["codes"], parts["scales"], parts.get("zeros")
    quantised.pack(weight, *matrix)
    return matrix


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(33, 100), (64, 256)])
def test_products_are_those_of_the_unpacked_weights(bits: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    matrix = packed(weight, bits)
    exact = torch.empty(shape)
    quantised.unpack(0, exact, *matrix)
    assert (exact - weight.float()).norm() / weight.float().norm() < ERRORS[bits]
    tolerance = 4 * torch.finfo(dtype).eps
    for n in (1, 2, 3, 8):
        x = torch.randn(n, shape[1]).to(dtype)
        out = quantised.product(x, shape[0], *matrix, bias)
        expected = x.double() @ exact.double().T + bias.double()
        assert (out.double() - expected).norm() / expected.norm() < tolerance
    later = torch.empty(shape[0] - 16, shape[1], dtype=dtype)
    quantised.unpack(16, later, *matrix)
    assert torch.equal(later, exact[16:].to(dtype))
    ids = torch.tensor([3, 0, 32])
    rows = torch.empty(3, shape[1], dtype=dtype)
    quantised.rows_of(ids, rows, *matrix)
    assert torch.equal(rows, exact[ids].to(dtype))


@pytest.mark.parametrize("bits", [8, 4])
def test_what_stands_around_a_product(bits: int) -> None:
    torch.manual_seed(0)
    x, norm, onto = torch.randn(2, 100), torch.randn(100), torch.randn(2, 32)
    matrix, whole = packed(torch.randn(64, 100), bits), torch.empty(64, 100)
    quantised.unpack(0, whole, *matrix)
    normal = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm
    gate, up = (normal @ whole.T).chunk(2, dim=-1)
    expected = onto + torch.nn.functional.silu(gate) * up
    out = quantised.product(x, 64, *matrix, norm=norm, eps=1e-5, gated=True, onto=onto.clone())
    assert (out - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(320, 100), (64, 3072), (32, 8192)])
def test_a_row_has_the_bits_that_it_has_alone(
    any_threads: None, bits: int, dtype: torch.dtype, gated: bool, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    x, bias, norm = (torch.randn(size).to(dtype) for size in ((MOST_ROWS, shape[1]), shape[0], shape[1]))
    matrix = packed(torch.randn(shape), bits)
    around = {"bias": bias, "norm": norm, "eps": 1e-5, "gated": gated}
    alone = torch.cat([quantised.product(row[None], shape[0], *matrix, **around) for row in x])
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        for n in range(1, MOST_ROWS + 1):
            assert torch.equal(quantised.product(x[:n], shape[0], *matrix, **around), alone[:n]), n


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5])
def test_constant_weights(bits: int, value: float) -> None:
    matrix, out = packed(torch.full((16, 64), value), bits), torch.empty(16, 64)
    quantised.unpack(0, out, *matrix)
    assert (out - value).abs().max() <= abs(value) * 0.005


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(bits: int, value: float) -> None:
    torch.manual_seed(0)
    x, matrix = torch.randn(2, 256), packed(torch.randn(32, 256), bits)
    x[1, 200] = value
    out = quantised.product(x, 32, *matrix)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
