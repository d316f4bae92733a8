"""Attention of a decode step: one query a head over runs of tokens, whose bounds are read on the device.

Runs are cut into pieces. A program takes a piece for one query head, or for all query heads of a KV head where they see
the same runs: the keys are then read once. A second kernel merges the pieces. The grid depends on shapes alone, so a
step can be recorded and run again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lce.kernels.cuda import launching, merging
from lce.kernels.cuda.rows import LN2, LOWEST, attend_keys, finish, head_blocks, load_turned, score_scale

LONGEST, SHORTEST = 512, 64  # tokens of a piece
ENOUGH = 528  # programs that keep a GPU of 132 processors busy


def attend_runs(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, count: Tensor, turn: Tensor, cos: Tensor, sin: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Attend the tokens of S runs of `k v [G, N, D]` with `q [H, D]`, unrotated: `out [H, D]`, `lse [H]` (float32).

    Chooser c's run s is `first[c, s] .. first[c, s] + count[c, s] - 1`, `first count [C, S]` int64, C of 1, G or H; no
    count exceeds `most`. The query sees run s turned by `cos sin [turn[s]]`, `turn [S]` int64, `cos sin [n, D/2]`.
    Memory outside of the runs is never read. Time: O(H · tokens · D). Bytes: each key once for each program that sees
    it, and pieces · H · D float32 numbers of partial results.
    """
    (n_heads, dim), n_kv_heads, (n_choosers, n_runs) = q.shape, len(k), first.shape
    assert k.shape == v.shape == (n_kv_heads, k.shape[1], dim), (k.shape, v.shape)
    assert n_heads % n_kv_heads == 0, (n_heads, n_kv_heads)
    assert n_choosers in (1, n_kv_heads, n_heads), n_choosers
    assert count.shape == first.shape, (count.shape, first.shape)
    assert turn.shape == (n_runs,), turn.shape
    assert first.dtype == count.dtype == turn.dtype == torch.int64
    assert cos.shape == sin.shape == (len(cos), dim // 2), (cos.shape, sin.shape)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    first, count, turn, cos, sin = (x.contiguous() for x in (first, count, turn, cos, sin))
    rep = n_heads // n_kv_heads
    rows = rep if n_choosers < n_heads else 1  # query heads of a program
    piece = _piece(most, n_heads // rows * n_runs)
    n_pieces = max(1, -(-most // piece))
    parts = torch.empty(n_runs * n_pieces, n_heads, dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(n_runs * n_pieces, n_heads, dtype=torch.float32, device=q.device)
    kernel, options = _kernel_of(q.dtype, dim, rows)
    launching.launch(
        kernel, (n_runs * n_pieces, n_heads // rows), q, k, v, first, count, turn, cos, sin, parts, lses, q.stride(0),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), n_runs, n_pieces, piece, n_heads, score_scale(dim),
        REP=rep, SHARE=n_heads // n_choosers, **head_blocks(dim), **options,
    )  # fmt: skip
    return merging.merge_pieces(parts, lses, q.dtype)


def _kernel_of(dtype: torch.dtype, dim: int, rows: int) -> tuple[Any, dict[str, Any]]:
    """Return the kernel for so many query heads a program, and its constants: `tools/compile_cuda.py` prints their
    costs.
    """
    if rows == 1:  # a thread holds 32 numbers of the keys, of the values and of the sums
        return _one_row, {"BLOCK_N": max(8, 4096 // head_blocks(dim)["DIM_BLOCK"]), "num_warps": 4}
    return _rows_together, {
        "ROWS": rows, "ROW_BLOCK": max(16, triton.next_power_of_2(rows)),
        "BLOCK_N": 64 if dim <= 128 and dtype is not torch.float32 else 32, "PRECISION": "ieee", "num_warps": 4,
        "num_stages": 3,
    }  # fmt: skip


def _piece(most: int, n_runs: int) -> int:
    """Return the tokens of a piece, where `n_runs` runs of up to `most` tokens are to fill a GPU."""
    piece = min(LONGEST, max(SHORTEST, triton.next_power_of_2(most)))
    while piece > SHORTEST and n_runs * -(-most // piece) < ENOUGH:
        piece //= 2
    return piece


@triton.jit(do_not_specialize=["n_runs", "n_pieces", "piece", "n_heads"])
def _one_row(
    q, k, v, first, count, turn, cos, sin, parts, lses, q_head, k_group, k_row, v_group, v_row, n_runs, n_pieces, piece,
    n_heads, scale, REP: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, HALF_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend a piece with one query head, by plain products: tensor cores want 16 rows.

    Each of `BLOCK_N` lanes of keys keeps a state of its own; they become one at the end.
    """
    part, head = tl.program_id(0), tl.program_id(1)
    run, begin = part // n_pieces, part % n_pieces * piece
    here = (head // SHARE) * n_runs + run
    stop = tl.minimum(tl.load(count + here), begin + piece).to(tl.int32)
    token = tl.load(first + here) + begin
    half, n, column = DIM // 2, tl.arange(0, BLOCK_N), tl.arange(0, DIM_BLOCK)
    pair, angle = tl.where(column < half, column + half, column - half), tl.where(column < half, column, column - half)
    held = column < DIM
    turn_at = tl.load(turn + run) * half + angle
    own = tl.load(q + head.to(tl.int64) * q_head + column, mask=held, other=0.0).to(tl.float32)
    other = tl.load(q + head.to(tl.int64) * q_head + pair, mask=held, other=0.0).to(tl.float32)
    c = tl.load(cos + turn_at, mask=held, other=0.0).to(tl.float32)
    s = tl.load(sin + turn_at, mask=held, other=0.0).to(tl.float32)
    query = (own * c + tl.where(column < half, -other, other) * s) * scale
    kv_head = (head // REP).to(tl.int64)
    k_at, v_at = k + kv_head * k_group + token * k_row, v + kv_head * v_group + token * v_row
    top = tl.full([BLOCK_N], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    sums = tl.zeros([BLOCK_N, DIM_BLOCK], tl.float32)
    for start in range(begin, stop, BLOCK_N):
        inside = start + n < stop
        mask = inside[:, None] & held[None, :]
        keys = tl.load(k_at + n[:, None] * k_row + column[None, :], mask=mask, other=0.0)
        values = tl.load(v_at + n[:, None] * v_row + column[None, :], mask=mask, other=0.0)
        scores = tl.where(inside, tl.sum(keys.to(tl.float32) * query[None, :], 1), float("-inf"))
        higher = tl.maximum(top, scores)
        weights, shrink = tl.exp2(scores - higher), tl.exp2(top - higher)
        total = total * shrink + weights
        sums = sums * shrink[:, None] + weights[:, None] * values.to(tl.float32)
        top = higher
        k_at += BLOCK_N * k_row
        v_at += BLOCK_N * v_row
    highest = tl.max(top, 0)
    shrink = tl.exp2(top - highest)
    whole = tl.sum(total * shrink, 0)
    seen = whole != 0.0
    whole = tl.where(seen, whole, 1.0)
    out = tl.sum(sums * shrink[:, None], 0) / whole
    at = part.to(tl.int64) * n_heads + head
    tl.store(parts + at * DIM + column, out, mask=held)
    tl.store(lses + at, tl.where(seen, (highest + tl.log2(whole)) * LN2, float("-inf")))


@triton.jit(do_not_specialize=["n_runs", "n_pieces", "piece", "n_heads"])
def _rows_together(
    q, k, v, first, count, turn, cos, sin, parts, lses, q_head, k_group, k_row, v_group, v_row, n_runs, n_pieces, piece,
    n_heads, scale, REP: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, HALF_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr, ROWS: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend a piece with the `ROWS` query heads of a KV head, as rows of one product of matrices."""
    part, group = tl.program_id(0), tl.program_id(1)
    run, begin = part // n_pieces, part % n_pieces * piece
    here = (group * ROWS // SHARE) * n_runs + run
    stop = tl.minimum(tl.load(count + here), begin + piece).to(tl.int32)
    token = tl.load(first + here) + begin
    row, column = tl.arange(0, ROW_BLOCK), tl.arange(0, DIM_BLOCK)
    head, held = group * ROWS + row, row < ROWS
    turn_at = tl.load(turn + run) * (DIM // 2) + row * 0
    q_first, q_second = load_turned(q, head.to(tl.int64) * q_head, held, cos, sin, turn_at, DIM, HALF_BLOCK, True)
    k_at, v_at = k + group.to(tl.int64) * k_group + token * k_row, v + group.to(tl.int64) * v_group + token * v_row
    top = tl.full([ROW_BLOCK], LOWEST, tl.float32)
    total = tl.zeros([ROW_BLOCK], tl.float32)
    sums = tl.zeros([ROW_BLOCK, DIM_BLOCK], tl.float32)
    top, total, sums = attend_keys(
        q_first, q_second, k_at, v_at, k_row, v_row, begin, stop, row * 0, row * 0 + stop, top, total, sums, scale, DIM,
        HALF_BLOCK, DIM_BLOCK, BLOCK_N, True, PRECISION,
    )  # fmt: skip
    out, lse = finish(top, total, sums)
    at = part.to(tl.int64) * n_heads + head
    seen = (held & (total != 0.0))[:, None] & (column < DIM)[None, :]
    tl.store(parts + at[:, None] * DIM + column[None, :], out, mask=seen)
    tl.store(lses + at, lse, mask=held)
