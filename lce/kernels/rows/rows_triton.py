"""Parts that the attention kernels share: queries rotated in registers, and the online softmax over blocks of keys.

A score is `q · k · scale` with `scale = log2(e) / √D`, so weights are powers of two. The state of query rows is the
tuple `(top [rows], total [rows], sums [rows, D])`, float32: each row's largest score so far, the sum of its weights
`2^(score - top)`, and the sum of the values times their weights.

The D dimensions of queries and keys are loaded as two halves, because RoPE pairs dimension i with i + D/2; each half is
padded to a power of two.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lce.kernels.runtime.launching import DTYPES, LaneRows, Rows

LOWEST = tl.constexpr(-3.0e38)  # stands for the largest score of a row that has seen no key; -inf would give NaN
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = 256  # the largest head dimension D


def takes(x: Tensor, *others: Tensor) -> bool:
    """Return whether the attention kernels take tensors `[..., D]`, with D even and at most `LARGEST`.

    All tensors must have one dtype of `DTYPES`, be on one device, and have a contiguous last dimension.
    """
    dim = x.shape[-1]
    return (
        x.dtype in DTYPES
        and dim % 2 == 0
        and 0 < dim <= LARGEST
        and x.stride(-1) == 1
        and all(y.dtype is x.dtype and y.device == x.device and y.stride(-1) == 1 for y in others)
    )


class Heads(NamedTuple):
    """A tensor `[heads, rows, D]` as a kernel's argument, with the strides of heads and of rows."""

    at: Tensor
    head: int
    row: int


def heads(x: Rows) -> Any:
    """Return `Heads`; or for rows of several contexts, the table of addresses and the number of heads."""
    return (x.table, x.shape[0]) if isinstance(x, LaneRows) else Heads(x, x.stride(0), x.stride(1))


@dataclass(frozen=True)
class Blocks:
    """Constants of an attention kernel: the head dimension, and the numbers of query rows and keys in a block."""

    dim: int
    rows: int
    keys: int
    precision: str  # Triton's `input_precision` of products

    @cached_property
    def half(self) -> int:
        """Half of the head dimension, padded to a power of two."""
        return max(16, triton.next_power_of_2(self.dim // 2))

    @cached_property
    def wide(self) -> int:
        """The head dimension, padded to a power of two."""
        return max(16, triton.next_power_of_2(self.dim))


def score_scale(dim: int) -> float:
    """Return the factor `log2(e) / √D`, which turns a dot product into a score; weights are `2^score`."""
    return math.log2(math.e) / math.sqrt(dim)


@triton.jit
def nothing_seen(ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Return the state of ROWS rows that have seen no key."""
    return tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDE], tl.float32)


@triton.jit
def load_turned(x, at, seen, turn, turn_at, B: tl.constexpr):
    """Load query rows as two halves `[rows, B.half]`: row i begins at `x + at[i]`, and is zero unless `seen[i]`.

    With `turn`, two pointers to cosines and sines, row i is rotated by the `D/2` angles at the offset `turn_at[i]`.
    """
    column = tl.arange(0, B.half)
    mask = seen[:, None] & (column < B.dim // 2)[None, :]
    first = tl.load(x + at[:, None] + column[None, :], mask=mask, other=0.0)
    second = tl.load(x + at[:, None] + B.dim // 2 + column[None, :], mask=mask, other=0.0)
    if len(turn) == 2:
        c = tl.load(turn[0] + turn_at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        s = tl.load(turn[1] + turn_at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        a, b = first.to(tl.float32), second.to(tl.float32)
        first, second = (a * c - b * s).to(first.dtype), (b * c + a * s).to(second.dtype)
    return first, second


@triton.jit
def attend_keys(q, k, v, rows, span, state, scale, B: tl.constexpr, MASKED: tl.constexpr):
    """Add attention to keys `first..stop-1` to the state of query rows, whose two halves are `q`; return the new state.

    `rows` is `(first, stop)`. `k` and `v` are pairs: a pointer to the key or value `first`, and the stride between
    rows. With MASKED, query row i sees only the keys `span[0][i] .. span[1][i] - 1`. Without MASKED, query rows see all
    keys, and `stop - first` is a multiple of `B.keys`.
    """
    k_at, k_row = k
    v_at, v_row = v
    first, stop = rows
    top, total, sums = state
    n, half, column = tl.arange(0, B.keys), tl.arange(0, B.half), tl.arange(0, B.wide)
    k_offset = n[:, None] * k_row + half[None, :]
    v_offset = n[:, None] * v_row + column[None, :]
    for start in range(first, stop, B.keys):
        if MASKED:
            inside = (start + n < stop)[:, None]
            k_first = tl.load(k_at + k_offset, mask=inside & (half < B.dim // 2)[None, :], other=0.0)
            k_second = tl.load(k_at + B.dim // 2 + k_offset, mask=inside & (half < B.dim // 2)[None, :], other=0.0)
            values = tl.load(v_at + v_offset, mask=inside & (column < B.dim)[None, :], other=0.0)
        elif B.half * 2 != B.dim:
            k_first = tl.load(k_at + k_offset, mask=(half < B.dim // 2)[None, :], other=0.0)
            k_second = tl.load(k_at + B.dim // 2 + k_offset, mask=(half < B.dim // 2)[None, :], other=0.0)
            values = tl.load(v_at + v_offset, mask=(column < B.dim)[None, :], other=0.0)
        else:
            k_first = tl.load(k_at + k_offset)
            k_second = tl.load(k_at + B.dim // 2 + k_offset)
            values = tl.load(v_at + v_offset)
        scores = tl.dot(q[0], tl.trans(k_first), input_precision=B.precision)
        scores = tl.dot(q[1], tl.trans(k_second), scores, input_precision=B.precision)
        if MASKED:
            seen = (start + n)[None, :] >= span[0][:, None]
            scores = tl.where(seen & ((start + n)[None, :] < span[1][:, None]), scores, float("-inf"))
        top, total, sums = weigh(scores, values, (top, total, sums), scale, B)
        k_at += B.keys * k_row
        v_at += B.keys * v_row
    return top, total, sums


@triton.jit
def weigh(scores, values, state, scale, B: tl.constexpr):
    """Add the values of a block of keys, by their scores, to the state of query rows; return the new state."""
    top, total, sums = state
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weights, 1)
    sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision=B.precision)
    return higher, total, sums


@triton.jit
def finish(state):
    """Return the outputs `[rows, D]` and log-sum-exps `[rows]` of a state: 0 and -inf for a row that saw no key."""
    top, total, sums = state
    seen = total != 0.0
    total = tl.where(seen, total, 1.0)
    return sums / total[:, None], tl.where(seen, (top + tl.log2(total)) * LN2, float("-inf"))
