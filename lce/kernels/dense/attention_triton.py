"""Attention of queries to all keys on GPUs (FlashAttention-2, Dao, 2023).

Shapes alone determine the grids and the order of each sum, so a query's result depends neither on other queries nor on
the place of its keys in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from lce.kernels.merge import merging_triton as merging
from lce.kernels.rows.rows_triton import Blocks, attend_keys, finish, heads, load_turned, nothing_seen, score_scale
from lce.kernels.runtime.launching import launch

ENOUGH = 264  # programs that keep a GPU with 132 processors busy
SHORTEST = 256  # the smallest number of keys of a piece, if keys are split into pieces


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None, *turn: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute attention of `q [H, T, D]` to `k v [G, N, D]`, N ≥ 1, as `dense_attention` on CPUs does.

    If given, `turn` is the cosines and sines `[T, D/2]` that rotate the queries. The query heads of a KV head are rows
    of one matrix product, which reads the keys once. If few programs would run, the keys are split into pieces, and
    the results of the pieces are merged. Time: O(H · T · N · D). Bytes moved: the keys once per block of rows; if
    split, also H · T · D float32 numbers per piece.
    """
    (n_heads, n_queries, dim), (n_groups, n_keys, _) = q.shape, k.shape
    rep = n_heads // n_groups
    assert k.shape == v.shape == (n_groups, n_keys, dim), (k.shape, v.shape)
    assert n_heads == rep * n_groups, (n_heads, n_groups)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert all(x.shape == (n_queries, dim // 2) for x in turn), [x.shape for x in turn]
    blocks, options = _blocks(q.dtype, dim, n_queries * rep)
    n_blocks = -(-n_queries * rep // blocks.rows)
    n_pieces = max(1, min(-(-ENOUGH // (n_groups * n_blocks)), n_keys // SHORTEST))
    piece = -(-n_keys // n_pieces // blocks.keys) * blocks.keys
    shape = (n_heads, n_queries, dim) if n_pieces == 1 else (n_pieces, n_heads, n_queries, dim)
    out = torch.empty(shape, dtype=q.dtype if n_pieces == 1 else torch.float32, device=q.device)
    lse = torch.empty(shape[:-1], dtype=torch.float32, device=q.device)
    grid, vectors = (n_groups * n_blocks * n_pieces,), (heads(q), heads(k), heads(v))
    turns = tuple(x.contiguous() for x in turn)
    sizes = n_queries, n_keys, n_keys if window is None else window, n_blocks, n_pieces, piece, n_heads
    seen = {"CAUSAL": causal, "WINDOW": causal and window is not None}
    launch(_dense_rows, grid, *vectors, turns, out, lse, sizes, score_scale(dim), REP=rep, **seen, B=blocks, **options)
    return (out, lse) if n_pieces == 1 else merging.merge_pieces(out, lse, q.dtype)


def _blocks(dtype: torch.dtype, dim: int, n_rows: int) -> tuple[Blocks, dict[str, int]]:
    """Return block sizes, warps and stages for a launch; they fit an A100's shared memory and an H100's registers.

    `tools/compile_cuda.py` prints each setting's registers, spills and shared memory. No setting was timed on a GPU.
    """
    if dtype is torch.float32:  # products in float32 do not use tensor cores
        rows, keys, warps, stages = (16, 16, 4, 2) if n_rows <= 16 or dim > 128 else (32, 32, 4, 2)
    elif n_rows <= 16:
        rows, keys, warps, stages = (16, 64, 4, 3) if dim <= 128 else (16, 32, 4, 3)
    elif n_rows <= 128 or dim > 128:
        rows, keys, warps, stages = (64, 64, 4, 2) if dim <= 128 else (64, 32, 4, 2)
    else:
        rows, keys, warps, stages = 128, 128, 8, 2
    precision = "ieee" if dtype is torch.float32 else "tf32"  # has no effect on products in half precision
    return Blocks(dim, rows, keys, precision), {"num_warps": warps, "num_stages": stages}


@triton.jit(do_not_specialize=["sizes"])
def _dense_rows(
    q, k, v, turn, out, lse, sizes, scale, REP: constexpr, CAUSAL: constexpr, WINDOW: constexpr, B: constexpr
):
    """Compute attention of a block of rows to a piece of a KV head's keys.

    Row `t · REP + r` is query t of the r-th of the REP query heads that share the KV head. The keys `first..stop-1` of
    the piece are attended in up to three ranges. A row sees a key before `some` only if the key is in the row's window.
    The keys `some..whole-1` are seen by all rows and need no mask. A row sees a key from `whole` on only if the key is
    before the row's causal limit and the end of the keys.
    """
    n_queries, n_keys, window, n_blocks, n_pieces, piece, n_heads = sizes
    program = tl.program_id(0)
    number, group = program % (n_blocks * n_pieces), program // (n_blocks * n_pieces)
    block, part = n_blocks - 1 - number % n_blocks, number // n_blocks  # last rows see most keys, so they start first
    row, column = block * B.rows + tl.arange(0, B.rows), tl.arange(0, B.wide)
    query, head = row // REP, group * REP + row % REP
    held = query < n_queries
    first_query = block * B.rows // REP
    last_query = tl.minimum((block * B.rows + B.rows - 1) // REP, n_queries - 1)
    past = n_keys - n_queries
    first, stop = part * piece, tl.minimum(n_keys, part * piece + piece)
    begin, end = query * 0, query * 0 + stop
    some = first
    all_see = stop
    if CAUSAL:
        end = past + query + 1
        all_see = tl.minimum(stop, past + first_query + 1)
        stop = tl.minimum(stop, past + last_query + 1)
        end = tl.minimum(end, stop)
    if WINDOW:
        begin = past + query + 1 - window
        lowest = tl.maximum(past + first_query + 1 - window, 0) // B.keys * B.keys
        first = tl.maximum(first, lowest)
        seen_by_all = tl.maximum(past + last_query + 1 - window, 0)
        some = tl.maximum(first, (seen_by_all + B.keys - 1) // B.keys * B.keys)
        some = tl.minimum(some, tl.maximum(stop, first))
    whole = some + tl.maximum(all_see - some, 0) // B.keys * B.keys

    at = head.to(tl.int64) * q.head + query.to(tl.int64) * q.row
    halves = load_turned(q.at, at, held, turn, query.to(tl.int64) * (B.dim // 2), B)
    state, span = nothing_seen(B.rows, B.wide), (begin, end)
    k_at, v_at = k.at + group.to(tl.int64) * k.head, v.at + group.to(tl.int64) * v.head
    if WINDOW:
        keys, values = (k_at + first.to(tl.int64) * k.row, k.row), (v_at + first.to(tl.int64) * v.row, v.row)
        state = attend_keys(halves, keys, values, (first, tl.minimum(some, stop)), span, state, scale, B, True)
    keys, values = (k_at + some.to(tl.int64) * k.row, k.row), (v_at + some.to(tl.int64) * v.row, v.row)
    state = attend_keys(halves, keys, values, (some, whole), span, state, scale, B, False)
    keys, values = (k_at + whole.to(tl.int64) * k.row, k.row), (v_at + whole.to(tl.int64) * v.row, v.row)
    state = attend_keys(halves, keys, values, (whole, stop), span, state, scale, B, True)
    numbers, total = finish(state)
    at = (part.to(tl.int64) * n_heads + head) * n_queries + query
    mask = held[:, None] & (column < B.dim)[None, :]
    tl.store(out + at[:, None] * B.dim + column[None, :], numbers.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + at, total, mask=held)
