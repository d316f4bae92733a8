"""Products of a few rows on a GPU, or in Triton's interpreter, beside the same in float64."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from lce.kernels.product.products_triton import product
from tests.kernels import truth
from tests.kernels.truth import DEVICE, EPS, ON_GPU

pytestmark = ON_GPU
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


CASES = [  # T, in, out, dtype, and what there is: a bias, a norm, a gate, hidden states to add to
    (1, 48, 20, torch.float32, ""),
    (2, 1100, 6, torch.float32, "bias norm gate"),  # ragged rows and columns, several steps
    (1, 64, 24, torch.bfloat16, "norm"),
    (3, 80, 10, torch.bfloat16, "bias norm gate onto"),
    (4, 96, 9, torch.float16, "bias onto"),
]


@pytest.mark.parametrize(("n", "size", "rows", "dtype", "there"), CASES, ids=str)
def test_a_product_is_that_of_float64(n: int, size: int, rows: int, dtype: torch.dtype, there: str) -> None:
    gated = "gate" in there

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape).to(DEVICE, dtype)

    x, w = some(n, size), some(rows, size) / size**0.5
    bias, norm = some(rows) if "bias" in there else None, some(size) if "norm" in there else None
    onto = some(n, rows // 2 if gated else rows) if "onto" in there else None
    expected = truth.product(x, w, bias, norm=norm, gate="silu" if gated else None, onto=onto)
    if onto is None:
        wide = product(x, w, bias, norm=norm, eps=EPS, gated=gated, out_dtype=torch.float32)
        assert wide.dtype is torch.float32
        torch.testing.assert_close(wide.double(), expected, rtol=1e-5, atol=1e-5)
    out = product(x, w, bias, norm=norm, eps=EPS, gated=gated, onto=onto)
    assert onto is None or out is onto
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("size", "rows", "gated"), [(4096, 12288, False), (4096, 22016, True), (11008, 4096, False)])
def test_products_of_a_model_of_7b(size: int, rows: int, gated: bool) -> None:
    x, w = (torch.randn(n, size, device=DEVICE, dtype=torch.bfloat16) / size**0.25 for n in (1, rows))
    norm = torch.ones(size, device=DEVICE, dtype=torch.bfloat16)
    out = product(x, w, norm=norm, eps=EPS, gated=gated)
    assert torch.equal(out, product(x, w, norm=norm, eps=EPS, gated=gated)), "results repeat to the bit"
    expected = truth.product(x, w, norm=norm, gate="silu" if gated else None)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
