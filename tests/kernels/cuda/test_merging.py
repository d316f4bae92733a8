"""Merges on a GPU, or in Triton's interpreter, beside those in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from lce.kernels.cuda.merging import combined, merge_pieces, merge_slots
from tests.kernels.truth import DEVICE, MOST, ON_GPU, on_device, random

pytestmark = ON_GPU


def parts_of(n_parts: int, dtype: torch.dtype, dim: int = 24) -> tuple[Tensor, Tensor]:
    """`[P, 2, 3, D]`, `[P, 2, 3]`: a part that saw nothing holds NaN; one query saw nothing in any part."""
    out, lse = random(n_parts, 2, 3, dim, dtype=dtype, seed=1), random(n_parts, 2, 3, dtype=torch.float32, seed=2) * 9
    lse[0, 0, 1] = -math.inf
    lse[:, 1, 2] = -math.inf
    out[lse == -math.inf] = math.nan
    return out, lse


def truth(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    total = lse.double().logsumexp(0)
    weights = (lse.double() - total.nan_to_num(neginf=0.0)).exp()
    return (weights[..., None] * out.double().nan_to_num()).sum(0), total


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    assert found[0].dtype == dtype
    torch.testing.assert_close(found[0].cpu().double(), expected[0], rtol=0, atol=MOST[dtype])
    torch.testing.assert_close(found[1].cpu().double(), expected[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("n_parts", [2, 3, 4, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_are_combined(n_parts: int, dtype: torch.dtype) -> None:
    out, lse = parts_of(n_parts, dtype)
    held = [(x.to(DEVICE), y.to(DEVICE).mT.contiguous().mT) for x, y in zip(out, lse, strict=True)]
    same(combined(held), truth(out, lse), dtype)


@pytest.mark.parametrize("n_parts", [1, 3, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_slots_and_pieces_are_merged(n_parts: int, dtype: torch.dtype) -> None:
    out, lse = parts_of(n_parts, dtype)
    slots = (out.movedim(0, 2).contiguous(), lse.movedim(0, 2).contiguous())
    same(merge_slots(*on_device(*slots)), truth(out, lse), dtype)
    same(merge_pieces(*on_device(out.float(), lse), dtype), truth(out, lse), dtype)


def test_a_part_that_is_nan_is_not_hidden() -> None:
    out, lse = parts_of(3, torch.float32)
    lse[1, 0, 0] = math.nan
    held = [(x.to(DEVICE), y.to(DEVICE)) for x, y in zip(out, lse, strict=True)]
    for merged, total in (combined(held), merge_pieces(*on_device(out, lse), torch.float32)):
        assert merged[0, 0].isnan().all()
        assert total[0, 0].isnan()
        assert not merged[0, 1:].isnan().any()
