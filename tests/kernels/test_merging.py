"""Merges on a CPU, and on a GPU or in Triton's interpreter, beside those in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lce.attention import Attention
from lce.kernels.cpu.merging import merged
from tests.kernels.truth import DEVICE, MOST, ON_GPU, random

each_room = pytest.mark.parametrize("room", ["cpu", pytest.param("cuda", marks=ON_GPU)])
each_dtype = pytest.mark.parametrize("dtype", MOST, ids=str)
CLOSER = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # errors on a CPU


def kernels(room: str) -> tuple[Any, Any]:
    """How a room merges parts, and slots: on a CPU slots are merged by PyTorch, if at all."""
    if room == "cpu":
        return merged, Attention.choose("torch").merge_slots
    pytest.importorskip("triton")
    from lce.kernels.cuda import merging

    return merging.combined, merging.merge_slots


def parts_of(room: str, n_parts: int, dtype: torch.dtype, dim: int = 24) -> tuple[Tensor, Tensor]:
    """`[P, 2, 3, D]`, `[P, 2, 3]`: a part that saw nothing holds NaN; one query saw nothing in any part."""
    out, lse = random(n_parts, 2, 3, dim, dtype=dtype), random(n_parts, 2, 3, seed=2) * 9
    lse[0, 0, 1] = -math.inf
    lse[:, 1, 2] = -math.inf
    out[lse == -math.inf] = math.nan
    device = DEVICE if room == "cuda" else "cpu"
    return out.to(device), lse.to(device)


def same(room: str, found: tuple[Tensor, Tensor], out: Tensor, lse: Tensor, dtype: torch.dtype) -> None:
    total = lse.double().logsumexp(0)
    weights = (lse.double() - total.nan_to_num(neginf=0.0)).exp()
    expected = (weights[..., None] * out.double().nan_to_num()).sum(0)
    most = MOST[dtype] if room == "cuda" else CLOSER[dtype]
    assert found[0].dtype == dtype
    torch.testing.assert_close(found[0].double(), expected, rtol=0, atol=most)
    torch.testing.assert_close(found[1].double(), total, rtol=0, atol=2e-5)


@each_room
@each_dtype
@pytest.mark.parametrize("n_parts", [2, 3, 4, 9, 17])
def test_parts_are_combined(room: str, n_parts: int, dtype: torch.dtype) -> None:
    out, lse = parts_of(room, n_parts, dtype)
    apart = out.transpose(1, 2).contiguous().transpose(1, 2), lse.mT.contiguous().mT
    same(room, kernels(room)[0](list(zip(*apart, strict=True))), out, lse, dtype)


@pytest.mark.parametrize("room", [pytest.param("cuda", marks=ON_GPU)])
@each_dtype
@pytest.mark.parametrize("n_parts", [1, 3, 70])
def test_slots_and_pieces_are_merged(room: str, n_parts: int, dtype: torch.dtype) -> None:
    out, lse = parts_of(room, n_parts, dtype)
    same(room, kernels(room)[1](out.movedim(0, 2).contiguous(), lse.movedim(0, 2).contiguous()), out, lse, dtype)
    from lce.kernels.cuda.merging import merge_pieces

    same(room, merge_pieces(out.float(), lse, dtype), out, lse, dtype)


@each_room
@pytest.mark.parametrize("value", [math.nan, 0.5])
def test_a_part_that_is_nan_is_not_hidden(room: str, value: float) -> None:
    out, lse = parts_of(room, 3, torch.float32)
    out[1, 0, 0], lse[1, 0, 0] = math.nan, value
    by_parts, by_slots = kernels(room)
    slots = out.movedim(0, 2).contiguous(), lse.movedim(0, 2).contiguous()
    for found, total in (by_parts(list(zip(out, lse, strict=True))), by_slots(*slots)):
        assert found[0, 0].isnan().all()
        assert total[0, 0].isnan() == math.isnan(value)
        assert not found[0, 1:].isnan().any()
