"""Attention kernels for GPUs, on one or in Triton's interpreter, beside one softmax in float64."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from lce.kernels.dense.attention_triton import dense_attention
from lce.kernels.rows.rows_triton import takes
from tests.kernels.truth import DEVICE, MOST, ON_GPU, attended, on_device, random, rotated

pytestmark = ON_GPU


def buffer_slice(x: Tensor, before: int = 3, after: int = 5) -> Tensor:
    """`x [G, N, D]` as a slice of a buffer that is NaN elsewhere, on the device."""
    whole = torch.full((len(x), before + x.shape[1] + after, x.shape[2]), torch.nan, dtype=x.dtype)
    whole[:, before : before + x.shape[1]] = x
    return whole.to(DEVICE)[:, before : before + x.shape[1]]


CASES = [  # H, G, T, N, D, causal, window, dtype
    (2, 2, 1, 1, 64, True, None, torch.float32),
    (4, 2, 3, 70, 80, True, None, torch.float32),
    (6, 2, 70, 130, 16, True, 33, torch.float32),
    (2, 1, 5, 3, 96, False, None, torch.bfloat16),
    (3, 1, 40, 200, 128, True, 64, torch.bfloat16),
    (2, 1, 150, 150, 64, True, None, torch.float16),  # blocks of 128 rows
    (2, 2, 1, 1100, 64, True, None, torch.float16),  # split keys
    (4, 1, 2, 1030, 32, True, 700, torch.bfloat16),  # split keys and a window that skips some
    (1, 1, 20, 90, 256, True, None, torch.bfloat16),
    (4, 4, 20, 64, 6, False, 3, torch.float32),  # the window of a part that is not causal says nothing
]


@pytest.mark.parametrize(
    ("case", "turn"),
    [
        pytest.param(case, turn, marks=[pytest.mark.slow] * ((i + turn) % 2))
        for i, case in enumerate(CASES)
        for turn in (False, True)  # every day each case in one of them
    ],
    ids=str,
)
def test_attend(case: tuple[int, int, int, int, int, bool, int | None, torch.dtype], turn: bool) -> None:
    n_heads, n_groups, n_queries, n_keys, dim, causal, window, dtype = case
    q = random(n_queries, n_heads, dim, dtype=dtype, seed=1).transpose(0, 1)  # as projections are
    k, v = (random(n_groups, n_keys, dim, dtype=dtype, seed=seed) for seed in (2, 3))
    angle = random(n_queries, dim // 2, dtype=torch.float32, seed=4)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    truth = attended(rotated(q, cos, sin).to(dtype) if turn else q, k, v, causal, window if causal else None)
    turns = on_device(cos, sin) if turn else ()
    out, lse = dense_attention(q.to(DEVICE), buffer_slice(k), buffer_slice(v), causal, window, *turns)
    assert out.dtype == dtype
    assert (out.cpu() - truth[0]).abs().max() < MOST[dtype]
    assert (lse.cpu() - truth[1]).abs().max() < MOST[dtype]


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_no_nan_is_hidden(which: str) -> None:
    vectors = {name: random(1, 40, 32, dtype=torch.float32, seed=1) for name in "qkv"}
    vectors[which][0, 2, 3] = math.nan
    out, _ = dense_attention(*on_device(*vectors.values()), causal=False)
    seen = [2] if which == "q" else list(range(40))
    assert out[0].isnan().any(-1).nonzero().flatten().tolist() == seen


def test_what_the_kernels_take() -> None:
    x = torch.zeros(2, 3, 64)
    assert takes(x, x)
    assert not takes(x, x.half())
    assert not takes(x.double())
    assert not takes(x.mT)
    assert not takes(torch.zeros(2, 3, 63))
    assert not takes(torch.zeros(2, 3, 512))
