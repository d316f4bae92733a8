"""Attention of a decode step: one query per head attends runs of tokens, whose bounds are read on the device.

There may be a query of each of several contexts, whose keys lie at addresses that are read on the device. Runs are cut
into pieces, or several short ones are a piece. A program computes the attention of one query head to a piece, or of all
query heads of a KV head if they see the same runs, so that the keys are read once. A second kernel merges the pieces.
The grid depends on shapes alone, so a step can be recorded as a CUDA graph and replayed.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from lce.kernels.merge import merging_triton as merging
from lce.kernels.rows.rows_triton import LN2, Blocks, attend_keys, finish, heads, load_turned, nothing_seen, score_scale
from lce.kernels.runtime.launching import ALIGNED, LaneRows, Rows, launch

LONGEST, SHORTEST = 512, 64  # the largest and the smallest number of tokens of a piece
ALIGN = tl.constexpr(ALIGNED)
MOST_RUNS = 16  # of a piece
ENOUGH = 528  # programs that keep a GPU with 132 processors busy


def attend_runs(
    q: Tensor, k: Rows, v: Rows, first: Tensor, count: Tensor, turn: Tensor, cos: Tensor, sin: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Compute attention of unrotated queries `q [H, B, D]` to runs of tokens of `k v [G, N, D]`, or of B contexts' own.

    Returns the output `[H, B, D]` and the log-sum-exps `[H, B]` (float32). For each of C choosers, run s of query b has
    the tokens `first[c, b, s] .. first[c, b, s] + count[c, b, s] - 1`, at most `most` tokens: `first count [C, B,
    runs]`, int64. C is 1, G (each KV head has its own runs) or H (each query head has its own). For run s, query b is
    rotated by row `turn[s]` of `cos sin [B, n, D/2]`; `turn [runs]` is int64. Memory outside of the runs is not read.
    Time: O(H · tokens · D). Bytes moved: each key once per program that attends it, and D float32 numbers per piece.
    """
    (n_heads, n_queries, dim), (n_choosers, _, n_runs), n_kv_heads = q.shape, first.shape, k.shape[0]
    assert k.shape == v.shape == (n_kv_heads, k.shape[1], dim), (k.shape, v.shape)
    assert n_heads % n_kv_heads == 0, (n_heads, n_kv_heads)
    assert n_choosers in (1, n_kv_heads, n_heads), n_choosers
    assert count.shape == first.shape == (n_choosers, n_queries, n_runs), (count.shape, first.shape)
    assert turn.shape == (n_runs,), turn.shape
    assert first.dtype == count.dtype == turn.dtype == torch.int64
    assert cos.shape == sin.shape == (n_queries, cos.shape[1], dim // 2), (cos.shape, sin.shape)
    assert all(x.stride(-1) == 1 for x in (q, k, v) if isinstance(x, Tensor))
    assert n_queries == 1 or isinstance(k, LaneRows), n_queries
    runs = tuple(x.contiguous() for x in (first, count, turn, cos, sin))
    rep, share = n_heads // n_kv_heads, n_heads // n_choosers  # query heads of a KV head, and that see the same runs
    rows = rep if n_choosers < n_heads else 1  # query heads of a program
    n_rows = n_heads // rows * n_queries
    piece = _piece(most, n_rows * n_runs)
    n_pieces = max(1, -(-most // piece))
    together = max(1, min(MOST_RUNS, n_rows * n_runs // ENOUGH)) if n_pieces == 1 else 1  # runs of a piece
    grid, vectors = (-(-n_runs // together) * n_pieces, n_rows), (heads(q), heads(k), heads(v))
    parts = torch.empty(grid[0], n_queries, n_heads, dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(parts.shape[:3], dtype=torch.float32, device=q.device)
    kernel, options = _kernel_of(q.dtype, dim, rows, rep, most)
    sizes = n_runs, n_pieces, piece, n_heads, n_queries, cos.shape[1], together
    launch(kernel, grid, *vectors, runs, parts, lses, sizes, score_scale(dim), SHARE=share, **options)
    out, lse = merging.merge_pieces(parts, lses, q.dtype)
    return out.transpose(0, 1), lse.mT


def _kernel_of(dtype: torch.dtype, dim: int, rows: int, rep: int, most: int) -> tuple[Any, dict[str, Any]]:
    """Return the kernel for `rows` query heads and runs of up to `most` tokens, and its constants."""
    longest = max(16, triton.next_power_of_2(most))
    if rows == 1:  # a thread holds 32 numbers each of the keys, the values and the sums
        keys = min(longest, max(8, 4096 // max(16, triton.next_power_of_2(dim))))
        return _one_row, {"REP": rep, "B": Blocks(dim, 1, keys, "ieee"), "num_warps": 4}
    keys = min(longest, 64 if dim <= 128 and dtype.itemsize < 4 else 32)
    blocks = Blocks(dim, max(16, triton.next_power_of_2(rows)), keys, "ieee")
    return _rows_together, {"ROWS": rows, "B": blocks, "num_warps": 4, "num_stages": 3}


def _piece(most: int, n_runs: int) -> int:
    """Return the largest number of tokens per piece with which `n_runs` runs of up to `most` tokens keep a GPU busy."""
    piece = min(LONGEST, max(SHORTEST, triton.next_power_of_2(most)))
    while piece > SHORTEST and n_runs * -(-most // piece) < ENOUGH:
        piece //= 2
    return piece


@triton.jit
def _run_of(runs, sizes, chooser, query, number):
    """Return a run of a program's piece, the piece's bounds within the run, and the index of its first token there."""
    n_runs, n_pieces, piece, _, n_queries, _, together = sizes
    run, begin = tl.program_id(0) // n_pieces * together + number, tl.program_id(0) % n_pieces * piece
    here = (chooser * n_queries + query) * n_runs + run
    stop = tl.minimum(tl.load(runs[1] + here, mask=run < n_runs, other=0), begin + piece).to(tl.int32)
    return tl.minimum(run, n_runs - 1), begin, stop, tl.load(runs[0] + here, mask=run < n_runs, other=0) + begin


@triton.jit
def _rows_at(x, q, query, head, token, B: constexpr):
    """Return a pointer to a token's key or value, and the stride of tokens: see `heads`."""
    if len(x) == 2:
        at = tl.multiple_of(tl.load(x[0] + query * x[1] + head).to(q.at.dtype), ALIGN)
        return at + token * B.dim, B.dim
    else:
        return x[0] + head.to(tl.int64) * x[1] + token * x[2], x[2]


@triton.jit(do_not_specialize=["sizes"])
def _one_row(q, k, v, runs, parts, lses, sizes, scale, REP: constexpr, SHARE: constexpr, B: constexpr):
    """Compute attention of one query head to a piece, without tensor cores, which need 16 rows.

    A state of the softmax is a largest score, a sum of weights and a sum of weighted values. There are `B.keys` states:
    key i of each block of `B.keys` keys changes state i. All states are merged at the end.
    """
    part, head, query = tl.program_id(0), tl.program_id(1) // sizes[4], tl.program_id(1) % sizes[4]
    half, n, column = B.dim // 2, tl.arange(0, B.keys), tl.arange(0, B.wide)
    pair, angle = tl.where(column < half, column + half, column - half), tl.where(column < half, column, column - half)
    held = column < B.dim
    q_at = q.at + head.to(tl.int64) * q.head + query.to(tl.int64) * q.row
    own = tl.load(q_at + column, mask=held, other=0.0).to(tl.float32)
    other = tl.load(q_at + pair, mask=held, other=0.0).to(tl.float32)
    top, total, sums = nothing_seen(B.keys, B.wide)
    for number in range(sizes[6]):
        run, begin, stop, token = _run_of(runs, sizes, head // SHARE, query, number)
        turn_at = (query * sizes[5] + tl.load(runs[2] + run)) * half + angle
        c = tl.load(runs[3] + turn_at, mask=held, other=0.0).to(tl.float32)
        s = tl.load(runs[4] + turn_at, mask=held, other=0.0).to(tl.float32)
        turned = (own * c + tl.where(column < half, -other, other) * s) * scale
        k_at, k_row = _rows_at(k, q, query, head // REP, token, B)
        v_at, v_row = _rows_at(v, q, query, head // REP, token, B)
        for start in range(begin, stop, B.keys):
            inside = start + n < stop
            mask = inside[:, None] & held[None, :]
            keys = tl.load(k_at + n[:, None] * k_row + column[None, :], mask=mask, other=0.0)
            values = tl.load(v_at + n[:, None] * v_row + column[None, :], mask=mask, other=0.0)
            scores = tl.where(inside, tl.sum(keys.to(tl.float32) * turned[None, :], 1), float("-inf"))
            higher = tl.maximum(top, scores)
            weights, shrink = tl.exp2(scores - higher), tl.exp2(top - higher)
            total = total * shrink + weights
            sums = sums * shrink[:, None] + weights[:, None] * values.to(tl.float32)
            top = higher
            k_at += B.keys * k_row
            v_at += B.keys * v_row
    highest = tl.max(top, 0)
    shrink = tl.exp2(top - highest)
    whole = tl.sum(total * shrink, 0)
    seen = whole != 0.0
    whole = tl.where(seen, whole, 1.0)
    out = tl.sum(sums * shrink[:, None], 0) / whole
    at = (part.to(tl.int64) * sizes[4] + query) * sizes[3] + head
    tl.store(parts + at * B.dim + column, out, mask=held)
    tl.store(lses + at, tl.where(seen, (highest + tl.log2(whole)) * LN2, float("-inf")))


@triton.jit(do_not_specialize=["sizes"])
def _rows_together(q, k, v, runs, parts, lses, sizes, scale, SHARE: constexpr, ROWS: constexpr, B: constexpr):
    """Compute attention of a KV head's ROWS query heads to a piece; the heads are the rows of a matrix product."""
    part, group, query = tl.program_id(0), tl.program_id(1) // sizes[4], tl.program_id(1) % sizes[4]
    row, column, state = tl.arange(0, B.rows), tl.arange(0, B.wide), nothing_seen(B.rows, B.wide)
    head, held = group * ROWS + row, row < ROWS
    q_at = head.to(tl.int64) * q.head + query.to(tl.int64) * q.row
    for number in range(sizes[6]):
        run, begin, stop, token = _run_of(runs, sizes, group * ROWS // SHARE, query, number)
        turn_at = (query * sizes[5] + tl.load(runs[2] + run)) * (B.dim // 2) + row * 0
        halves = load_turned(q.at, q_at, held, (runs[3], runs[4]), turn_at, B)
        keys, values = _rows_at(k, q, query, group, token, B), _rows_at(v, q, query, group, token, B)
        state = attend_keys(halves, keys, values, (begin, stop), (row * 0, row * 0 + stop), state, scale, B, True)
    out, lse = finish(state)
    at = (part.to(tl.int64) * sizes[4] + query) * sizes[3] + head
    seen = (held & (state[1] != 0.0))[:, None] & (column < B.dim)[None, :]
    tl.store(parts + at[:, None] * B.dim + column[None, :], out, mask=seen)
    tl.store(lses + at, lse, mask=held)
