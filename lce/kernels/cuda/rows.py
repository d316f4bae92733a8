"""Shared parts of the attention kernels: rows of queries, turned in registers, and softmax over blocks of keys.

Scores are held in base 2: a score is `q · k · scale` with `scale = log2(e) / √D`. A row's state is its largest score so
far, the sum of `2^(score - largest)`, and the sum of values with these weights, all float32.

A head's dimensions are held as two halves, padded to a power of two each: RoPE pairs dimension i with i + D/2.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from lce.kernels.cuda.launching import DTYPES

LOWEST = tl.constexpr(-3.0e38)  # the largest score of a row that has seen no key: finite, so that no NaN arises
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = 256  # dimensions of a head


def takes(x: Tensor, *others: Tensor) -> bool:
    """Return whether the kernels take these: one dtype that they know, one device, vectors contiguous, heads not too
    large.
    """
    dim = x.shape[-1]
    return (
        x.dtype in DTYPES
        and dim % 2 == 0
        and 0 < dim <= LARGEST
        and x.stride(-1) == 1
        and all(y.dtype is x.dtype and y.device == x.device and y.stride(-1) == 1 for y in others)
    )


def head_blocks(dim: int) -> dict[str, int]:
    """Return the kernels' constants of a head size: `DIM`, and the padded sizes of half of it and of all of it."""
    half = max(16, triton.next_power_of_2(dim // 2))
    return {"DIM": dim, "HALF_BLOCK": half, "DIM_BLOCK": max(16, triton.next_power_of_2(dim))}


def score_scale(dim: int) -> float:
    """Return the factor that turns a dot product into a score in base 2."""
    return math.log2(math.e) / math.sqrt(dim)


@triton.jit
def load_turned(x, at, seen, cos, sin, turn_at, DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, TURN: tl.constexpr):
    """Load rows `x + at[i]`, where `seen`, as two halves `[M, HALF_BLOCK]`, turned by `cos sin + turn_at[i]`."""
    column = tl.arange(0, HALF_BLOCK)
    mask = seen[:, None] & (column < DIM // 2)[None, :]
    first = tl.load(x + at[:, None] + column[None, :], mask=mask, other=0.0)
    second = tl.load(x + at[:, None] + DIM // 2 + column[None, :], mask=mask, other=0.0)
    if TURN:
        c = tl.load(cos + turn_at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + turn_at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        a, b = first.to(tl.float32), second.to(tl.float32)
        first, second = (a * c - b * s).to(first.dtype), (b * c + a * s).to(second.dtype)
    return first, second


@triton.jit
def attend_keys(
    q_first, q_second, k_at, v_at, k_row, v_row, first, stop, begin, end, top, total, sums, scale,
    DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend keys `first..stop-1`; `k_at v_at` point to `first`. Masked: row i sees `begin[i]..end[i]-1` alone.

    Without a mask `stop - first` is a multiple of `BLOCK_N`. Returns the rows' state.
    """
    n, half, column = tl.arange(0, BLOCK_N), tl.arange(0, HALF_BLOCK), tl.arange(0, DIM_BLOCK)
    k_offset = n[:, None] * k_row + half[None, :]
    v_offset = n[:, None] * v_row + column[None, :]
    for start in range(first, stop, BLOCK_N):
        if MASKED:
            inside = (start + n < stop)[:, None]
            k_first = tl.load(k_at + k_offset, mask=inside & (half < DIM // 2)[None, :], other=0.0)
            k_second = tl.load(k_at + DIM // 2 + k_offset, mask=inside & (half < DIM // 2)[None, :], other=0.0)
            v = tl.load(v_at + v_offset, mask=inside & (column < DIM)[None, :], other=0.0)
        elif HALF_BLOCK * 2 != DIM:
            k_first = tl.load(k_at + k_offset, mask=(half < DIM // 2)[None, :], other=0.0)
            k_second = tl.load(k_at + DIM // 2 + k_offset, mask=(half < DIM // 2)[None, :], other=0.0)
            v = tl.load(v_at + v_offset, mask=(column < DIM)[None, :], other=0.0)
        else:
            k_first = tl.load(k_at + k_offset)
            k_second = tl.load(k_at + DIM // 2 + k_offset)
            v = tl.load(v_at + v_offset)
        scores = tl.dot(q_first, tl.trans(k_first), input_precision=PRECISION)
        scores = tl.dot(q_second, tl.trans(k_second), scores, input_precision=PRECISION)
        if MASKED:
            key = start + n
            scores = tl.where((key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None]), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision=PRECISION)
        top = higher
        k_at += BLOCK_N * k_row
        v_at += BLOCK_N * v_row
    return top, total, sums


@triton.jit
def finish(top, total, sums):
    """Return the rows' output and log-sum-exp (natural): 0 and -inf where a row saw no key."""
    seen = total != 0.0
    total = tl.where(seen, total, 1.0)
    return sums / total[:, None], tl.where(seen, (top + tl.log2(total)) * LN2, float("-inf"))
