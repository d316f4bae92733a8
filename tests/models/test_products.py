"""The matrix product is exact on every path."""

import pytest
import torch

from lce.models.products import Gate, linear, norm_heads
from tests.pretended import Gpus


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3), (torch.float16, 0.1)])
def test_equals_the_product_in_float64(rows: int, bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    random = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 96, generator=random).to(dtype) for n in (rows, 40))
    offset = torch.randn(40, generator=random).to(dtype) if bias else None
    truth = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    out, wide = linear(x, weight, offset), linear(x, weight, offset, out_dtype=torch.float32)
    assert (out.dtype, wide.dtype) == (dtype, torch.float32)
    assert (out.double() - truth).abs().max() < tolerance
    assert (wide.double() - truth).abs().max() < 1e-4


@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
def test_a_few_rows_and_many_take_the_same_steps(gate: Gate | None) -> None:
    """The norm, the gate and the sum, whichever product is taken."""
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 96, generator=random) for n in (64, 40))
    norm, onto = torch.rand(96, generator=random), torch.randn(64, 20 if gate else 40, generator=random)
    many = linear(x, weight, norm=norm, eps=1e-5, gate=gate, onto=onto.clone())
    for rows in (slice(0, 1), slice(3, 7)):
        few = linear(x[rows], weight, norm=norm, eps=1e-5, gate=gate, onto=onto[rows].clone())
        torch.testing.assert_close(few, many[rows], rtol=1e-5, atol=1e-5)


def test_takes_views() -> None:
    x, weight = torch.randn(64, 5).T, torch.randn(10, 80)[:, :64]
    assert (linear(x, weight) - x @ weight.T).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("rows", "gate", "launches"),
    [
        (1, "silu", ["_product"]),
        (4, "silu", ["_product"]),
        (6, "silu", ["_rms_norm", "_silu_mul", "mm"]),
        (1, "gelu_tanh", ["_rms_norm", "gelu", "mm", "mul_"]),
    ],
)
def test_on_a_gpu_a_few_rows_are_one_launch(rows: int, gate: Gate, launches: list[str], triton_gpus: Gpus) -> None:
    """More rows, and other gates than SiLU, are a product of matrices between a norm and a gate."""
    x, weight, norm = torch.randn(rows, 48), torch.randn(20, 48), torch.rand(48)
    expected = linear(x, weight, norm=norm, eps=1e-5, gate=gate)
    added = linear(x, weight, onto=torch.ones(rows, 20))
    x, weight, norm, onto = x.cuda(), weight.cuda(), norm.cuda(), torch.ones(rows, 20, device="cuda")
    with triton_gpus.counting() as counts:
        out = linear(x, weight, norm=norm, eps=1e-5, gate=gate)
    assert counts.launched() == launches
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)
    with triton_gpus.counting() as counts:
        assert linear(x, weight, onto=onto) is onto
    assert counts.launched() == ["_product" if rows <= 4 else "addmm_"]
    torch.testing.assert_close(onto.cpu(), added, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "launches"), [(1, ["_product"]), (4, ["_product"]), (6, ["_rms_norm", "mm"])])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu_a_result_in_float32_is_not_rounded(
    rows: int, launches: list[str], dtype: torch.dtype, triton_gpus: Gpus
) -> None:
    x, weight, norm = torch.randn(rows, 48).to(dtype), torch.randn(20, 48).to(dtype), torch.rand(48).to(dtype)
    expected = linear(x, weight, norm=norm, eps=1e-5, out_dtype=torch.float32)
    on_gpu, weight, norm = x.cuda(), weight.cuda(), norm.cuda()
    with triton_gpus.counting() as counts:
        out = linear(on_gpu, weight, norm=norm, eps=1e-5, out_dtype=torch.float32)
    assert (counts.launched(), out.dtype) == (launches, torch.float32)
    assert not torch.equal(out.cpu(), out.cpu().to(torch.bfloat16).float())
    # Many rows: the norm's result is rounded before the product.
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=0.05 if rows == 6 else 1e-5)


def test_on_a_gpu_the_heads_are_normalised_in_one_launch(triton_gpus: Gpus) -> None:
    joined, q_weight, k_weight = torch.randn(3, 7, 16).transpose(0, 1), torch.rand(16), torch.rand(16)
    expected = norm_heads(joined[:4], q_weight, joined[4:6], k_weight, 1e-5)
    on_gpu, q_weight, k_weight = joined.cuda(), q_weight.cuda(), k_weight.cuda()
    with triton_gpus.counting() as counts:
        found = norm_heads(on_gpu[:4], q_weight, on_gpu[4:6], k_weight, 1e-5)
    assert counts.launched() == ["_rms_norm"]
    for x, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(x.cpu(), truth, rtol=1e-5, atol=1e-5)
