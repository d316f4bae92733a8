"""Packed matrices: their error, and products, rows and unpacked weights that agree with each other."""

import pytest
import torch
from torch import Tensor

from lce.kernels.code.shared import INT4, INT8, MOST_ROWS, Gate
from lce.kernels.cpu.quantised import QuantisedMatrix, parts_of
from tests.kernels import truth
from tests.kernels.truth import EPS

ERRORS = {8: 0.008, 4: 0.075}  # of Gaussian weights, relative
each_bits = pytest.mark.parametrize("bits", ERRORS)
each_gate = pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])


def packed(weight: Tensor, bits: int) -> QuantisedMatrix:
    layout = INT4 if bits == 4 else INT8
    stored = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in parts_of(layout, *weight.shape).items()}
    matrix = QuantisedMatrix(layout, weight.shape, stored)
    matrix.pack(weight)
    return matrix


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@each_bits
@pytest.mark.parametrize("shape", [(33, 100), (64, 256)])
def test_products_are_those_of_the_unpacked_weights(bits: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    matrix = packed(weight, bits)
    exact = matrix.unpacked(0, torch.empty(shape))
    assert error(exact, weight) < ERRORS[bits]
    for n in (1, 2, 3, 8):
        x = torch.randn(n, shape[1]).to(dtype)
        assert error(matrix.product(x, bias), truth.product(x, exact, bias)) < 4 * torch.finfo(dtype).eps
    later = matrix.unpacked(16, torch.empty(shape[0] - 16, shape[1], dtype=dtype))
    assert torch.equal(later, exact[16:].to(dtype))
    ids = torch.tensor([3, 0, 32])
    assert torch.equal(matrix.rows(ids, dtype), exact[ids].to(dtype))


@each_bits
def test_what_stands_around_a_product(bits: int, dtype: torch.dtype) -> None:
    """float32 goes in and comes out unrounded, whatever the dtype of the model."""
    torch.manual_seed(0)
    x, norm, onto = torch.randn(2, 100), torch.randn(100).to(dtype), torch.randn(2, 32)
    matrix, around = packed(torch.randn(64, 100), bits), {"norm": norm, "gate": "silu"}
    expected = truth.product(x, matrix.unpacked(0, torch.empty(64, 100)), **around)
    most = 1e-5 if dtype is torch.float32 else 2e-4
    assert error(matrix.product(x, eps=EPS, out_dtype=torch.float32, **around), expected) < most
    assert error(matrix.product(x, eps=EPS, onto=onto.clone(), **around), onto + expected) < most


@each_bits
@each_gate
@pytest.mark.parametrize("shape", [(320, 100), (64, 3072), (32, 8192)])
def test_a_row_has_the_bits_that_it_has_alone(
    any_threads: None, bits: int, dtype: torch.dtype, gate: Gate | None, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    x, bias, norm = (torch.randn(size).to(dtype) for size in ((MOST_ROWS, shape[1]), shape[0], shape[1]))
    matrix, around = packed(torch.randn(shape), bits), {"bias": bias, "norm": norm, "eps": EPS, "gate": gate}
    alone = torch.cat([matrix.product(row[None], **around) for row in x])
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        for n in range(1, MOST_ROWS + 1):
            assert torch.equal(matrix.product(x[:n], **around), alone[:n]), n


@each_bits
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5])
def test_constant_weights(bits: int, value: float) -> None:
    out = packed(torch.full((16, 64), value), bits).unpacked(0, torch.empty(16, 64))
    assert (out - value).abs().max() <= abs(value) * 0.005


@each_bits
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(bits: int, value: float) -> None:
    torch.manual_seed(0)
    x, matrix = torch.randn(2, 256), packed(torch.randn(32, 256), bits)
    x[1, 200] = value
    out = matrix.product(x)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@each_bits
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, -1)])
def test_the_largest_codes_and_inputs_do_not_overflow(bits: int, signs: tuple[int, int]) -> None:
    largest = 255 / 128 * torch.ones(MOST_ROWS, 1024).bfloat16()  # 32640 as an integer
    matrix = packed(signs[0] * torch.ones(32, 1024), bits)
    exact = matrix.unpacked(0, torch.empty(32, 1024))
    for n in (1, MOST_ROWS):
        got = matrix.product(signs[1] * largest[:n], norm=None, out_dtype=torch.float32)
        assert error(got, truth.product(signs[1] * largest[:n], exact)) < 1e-6
