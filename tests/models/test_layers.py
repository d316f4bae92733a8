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


def test_takes_views() -> None:
    x, weight = torch.randn(64, 5).T, torch.randn(10, 80)[:, :64]
    assert (linear(x, weight) - x @ weight.T).abs().max() < 1e-4
