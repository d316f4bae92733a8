"""The merge of attention results for disjoint sets of keys into one softmax over all keys, by their log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from lce.kernels.rows.rows_triton import LOG2E, LOWEST
from lce.kernels.runtime.launching import launch


def merge_pieces(parts: Tensor, lses: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge attention to n pieces of the keys, `parts [n, …, D]` and log-sum-exps `lses [n, …]`: `[…, D]` and `[…]`.

    Both are contiguous; `lses` is float32. A piece with log-sum-exp -inf is not read. Bytes moved: each piece once.
    """
    n_parts, *shape, dim = parts.shape
    n_rows = lses.numel() // n_parts
    return _merge(parts, lses, shape, dtype, (n_rows * dim, dim, n_rows, 1))


def merge_slots(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention to K tiles, contiguous `out [H, T, K, D]`, `lse [H, T, K]` (float32): `[H, T, D]`, `[H, T]`."""
    *shape, n_slots, dim = out.shape
    return _merge(out, lse, shape, out.dtype, (dim, n_slots * dim, 1, n_slots))


def _merge(
    parts: Tensor, lses: Tensor, shape: Sequence[int], dtype: torch.dtype, strides: tuple[int, int, int, int]
) -> tuple[Tensor, Tensor]:
    """Run one program per row. `strides` are from part to part and from row to row, in `parts` and then in `lses`."""
    dim = parts.shape[-1]
    out = torch.empty(*shape, dim, dtype=dtype, device=parts.device)
    lse = torch.empty(*shape, dtype=torch.float32, device=parts.device)
    n_parts = parts.numel() // max(1, out.numel())
    assert parts.is_contiguous()
    assert lses.is_contiguous()
    assert lses.dtype == torch.float32
    block = min(64, max(2, triton.next_power_of_2(n_parts)))
    options = {"DIM": dim, "WIDE": triton.next_power_of_2(dim), "BLOCK": block, "num_warps": max(2, block // 8)}
    launch(_merge_row, (lse.numel(),), parts, lses, out, lse, strides[:2], (n_parts, *strides[2:]), **options)
    return out, lse


def combined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge attention results, outputs `[..., D]` and log-sum-exps `[...]` (float32), into one such pair.

    The log-sum-exp of attention to no key is -inf. Bytes moved: each result once. The kernel is compiled for 4, 16, 64
    results and so on, because the number of results grows with the text.
    """
    held = tuple((x.contiguous(), y.contiguous()) for x, y in parts)
    out, lse = (torch.empty_like(x) for x in held[0])
    assert all(x.shape == out.shape and y.shape == lse.shape for x, y in held), [x.shape for x, _ in held]
    assert all(y.dtype == torch.float32 for _, y in held)
    n, dim, rows = lse.numel(), out.shape[-1], 16
    n_parts, n_compiled = len(held), 4
    while n_compiled < n_parts:
        n_compiled *= 4
    held += held[:1] * (n_compiled - n_parts)  # not read
    options = {"DIM": dim, "WIDE": triton.next_power_of_2(dim), "ROWS": rows, "num_warps": 4}
    launch(_combine_rows, (triton.cdiv(n, rows),), held, out, lse, (n, n_parts), **options)
    return out, lse


@triton.jit(do_not_specialize=["counts"])
def _merge_row(parts, lses, out, lse, strides, counts, DIM: constexpr, WIDE: constexpr, BLOCK: constexpr):
    """Merge the parts of one row, BLOCK parts at a time; a part has DIM numbers, padded to WIDE."""
    n_parts, lse_part, lse_row = counts
    row = tl.program_id(0).to(tl.int64)
    column, p = tl.arange(0, WIDE), tl.arange(0, BLOCK)
    top = LOWEST + tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_parts, BLOCK):
        at = (start + p).to(tl.int64)
        top = tl.maximum(top, tl.load(lses + row * lse_row + at * lse_part, mask=at < n_parts, other=float("-inf")))
    highest = tl.max(top, 0)
    total = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK, WIDE], tl.float32)
    for start in range(0, n_parts, BLOCK):
        at = (start + p).to(tl.int64)
        own = tl.load(lses + row * lse_row + at * lse_part, mask=at < n_parts, other=float("-inf"))
        weight = tl.exp2((own - highest) * LOG2E)
        mask = (own != float("-inf"))[:, None] & (column < DIM)[None, :]
        x = tl.load(parts + row * strides[1] + at[:, None] * strides[0] + column[None, :], mask=mask, other=0.0)
        total += weight
        sums += weight[:, None] * x.to(tl.float32)
    whole = tl.sum(total, 0)
    seen = whole != 0.0
    whole = tl.where(seen, whole, 1.0)
    merged = tl.sum(sums, 0) / whole
    tl.store(out + row * DIM + column, merged.to(out.dtype.element_ty), mask=column < DIM)
    tl.store(lse + row, tl.where(seen, highest + tl.log2(whole) / LOG2E, float("-inf")))


@triton.jit(do_not_specialize=["counts"])
def _combine_rows(parts, out, lse, counts, DIM: constexpr, WIDE: constexpr, ROWS: constexpr):
    """Merge ROWS rows of the first parts, as many as `counts` says; a row has DIM numbers, padded to WIDE."""
    n_rows, n_parts = counts
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    held = row < n_rows
    top = tl.full([ROWS], LOWEST, tl.float32)
    for i in tl.static_range(len(parts)):
        top = tl.maximum(top, tl.load(parts[i][1] + row, mask=held & (i < n_parts), other=float("-inf")))
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDE], tl.float32)
    for i in tl.static_range(len(parts)):
        own = tl.load(parts[i][1] + row, mask=held & (i < n_parts), other=float("-inf"))
        weight = tl.exp2((own - top) * LOG2E)
        mask = (own != float("-inf"))[:, None] & (column < DIM)[None, :]
        x = tl.load(parts[i][0] + row[:, None] * DIM + column[None, :], mask=mask, other=0.0).to(tl.float32)
        total += weight
        sums += weight[:, None] * x
    seen = total != 0.0
    total = tl.where(seen, total, 1.0)
    merged = sums / total[:, None]
    mask = held[:, None] & (column < DIM)[None, :]
    tl.store(out + row[:, None] * DIM + column[None, :], merged.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + row, tl.where(seen, top + tl.log2(total) / LOG2E, float("-inf")), mask=held)
