"""Merges partial attentions over disjoint keys into one softmax over all keys, by log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lce.kernels.cuda import launching
from lce.kernels.cuda.rows import LOG2E, LOWEST

AT_ONCE = 4  # parts of one launch of `combined`


def merge_pieces(parts: Tensor, lses: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge `parts [P, …, D]`, `lses [P, …]` (float32), contiguous, into one softmax: `out […, D]`, `lse […]`.

    A part with lse -inf is not read. Time and bytes: O(parts), read once.
    """
    n_parts, *shape, dim = parts.shape
    n_rows = lses.numel() // n_parts
    return _merge(parts, lses, shape, dtype, (n_rows * dim, dim), (n_rows, 1))


def merge_slots(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge `out [H, T, K, D]`, `lse [H, T, K]`, contiguous, into one softmax over K: `[H, T, D]` and `[H, T]`."""
    *shape, n_slots, dim = out.shape
    return _merge(out, lse, shape, out.dtype, (dim, n_slots * dim), (1, n_slots))


def _merge(
    parts: Tensor, lses: Tensor, shape: Sequence[int], dtype: torch.dtype, strides: tuple[int, int],
    lse_strides: tuple[int, int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch one program a row; `strides` are those of parts and of rows."""
    dim = parts.shape[-1]
    out = torch.empty(*shape, dim, dtype=dtype, device=parts.device)
    lse = torch.empty(*shape, dtype=torch.float32, device=parts.device)
    n_parts = parts.numel() // max(1, out.numel())
    assert parts.is_contiguous()
    assert lses.is_contiguous()
    assert lses.dtype == torch.float32
    block = min(64, max(2, triton.next_power_of_2(n_parts)))
    launching.launch(
        _merge_row, (lse.numel(),), parts, lses, out, lse, n_parts, *strides, *lse_strides, DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim), BLOCK_P=block, num_warps=max(2, block // 8),
    )  # fmt: skip
    return out, lse


def combined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge two or more parts `out [..., D]`, `lse [...]` (float32) into one, with its log-sum-exp.

    A part that saw no key has lse -inf. More than `AT_ONCE` parts take several launches, float32 between them. Time and
    bytes: O(parts), read once.
    """
    first, dtype = parts[0][0], parts[0][0].dtype
    parts = list(parts)
    while len(parts) > 1:
        some, parts = parts[:AT_ONCE], parts[AT_ONCE:]
        out = torch.empty(first.shape, dtype=torch.float32 if parts else dtype, device=first.device)
        lse = torch.empty(first.shape[:-1], dtype=torch.float32, device=first.device)
        held = [(x.contiguous(), y.contiguous()) for x, y in some]
        assert all(x.shape == out.shape and y.shape == lse.shape for x, y in held), [x.shape for x, _ in held]
        assert all(y.dtype == torch.float32 for _, y in held)
        held += [held[0]] * (AT_ONCE - len(held))
        dim = first.shape[-1]
        launching.launch(
            _combine_rows, (triton.cdiv(lse.numel(), 16),), *(x for pair in held for x in pair), out, lse, lse.numel(),
            N_PARTS=len(some), DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim), ROWS=16, num_warps=4,
        )  # fmt: skip
        parts.insert(0, (out, lse))
    return parts[0]


@triton.jit(do_not_specialize=["n_parts", "lse_part", "lse_row"])
def _merge_row(
    parts, lses, out, lse, n_parts, part_stride, row_stride, lse_part, lse_row, DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column, p = tl.arange(0, DIM_BLOCK), tl.arange(0, BLOCK_P)
    top = LOWEST + tl.zeros([BLOCK_P], tl.float32)
    for start in range(0, n_parts, BLOCK_P):
        at = (start + p).to(tl.int64)
        top = tl.maximum(top, tl.load(lses + row * lse_row + at * lse_part, mask=at < n_parts, other=float("-inf")))
    highest = tl.max(top, 0)
    total = tl.zeros([BLOCK_P], tl.float32)
    sums = tl.zeros([BLOCK_P, DIM_BLOCK], tl.float32)
    for start in range(0, n_parts, BLOCK_P):
        at = (start + p).to(tl.int64)
        own = tl.load(lses + row * lse_row + at * lse_part, mask=at < n_parts, other=float("-inf"))
        weight = tl.exp2((own - highest) * LOG2E)
        mask = (own != float("-inf"))[:, None] & (column < DIM)[None, :]
        x = tl.load(parts + row * row_stride + at[:, None] * part_stride + column[None, :], mask=mask, other=0.0)
        total += weight
        sums += weight[:, None] * x.to(tl.float32)
    whole = tl.sum(total, 0)
    seen = whole != 0.0
    whole = tl.where(seen, whole, 1.0)
    merged = tl.sum(sums, 0) / whole
    tl.store(out + row * DIM + column, merged.to(out.dtype.element_ty), mask=column < DIM)
    tl.store(lse + row, tl.where(seen, highest + tl.log2(whole) / LOG2E, float("-inf")))


@triton.jit(do_not_specialize=["n_rows"])
def _combine_rows(
    out0, lse0, out1, lse1, out2, lse2, out3, lse3, out, lse, n_rows, N_PARTS: tl.constexpr, DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    held = row < n_rows
    a = tl.load(lse0 + row, mask=held, other=0.0)
    b = tl.load(lse1 + row, mask=held, other=0.0)
    top = tl.maximum(tl.maximum(a, b), LOWEST)
    if N_PARTS > 2:
        c = tl.load(lse2 + row, mask=held, other=0.0)
        top = tl.maximum(top, c)
    if N_PARTS > 3:
        d = tl.load(lse3 + row, mask=held, other=0.0)
        top = tl.maximum(top, d)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
    total, sums = _add_part(out0, a, top, row, held, total, sums, DIM, DIM_BLOCK)
    total, sums = _add_part(out1, b, top, row, held, total, sums, DIM, DIM_BLOCK)
    if N_PARTS > 2:
        total, sums = _add_part(out2, c, top, row, held, total, sums, DIM, DIM_BLOCK)
    if N_PARTS > 3:
        total, sums = _add_part(out3, d, top, row, held, total, sums, DIM, DIM_BLOCK)
    seen = total != 0.0
    column = tl.arange(0, DIM_BLOCK)
    total = tl.where(seen, total, 1.0)
    merged = sums / total[:, None]
    mask = held[:, None] & (column < DIM)[None, :]
    tl.store(out + row[:, None] * DIM + column[None, :], merged.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + row, tl.where(seen, top + tl.log2(total) / LOG2E, float("-inf")), mask=held)


@triton.jit
def _add_part(part, own, top, row, held, total, sums, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """Add the rows of one part, each weighted by the exponential of its log-sum-exp."""
    column = tl.arange(0, DIM_BLOCK)
    weight = tl.exp2((own - top) * LOG2E)
    mask = (held & (own != float("-inf")))[:, None] & (column < DIM)[None, :]
    x = tl.load(part + row[:, None] * DIM + column[None, :], mask=mask, other=0.0).to(tl.float32)
    return total + weight, sums + weight[:, None] * x
