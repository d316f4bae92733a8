"""The matrix product is exact on every path."""

from __future__ import annotations

import pytest
import torch

from lce.models.layers import linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3), (torch.float16, 0.1)], ids=str
)
def test_equals_the_product_in_float64(rows: int, bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    random = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 96, generator=random).to(dtype) for n in (rows, 40))
    offset = torch.randn(40, generator=random).to(dtype) if bias else None
    truth = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    out = linear(x, weight, offset)
    assert out.dtype == dtype
    assert (out.double() - truth).abs().max() < tolerance


@pytest.mark.parametrize("gated", [False, True])
def test_a_few_rows_and_many_take_the_same_steps(gated: bool) -> None:
    """The norm, the gate and the sum, whichever product is taken."""
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 96, generator=random) for n in (64, 40))
    norm, onto = torch.rand(96, generator=random), torch.randn(64, 20 if gated else 40, generator=random)
    many = linear(x, weight, norm=norm, eps=1e-5, gated=gated, onto=onto.clone())
    for rows in (slice(0, 1), slice(3, 7)):
        few = linear(x[rows], weight, norm=norm, eps=1e-5, gated=gated, onto=onto[rows].clone())
        torch.testing.assert_close(few, many[rows], rtol=1e-5, atol=1e-5)


def test_takes_views() -> None:
    x, weight = torch.randn(64, 5).T, torch.randn(10, 80)[:, :64]
    assert (linear(x, weight) - x @ weight.T).abs().max() < 1e-4
