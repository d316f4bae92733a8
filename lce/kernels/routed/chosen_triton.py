"""Attention of many queries to their chosen chunks on GPUs: one online softmax walks the chunks that any of them chose.

Each row of a block walks its own list. A step takes the lowest chunk that is next in any row's list, and rows whose
next chunk is another one do not see its keys: that leaves a row's bits unchanged, so no result depends on other rows.
Where one rotation of a query serves all its chunks, a step takes as many neighbouring small chunks as fill a block of
keys, because a step of 8 keys takes nearly as long as one of 64.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from lce.kernels.merge import merging_triton as merging
from lce.kernels.rows.rows_triton import (
    Blocks,
    attend_keys,
    finish,
    heads,
    load_turned,
    nothing_seen,
    score_scale,
    weigh,
)
from lce.kernels.runtime.launching import launch

ENOUGH = 264  # programs that keep a GPU with 132 processors busy
SHORTEST = 8  # the smallest number of slots of a piece, if lists are split into pieces
NONE = tl.constexpr(0x7FFF_FFFF)  # the chunk of a step in which no row has a chunk


def chosen_attention(
    q: Tensor, turn: Sequence[Tensor], rows: Tensor, chunk_ids: Tensor, rounds: Iterable[tuple[Tensor, Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Compute attention of unrotated queries `q [H, T, D]` to lists of chunks, as `Attention.routed` does.

    `turn` is the table's cosines and sines. A round is `k v` and `index` of `Tiles`. Lists are best ascending. If few
    programs would run, lists are split into pieces, whose results are merged. The host does not wait for the device.
    Time for unions of U chunks: O(H · T · U · L · D). Bytes moved: a union's keys and values once per block of rows.
    """
    (n_heads, n_queries, dim), n_slots = q.shape, chunk_ids.shape[-1]
    assert chunk_ids.shape[:2] == q.shape[:2], chunk_ids.shape
    assert len(rows) in (1, n_queries), rows.shape
    assert chunk_ids.dtype == rows.dtype == torch.int64
    turn = tuple(x.contiguous() for x in turn)
    out: Tensor | None = None
    for k, v, index in rounds:
        n_groups, (n_tiles, size, _) = len(index), k.shape
        assert k.shape == v.shape == (n_tiles, size, dim), (k.shape, v.shape)
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == index.stride(-1) == 1
        if out is None:
            rep = n_heads // n_groups
            blocks, options = _blocks(q.dtype, dim, n_queries * rep, size)
            wide = blocks.keys if q.dtype is torch.float32 or dim > 128 else 64
            together = wide // size if rows.shape[1] == 1 and size < wide and wide % size == 0 else 1
            if together > 1:
                blocks, options = replace(blocks, keys=wide), {**options, "num_warps": 8}
            n_blocks = -(-n_queries * rep // blocks.rows)
            n_pieces = max(1, min(-(-ENOUGH // (n_groups * n_blocks)), n_slots // SHORTEST))
            piece = -(-n_slots // n_pieces)
            out = q.new_empty(n_pieces, n_heads, n_queries, dim, dtype=q.dtype if n_pieces == 1 else torch.float32)
            lse = q.new_empty(n_pieces, n_heads, n_queries, dtype=torch.float32)
            # The state of the softmax after a round; a state that goes on is as if all chunks were in one round.
            state = (torch.empty_like(lse), torch.empty_like(lse), torch.empty_like(out, dtype=torch.float32))
            goes_on = 0
        lists = chunk_ids, index, rows
        each = (0 if len(rows) == 1 else rows.stride(0), rows.stride(1))
        strides = *chunk_ids.stride(), index.stride(0), *each
        sizes = n_queries, n_slots, size, n_blocks, n_pieces, piece, n_heads, goes_on
        given = heads(q), heads(k), heads(v), turn, lists, strides, out, lse, state, sizes, score_scale(dim)
        constants = {"REP": rep, "ONE": rows.shape[1] == 1, "CHUNKS": together, "B": blocks, **options}
        launch(_chosen_rows, (n_groups * n_blocks * n_pieces,), *given, **constants)
        goes_on = 1
    if out is None or not n_slots:
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    return (out[0], lse[0]) if len(out) == 1 else merging.merge_pieces(out, lse, q.dtype)


def _blocks(dtype: torch.dtype, dim: int, n_rows: int, size: int) -> tuple[Blocks, dict[str, int]]:
    """Return block sizes, warps and stages for a launch; see `tools/compile_cuda.py`. No setting was timed on a GPU."""
    keys = max(16, min(triton.next_power_of_2(size), 64 if dim <= 128 else 32))
    if dtype is torch.float32:  # products in float32 do not use tensor cores
        return Blocks(dim, 16, 16, "ieee"), {"num_warps": 4, "num_stages": 1}
    rows, stages = (32, 2) if dim > 128 else (64, 1)  # more rows or stages spill registers
    return Blocks(dim, 16 if n_rows <= 16 else rows, keys, "tf32"), {"num_warps": 4, "num_stages": stages}


@triton.jit(do_not_specialize=["strides", "sizes"])
def _chosen_rows(
    q,
    k,
    v,
    turn,
    lists,
    strides,
    out,
    lse,
    state,
    sizes,
    scale,
    REP: constexpr,
    ONE: constexpr,
    CHUNKS: constexpr,
    B: constexpr,
):
    """Compute attention of a block of rows to a piece of their lists; row `t · REP + r` is query t of query head r.

    With ONE, all slots of a query have one rotation. CHUNKS > 1 chunks are a block of keys, and are taken in one step.
    """
    chunk_ids, index, turn_rows = lists
    n_queries, n_slots, size, n_blocks, n_pieces, piece, n_heads, goes_on = sizes
    program = tl.program_id(0)
    number, group = program % (n_blocks * n_pieces), program // (n_blocks * n_pieces)
    block, part = number % n_blocks, number // n_blocks
    row, column = block * B.rows + tl.arange(0, B.rows), tl.arange(0, B.wide)
    query, head = row // REP, group * REP + row % REP
    held = query < n_queries
    q_at = head.to(tl.int64) * q.head + query.to(tl.int64) * q.row
    ids_at = chunk_ids + head.to(tl.int64) * strides[0] + query.to(tl.int64) * strides[1]
    turn_at = turn_rows + query.to(tl.int64) * strides[4]
    if ONE:
        queries = load_turned(q.at, q_at, held, turn, tl.load(turn_at, mask=held, other=0) * (B.dim // 2), B)
    to = (part.to(tl.int64) * n_heads + head) * n_queries + query
    top, total, sums = nothing_seen(B.rows, B.wide)
    inside = held[:, None] & (column < B.dim)[None, :]
    if goes_on != 0:
        top = tl.load(state[0] + to, mask=held, other=0.0)
        total = tl.load(state[1] + to, mask=held, other=0.0)
        sums = tl.load(state[2] + to[:, None] * B.dim + column[None, :], mask=inside, other=0.0)

    slot, stop = query * 0 + part * piece, tl.where(held, tl.minimum(n_slots, part * piece + piece), 0)
    j, n, half = tl.arange(0, CHUNKS), tl.arange(0, B.keys), tl.arange(0, B.half)
    tiles, n_left = index + group.to(tl.int64) * strides[3], tl.max(stop - slot, 0)
    while n_left > 0:
        at = slot[:, None] + j[None, :]
        ids = tl.load(ids_at[:, None] + at.to(tl.int64) * strides[2], mask=at < stop[:, None], other=-1).to(tl.int32)
        is_first = (ids >= 0) & (tl.cumsum((ids >= 0).to(tl.int32), 1) == 1)
        chunk = tl.min(tl.min(tl.where(is_first, ids, NONE), 1), 0)
        base = chunk // CHUNKS * CHUNKS
        near = (ids >= base) & (ids - base < CHUNKS)
        passed = (
            tl.cumsum(((ids >= 0) & ~near).to(tl.int32), 1) == 0
        )  # the step takes a list's entries up to another chunk
        bits = tl.sum(tl.where(near & passed, 1 << tl.where(near, ids - base, 0), 0), 1)
        taken = slot
        slot += tl.sum(passed.to(tl.int32), 1)
        n_left = tl.max(stop - slot, 0)
        if chunk != NONE:
            if CHUNKS > 1:
                seen = ((bits[:, None] >> (n // size)[None, :]) & 1) == 1
                wanted = tl.max(seen.to(tl.int32), 0) == 1
                tile = tl.load(tiles + base + n // size, mask=wanted, other=-1)
                there, row_of = tile >= 0, (n % size).to(tl.int64)
                inner = there[:, None] & (half < B.dim // 2)[None, :]
                key_at = k.at + (tile * k.head + row_of * k.row)[:, None] + half[None, :]
                value_at = v.at + (tile * v.head + row_of * v.row)[:, None] + column[None, :]
                first, second = (
                    tl.load(key_at, mask=inner, other=0.0),
                    tl.load(key_at + B.dim // 2, mask=inner, other=0.0),
                )
                values = tl.load(value_at, mask=there[:, None] & (column < B.dim)[None, :], other=0.0)
                scores = tl.dot(queries[0], tl.trans(first), input_precision=B.precision)
                scores = tl.dot(queries[1], tl.trans(second), scores, input_precision=B.precision)
                scores = tl.where(seen & there[None, :], scores, float("-inf"))
                top, total, sums = weigh(scores, values, (top, total, sums), scale, B)
            else:
                tile = tl.load(tiles + chunk)
                if tile >= 0:
                    if not ONE:
                        entry = tl.load(turn_at + taken.to(tl.int64) * strides[5], mask=bits == 1, other=0)
                        queries = load_turned(q.at, q_at, bits == 1, turn, entry * (B.dim // 2), B)
                    keys, values = (k.at + tile * k.head, k.row), (v.at + tile * v.head, v.row)
                    span = (query * 0, tl.where(bits == 1, size, 0))
                    before = top, total, sums
                    top, total, sums = attend_keys(queries, keys, values, (0, size), span, before, scale, B, True)
    numbers, whole = finish((top, total, sums))
    tl.store(out + to[:, None] * B.dim + column[None, :], numbers.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + to, whole, mask=held)
    tl.store(state[0] + to, top, mask=held)
    tl.store(state[1] + to, total, mask=held)
    tl.store(state[2] + to[:, None] * B.dim + column[None, :], sums, mask=inside)
