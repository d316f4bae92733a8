"""Norms, gates, rotations and copies on a GPU, or in Triton's interpreter, beside the same in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from lce.kernels.cuda import elementwise
from tests.kernels import truth
from tests.kernels.truth import DEVICE, EPS, ON_GPU, normed, rotated

pytestmark = ON_GPU
DTYPES = [torch.float32, torch.bfloat16]


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def close(out: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if out.dtype is torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    weight, x = some(80, dtype=dtype), some(3, 80, dtype=dtype)
    close(elementwise.rms_norm(x, weight, EPS), normed(x, weight))
    joined = some(30, 7, 80, dtype=dtype).transpose(0, 1)  # [heads, T, D], as a view
    q, k, other = joined[:4], joined[4:6], some(80, dtype=dtype)
    first, second = elementwise.rms_norm_two(q, weight, k, other, EPS)
    assert first.is_contiguous()
    assert second.is_contiguous()
    close(first, normed(q, weight))
    close(second, normed(k, other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate(dtype: torch.dtype) -> None:
    x = some(2, 2 * 2100, dtype=dtype)
    x[0, :4] = torch.tensor([90.0, -90.0, torch.inf, -1e4])
    close(elementwise.silu_mul(x), truth.gate(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "turns"),
    [((3, 5, 20), (5, 10)), ((2, 1, 16), (8,)), ((5, 1, 16), (5, 4, 8)), ((2, 3, 4, 16), (3, 4, 8))],
)
def test_rotations(dtype: torch.dtype, shape: tuple[int, ...], turns: tuple[int, ...]) -> None:
    x = some(*shape[:-2], shape[-2] + 1, shape[-1], dtype=dtype)[..., 1:, :]
    angle = some(*turns)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    if cos.ndim == 2:
        cos, sin = cos[:1].expand_as(cos), sin[:1].expand_as(sin)
    close(elementwise.rotate(x, cos, sin), rotated(x, cos, sin))


@pytest.mark.parametrize(("dtype", "n", "turned", "on_device"), [
    (torch.float32, 3, True, False), (torch.bfloat16, 1, True, True), (torch.bfloat16, 70, False, True),
])  # fmt: skip
def test_append(dtype: torch.dtype, n: int, turned: bool, on_device: bool) -> None:
    into_k, into_v = some(2, 90, 24, dtype=dtype), some(2, 90, 24, dtype=dtype)
    joined = some(n, 5, 24, dtype=dtype).transpose(0, 1)
    k, v, angle = joined[:2], joined[2:4], some(n, 12)
    cos, sin = (angle.cos().to(dtype), angle.sin().to(dtype)) if turned else (None, None)
    expected_k, expected_v = into_k.double(), into_v.double()
    expected_k[:, 7 : 7 + n] = k.double() if cos is None or sin is None else rotated(k, cos, sin)
    expected_v[:, 7 : 7 + n] = v.double()
    at = torch.tensor([7], device=DEVICE) if on_device else 7
    elementwise.append(k, v, into_k, into_v, at, cos, sin)
    close(into_k, expected_k)
    assert torch.equal(into_v.double(), expected_v)


def test_rows_are_taken() -> None:
    one, two = (some(2, 40, 24, dtype=torch.bfloat16)[:, :30] for _ in range(2))
    index = torch.tensor([3, 0, 29, 3], device=DEVICE)
    taken = elementwise.take_rows(one, two, index)
    assert torch.equal(taken[0], one[:, index])
    assert torch.equal(taken[1], two[:, index])
    assert elementwise.take_rows(one, two, index[:0])[0].shape == (2, 0, 24)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1.13862), (torch.bfloat16, 1.0)])
def test_turns(dtype: torch.dtype, scale: float) -> None:
    """As of angles in float64, at a million too."""
    positions = torch.tensor([[0, 3], [70, 4095], [131_071, 1_000_003]])
    frequencies = 10_000.0 ** -(torch.arange(20, dtype=torch.float64) / 20)
    angles = positions[..., None] * frequencies
    cos, sin = elementwise.turns(positions.to(DEVICE), frequencies.to(DEVICE), scale, dtype)
    for one, expected in ((cos, angles.cos() * scale), (sin, angles.sin() * scale)):
        assert one.dtype is dtype
        torch.testing.assert_close(
            one.cpu(), expected.to(dtype), rtol=0, atol=1.2e-7 if dtype is torch.float32 else 4e-3
        )
