"""Products of few rows: the definition in float64, what is done on the way, and the same bits with any threads."""

import pytest
import torch
from torch import Tensor

from lce.kernels.code import products as code
from lce.kernels.code.shared import MOST_ROWS, Gate
from lce.kernels.cpu.kernel import recording
from lce.kernels.cpu.products import product
from lce.kernels.cpu.threads import Jobs
from tests.kernels import truth
from tests.kernels.truth import EPS, random

each_gate = pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Within the rounding of the result, and of float32 sums of some hundred numbers."""
    truth.assert_close(got, expected, 3e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
@pytest.mark.parametrize(("size", "n_out"), [(7, 3), (96, 130), (512, 64)])
def test_equals_the_product_in_float64(rows: int, size: int, n_out: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, size, dtype=dtype), random(n_out, size, dtype=dtype, seed=2)
    assert_close(product(x, weight), truth.product(x, weight))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("with_bias", [False, True])
@each_gate
def test_norm_bias_gate_and_sum_come_on_the_way(
    rows: int, with_bias: bool, gate: Gate | None, dtype: torch.dtype
) -> None:
    x, weight = random(rows, 80, dtype=dtype), random(140, 80, dtype=dtype, seed=2)
    norm, bias = random(80, dtype=dtype, seed=3), random(140, dtype=dtype, seed=4) if with_bias else None
    onto = random(rows, 70 if gate else 140, dtype=dtype, seed=5)
    given = onto.clone()
    got = product(x, weight, bias, norm=norm, eps=EPS, gate=gate, onto=given)
    assert got is given
    assert_close(got, truth.product(x, weight, bias, norm=norm, gate=gate, onto=onto))


@pytest.mark.parametrize("rows", [1, 2, 8])
@each_gate
def test_float32_goes_in_and_comes_out_unrounded(rows: int, gate: Gate | None, dtype: torch.dtype) -> None:
    x, weight, norm = random(rows, 80), random(140, 80, dtype=dtype, seed=2), random(80, dtype=dtype, seed=3)
    onto, around = random(rows, 70 if gate else 140, seed=5), {"norm": norm, "gate": gate}
    out = product(x, weight, eps=EPS, out_dtype=torch.float32, **around)
    assert_close(out, truth.product(x, weight, **around))
    assert_close(
        product(x, weight, eps=EPS, onto=onto.clone(), **around), truth.product(x, weight, onto=onto, **around)
    )
    assert torch.equal(product(x[:1], weight, eps=EPS, out_dtype=torch.float32, **around), out[:1])


@pytest.mark.parametrize(("size", "n_out"), [(20, 6), (300, 134), (3072, 70), (8192, 18)])
@each_gate
def test_a_row_has_the_bits_that_it_has_alone(
    any_threads: None, size: int, n_out: int, gate: Gate | None, dtype: torch.dtype
) -> None:
    x, weight = random(MOST_ROWS, size, dtype=dtype), random(n_out, size, dtype=dtype, seed=2)
    around = {"norm": random(size, dtype=dtype, seed=3), "eps": EPS, "gate": gate}
    bias = random(n_out, dtype=dtype, seed=4)
    alone = torch.cat([product(row[None], weight, bias, **around) for row in x])
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        for n in range(1, MOST_ROWS + 1):
            assert torch.equal(product(x[:n], weight, bias, **around), alone[:n]), n


def test_calls_that_are_replayed_read_x_again(any_threads: None) -> None:
    x, weights = random(1, 576), [random(960, 576, seed=seed) for seed in range(3)]
    with recording([]) as calls:
        found = [product(x, weight) for weight in weights]
    jobs = Jobs(calls)
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


@pytest.mark.parametrize("steps", [-1, 0, 1])  # whole steps beside a whole number of pieces
@pytest.mark.parametrize("rest", [0, 5])
@pytest.mark.parametrize("n_out", [1, 17, 66])
def test_rows_are_alike_where_pieces_of_the_inputs_end(
    any_threads: None, steps: int, rest: int, n_out: int, dtype: torch.dtype
) -> None:
    step = code._CHAINS * code.LANES
    for n_pieces in (1, 2):
        size = (n_pieces * code._PIECE + steps) * step + rest
        x, weight = random(MOST_ROWS, size, dtype=dtype), random(n_out, size, dtype=dtype, seed=2)
        together = product(x, weight)
        assert_close(together, truth.product(x, weight))
        for n in range(1, MOST_ROWS + 1):
            assert torch.equal(product(x[:n], weight), together[:n]), (n_pieces, n)
