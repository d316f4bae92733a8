"""Merged parts, beside one softmax over all of their keys."""

from __future__ import annotations

import math

import pytest
import torch

from lce.kernels.cpu.merging import merged


@pytest.mark.parametrize("n_parts", range(2, 6))
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_parts_become_one_softmax(n_parts: int, dtype: torch.dtype, most: float) -> None:
    scores, v = torch.randn(3, 70, 5 * n_parts) * 3, torch.randn(3, 5 * n_parts, 16)
    scores[:, 5, :5] = -math.inf  # no key of the first part
    scores[:, 6] = -math.inf  # no key at all
    parts = []
    for some, values in zip(scores.split(5, dim=2), v.split(5, dim=1), strict=True):
        parts.append(((some.softmax(dim=-1).nan_to_num() @ values).to(dtype), some.logsumexp(dim=-1)))
    parts[1] = (parts[1][0].transpose(0, 1).contiguous().transpose(0, 1), parts[1][1])
    out, lse = merged(parts)
    assert out.dtype == dtype
    assert (out.float() - scores.softmax(dim=-1).nan_to_num() @ v).abs().max() < most
    assert torch.allclose(lse, scores.logsumexp(dim=-1), atol=1e-5)


@pytest.mark.parametrize("lse", [math.nan, 0.5])
def test_no_nan_is_hidden(lse: float) -> None:
    first, second = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    first[0, 0] = math.nan
    lses = torch.zeros(2, 3)
    lses[0, 0] = lse
    out, _ = merged([(first, lses), (second, torch.zeros(2, 3))])
    assert out[0, 0].isnan().all()
    assert out.isnan().sum() == 16
