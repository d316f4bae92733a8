"""Scores on CUDA: products of half precision are float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lce.attention import products

SIZES = [(4, 1, 9), (2, 33, 1), (3, 5, 70)]


def factors(n: int, n_queries: int, n_keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Large ones: their products do not fit in float16. The second is a transposed slice, as keys are."""
    random = torch.Generator().manual_seed(1)
    a = torch.randn(n, n_queries, 64, generator=random) * 200
    return a.to(dtype), (torch.randn(n, n_keys + 3, 64, generator=random) * 200).to(dtype)[:, 3:].mT


class OnCuda(Tensor):
    is_cuda = True


def test_scores_are_float32_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def bmm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        """PyTorch's, which takes an `out_dtype` on CUDA alone."""
        assert (a.ndim, b.ndim, a.dtype, out_dtype) == (3, 3, b.dtype, torch.float32)
        return a.float() @ b.float()

    a, b = factors(3, 5, 70, torch.float16)
    assert not (a @ b).isfinite().all()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "bmm", bmm)
        got = products(a.as_subclass(OnCuda), b.as_subclass(OnCuda))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.as_subclass(Tensor), a.float() @ b.float())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_on_cuda(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    a, b = factors(*sizes, dtype)
    got = products(a.cuda(), b.cuda())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.cpu().double(), a.double() @ b.double(), rtol=1e-4, atol=10.0)
