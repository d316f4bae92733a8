"""Products of few rows with plain and packed matrices: beside float64, and the same bits with any threads."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from lce.kernels.product import products_body as code
from lce.kernels.product.products import product
from lce.kernels.runtime.kernel import recording
from lce.kernels.runtime.shared import MOST_ROWS, Gate
from lce.kernels.runtime.threads import Jobs, Scratch
from tests.kernels import truth
from tests.kernels.truth import EPS, LAYOUTS, packed, random

ERRORS = {"int8": 0.008, "int4": 0.075}  # of Gaussian weights, relative
each_packed = pytest.mark.parametrize("kind", LAYOUTS)
each_gate = pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Within the rounding of the result, and of float32 sums of some hundred numbers."""
    truth.assert_close(got, expected, 3e-6 * float(expected.abs().max()))


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def made(kind: str, weight: Tensor) -> tuple[Callable[..., Tensor], Tensor]:
    """How a matrix of this kind is multiplied, and the numbers that it stands for."""
    if kind == "plain":
        return (lambda x, bias=None, **around: product(x, weight, bias, **around)), weight
    matrix = packed(weight, LAYOUTS[kind])
    return matrix.product, matrix.unpacked(0, torch.empty(weight.shape))


@each_packed
@pytest.mark.parametrize("shape", [(33, 100), (64, 256)])
def test_products_and_rows_are_those_of_the_unpacked_weights(kind: str, dtype: torch.dtype, shape: Any) -> None:
    weight, bias = random(*shape, dtype=dtype), random(shape[0], dtype=dtype, seed=2)
    matrix = packed(weight, LAYOUTS[kind])
    exact = matrix.unpacked(0, torch.empty(shape))
    assert error(exact, weight) < ERRORS[kind]
    for n in (1, 2, 3, 8):
        x = random(n, shape[1], dtype=dtype, seed=3)
        assert error(matrix.product(x, bias), truth.product(x, exact, bias)) < 6 * torch.finfo(dtype).eps
    later = matrix.unpacked(16, torch.empty(shape[0] - 16, shape[1], dtype=dtype))
    assert torch.equal(later, exact[16:].to(dtype))
    ids = torch.tensor([3, 0, 32])
    assert torch.equal(matrix.rows(ids, dtype), exact[ids].to(dtype))


@pytest.mark.parametrize(("kind", "rows"), [("plain", 1), ("plain", 3), ("plain", 8), ("int8", 2), ("int4", 2)])
@pytest.mark.parametrize("wide", [False, True])
@each_gate
def test_norm_bias_gate_and_sum_come_on_the_way(kind: str, rows: int, wide: bool, gate: Any, dtype: Any) -> None:
    """Where float32 goes in, it comes out unrounded, whatever the dtype of the weights."""
    inside = torch.float32 if wide else dtype
    x, onto = random(rows, 100, dtype=inside), random(rows, 64 if gate else 128, dtype=inside, seed=5)
    multiply, weight = made(kind, random(128, 100, dtype=dtype, seed=2))
    most = 6 * torch.finfo(dtype).eps if not wide else 1e-5 if dtype is torch.float32 else 2e-4
    for bias in (None, random(128, dtype=dtype, seed=4)):
        around = {"bias": bias, "norm": random(100, dtype=dtype, seed=3), "gate": gate}
        out, given = multiply(x, eps=EPS, out_dtype=inside, **around), onto.clone()
        assert multiply(x, eps=EPS, onto=given, **around) is given
        for got, sum_ in ((out, None), (given, onto)):
            expected = truth.product(x, weight, onto=sum_, **around)
            assert error(got, expected) < most
            if kind == "plain":
                assert_close(got, expected)
        assert torch.equal(multiply(x[:1], eps=EPS, out_dtype=inside, **around), out[:1])


STEP = code._CHAINS * code.LANES
BORDERS = [
    (n_pieces * code._PIECE + steps) * STEP + rest for n_pieces in (1, 2) for steps in (-1, 0, 1) for rest in (0, 5)
]  # whole steps beside a whole number of pieces, and some inputs more
ALONE = [(7, 4), (20, 6), (300, 134), (3072, 70), (8192, 18), *zip(BORDERS, cycle((2, 18, 66)), strict=False)]
PACKED_ALONE = [(100, 320), (3072, 64), (8192, 32)]


@pytest.mark.parametrize(
    ("kind", "size", "n_out"),
    [("plain", *each) for each in ALONE] + [(kind, *each) for kind in LAYOUTS for each in PACKED_ALONE],
)
@each_gate
def test_a_row_is_that_of_float64_and_has_the_bits_that_it_has_alone(
    kind: str, size: int, n_out: int, gate: Gate | None, dtype: torch.dtype
) -> None:
    n_out -= kind == "plain" and gate is None  # rows that are no pair
    x = random(MOST_ROWS, size, dtype=dtype)
    multiply, weight = made(kind, random(n_out, size, dtype=dtype, seed=2))
    bias, norm = random(n_out, dtype=dtype, seed=4), random(size, dtype=dtype, seed=3)
    around = {"norm": norm, "eps": EPS, "gate": gate}
    alone = torch.cat([multiply(row[None], bias, **around) for row in x])
    expected = truth.product(x, weight, bias, norm=norm, gate=gate)
    assert error(alone, expected) < 8 * torch.finfo(dtype).eps
    if kind == "plain":
        assert_close(alone, expected)
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        for n in range(1, MOST_ROWS + 1):
            assert torch.equal(multiply(x[:n], bias, **around), alone[:n]), n


def test_calls_that_are_replayed_read_x_again() -> None:
    x, weights = random(1, 576), [random(960, 576, seed=seed) for seed in range(3)]
    with recording([]) as calls:
        found = [product(x, weight) for weight in weights]
    jobs = Jobs(calls, Scratch())
    for seed, n_threads in enumerate((2, 2, 1, 2)):
        torch.set_num_threads(n_threads)
        x.copy_(random(1, 576, seed=9 + seed))
        jobs.run()
        for out, weight in zip(found, weights, strict=True):
            assert_close(out, truth.product(x, weight))


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("value", [-1e30, -200.0, -88.5, 88.5, 1e30])
def test_a_gate_far_from_zero_neither_overflows_nor_is_lost(gate: Gate, value: float) -> None:
    x, weight = torch.ones(1, 1), torch.tensor([[value], [1.0]])
    torch.testing.assert_close(product(x, weight, gate=gate)[0, 0].item(), max(value, 0.0), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(value: float, dtype: torch.dtype) -> None:
    x, weight = random(1, 40, dtype=dtype), random(8, 40, dtype=dtype, seed=2)
    weight[2, 3] = value
    assert product(x, weight).isfinite().tolist() == [[i != 2 for i in range(8)]]
    assert not product(x, weight, gate="silu")[0, 2].isfinite()


def test_other_shapes_and_dtypes_are_refused() -> None:
    x, weight = torch.zeros(1, 8), torch.zeros(4, 8)
    for wrong in ((torch.zeros(9, 8), weight), (x, torch.zeros(4, 9)), (x.half(), weight), (x, torch.zeros(8, 4).T)):
        with pytest.raises(AssertionError):
            product(*wrong)


@each_packed
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5])
def test_constant_weights(kind: str, value: float) -> None:
    out = packed(torch.full((16, 64), value), LAYOUTS[kind]).unpacked(0, torch.empty(16, 64))
    assert (out - value).abs().max() <= abs(value) * 0.005


@each_packed
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_stay_visible(kind: str, value: float) -> None:
    x, matrix = torch.randn(2, 256), packed(torch.randn(32, 256), LAYOUTS[kind])
    x[1, 200] = value
    out = matrix.product(x)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@each_packed
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, -1)])
def test_the_largest_codes_and_inputs_do_not_overflow(kind: str, signs: tuple[int, int]) -> None:
    largest = 255 / 128 * torch.ones(MOST_ROWS, 1024).bfloat16()  # 32640 as an integer
    matrix = packed(signs[0] * torch.ones(32, 1024), LAYOUTS[kind])
    exact = matrix.unpacked(0, torch.empty(32, 1024))
    for n in (1, MOST_ROWS):
        got = matrix.product(signs[1] * largest[:n], norm=None, out_dtype=torch.float32)
        assert error(got, truth.product(signs[1] * largest[:n], exact)) < 1e-6
