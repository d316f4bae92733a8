"""Scores and choices of chunks on GPUs; the host never waits for the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from lce.kernels.rows.rows_triton import heads as vectors_of
from lce.kernels.runtime.launching import ALIGNED, MOST_CHUNKS, Rows, launch

_ALIGN = tl.constexpr(ALIGNED)
_TILE = 1 << 13  # numbers of chunk summaries that a program of `_score` reads at a time
_WARP = 512  # chunks per warp of a program of `_choose`
_LARGEST = (64, 512, 4096, 8192, MOST_CHUNKS)  # `_choose` is compiled for each of these maximal numbers of chunks


def best_chunks(scores: Tensor, forced: Tensor, n: int, start: int | Tensor, size: int) -> Tensor:
    """Choose the n best of M chunks for each query, as `lce.kernels.choose.choices.best_chunks` does.

    M is at most `MOST_CHUNKS`. `start` is the first query's index, or has each query's, `[T]` int64 on the device.
    Scores and `forced` of a query's own chunk and of later chunks are not read. One launch, with at most 32 passes over
    sort keys in registers.
    """
    fits = forced.dtype == torch.bool and forced.shape == scores.shape[1:]
    assert fits, (forced.dtype, forced.shape, scores.shape)
    chosen = torch.empty(*scores.shape[:2], min(n, scores.shape[2]), dtype=torch.int64, device=scores.device)
    if chosen.shape[2]:
        _choose_into((chosen,), scores, forced, n, start, size, 0, 0, False)
    return chosen


def scores_of_few(q: Tensor, keys: Tensor) -> Tensor:
    """Return the float32 dot products `[H, T, M]` of a few queries `q [H, T, D]` with `keys [S, M, D]`.

    H / S neighbouring query heads share a row of keys. If `keys` is `[S, M, 2, D]` (the minimum and maximum of each
    channel for M pages), the result is `Σ_d max(q_d · min_d, q_d · max_d)`. One launch. Bytes moved: the keys once from
    memory, and once from the cache for each further query and head.
    """
    fits = len(q) % len(keys) == 0 and keys.shape[-1] == q.shape[-1]
    assert fits, (q.shape, keys.shape)
    return _scored(q, keys, len(q))


def best_runs(
    q: Tensor,
    summaries: Rows,
    position: Tensor,
    size: int,
    n: int,
    *,
    choosers: int | None = None,
    n_first: int = 0,
    n_last: int = 0,
    least: bool = False,
    own: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose the n best of M chunks for the queries `q [H, B, D]` of a decode step, as runs of tokens.

    Returns the first token and the number of tokens of each run, `[C, B, runs]` (int64) each, for C choosers.
    `summaries [S, M, D]`, or those of B contexts, have a vector for each chunk; head h is scored by its dot products
    with row `h · S // H`. If `summaries` is `[S, M, 2, D]`, the minimum and maximum of each channel, the score is `Σ_d
    max(q_d · min_d, q_d · max_d)`. A chooser is `H / C` neighbouring heads, whose scores are summed; C = `choosers` is
    H (the default), the number of KV heads, or 1. `least` chooses the chunks with the smallest scores.

    `position [B]` (int64, on the device) is a query's index, and `position // size` its own chunk. Only chunks before
    the own chunk are chosen; later rows of `summaries` are not read, so M may be a buffer's capacity. The first
    `n_first` and the last `n_last` of these chunks are always chosen, together at most n. There are `min(n, M)` runs in
    the order of the text; empty runs (0 and 0) come last. With `own`, one more run is the own chunk up to the query.

    Two launches. Bytes moved: the summaries once.
    """
    heads = len(q)
    choosers = heads if choosers is None else choosers
    fits = heads % choosers == 0 and heads % summaries.shape[0] == 0 and summaries.shape[-1] == q.shape[-1]
    assert fits, (q.shape, summaries.shape, choosers)
    fits = position.dtype == torch.int64 and position.numel() == q.shape[1] and min(n, summaries.shape[1]) > 0
    assert fits, (position.dtype, position.shape, n, summaries.shape)
    scores = _scored(q, summaries, choosers, position, size, least)
    first = torch.empty(*scores.shape[:2], min(n, summaries.shape[1]) + own, dtype=torch.int64, device=q.device)
    count = first.new_empty(first.shape)
    _choose_into((first, count), scores, None, n, position, size, n_first, n_last, own)
    return first, count


def runs_of_chunks(chosen: Tensor, size: int, position: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convert chunk ids `chosen [C, B, K]` (int64, -1 for none) to runs of tokens: first tokens and counts, alike.

    A chunk has `size` tokens. With the queries' indices `position [B]` (int64), one more run is a query's own chunk up
    to the query: `[C, B, K + 1]`.
    """
    fits = chosen.dtype == torch.int64 and (position is None or position.dtype == torch.int64)
    assert fits, (chosen.dtype, position)
    chosen, (n_choosers, n_queries, n) = chosen.contiguous(), chosen.shape
    first = chosen.new_empty(n_choosers, n_queries, n + (position is not None))
    count = first.new_empty(first.shape)
    own, block = () if position is None else (position,), triton.next_power_of_2(first.shape[2])
    grid, sizes = (n_choosers * n_queries,), (n, size, n_queries)
    launch(_runs, grid, chosen, own, first, count, sizes, BLOCK=block, num_warps=1)
    return first, count


def _scored(
    q: Tensor, keys: Rows, choosers: int, position: Tensor | None = None, size: int = 1, least: bool = False
) -> Tensor:
    """Return scores `[C, T, M]` of M keys for T queries, each the sum over one of C groups of heads.

    With `position [T]`, only chunks before a query's own chunk are scored. The keys of `LaneRows` are a query's own.
    """
    (heads, n, dim), n_keys, together, bounds = q.shape, keys.shape[1], len(q) // choosers, len(keys.shape) == 4
    q = q if q.stride(2) == 1 else q.contiguous()
    if isinstance(keys, Tensor):
        dense = keys.stride(-1) == 1 and (not bounds or (keys.shape[2] == 2 and keys.stride(2) == dim))
        keys = keys if dense else keys.contiguous()
    assert isinstance(keys, Tensor) or keys.dtype is q.dtype, (keys.dtype, q.dtype)
    out = torch.empty(choosers, n, n_keys, dtype=torch.float32, device=q.device)
    width = triton.next_power_of_2(dim)
    block = max(16, min(64, _TILE // width) // min(4, triton.next_power_of_2(together)))
    grid, at = (triton.cdiv(n_keys, block), choosers * n), () if position is None else (position,)
    constants = {"HEADS": (together, heads // keys.shape[0]), "SCORE": (bounds, least)}
    given = vectors_of(q), vectors_of(keys), out, at, (n_keys, n, size), dim
    launch(_score, grid, *given, **constants, BLOCK=block, DIM=width)
    return out


def _choose_into(
    into: tuple[Tensor, ...], scores: Tensor, forced: Tensor | None, n: int, start: int | Tensor, size: int, *keep: int
) -> None:
    """Choose up to n ≥ 1 of M ≥ 1 chunks by `scores [C, T, M]`; write ids into one tensor, or runs into two.

    The numbers of `keep` say how many first chunks and how many last chunks before the query's own chunk to always
    choose, and whether to choose the own chunk (as a further run).
    """
    choosers, n_queries, n_chunks = scores.shape
    fits = n_chunks <= MOST_CHUNKS and scores.is_contiguous() and (forced is None or forced.is_contiguous())
    assert fits, (scores.shape, scores.stride())
    assert not isinstance(start, Tensor) or start.numel() == n_queries, (start, scores.shape)
    block = next(size for size in _LARGEST if n_chunks <= size)
    slots, n = min(block, triton.next_power_of_2(n)), min(n, n_chunks)
    n_rows, rows = choosers * n_queries, max(1, _WARP // block)
    must = () if forced is None else (forced.view(torch.uint8),)
    at, index = ((start,), 0) if isinstance(start, Tensor) else ((), start)
    sizes = index, n_rows, n_queries, n_chunks, size, n
    blocks = {"ROWS": rows, "BLOCK": block, "SLOTS": slots, "num_warps": max(1, min(16, block // _WARP))}
    launch(_choose, (triton.cdiv(n_rows, rows),), scores, must, into, at, sizes, KEEP=keep, **blocks)


@triton.jit(do_not_specialize=["sizes"])
def _score(q, keys, out, position, sizes, dim, HEADS: constexpr, SCORE: constexpr, BLOCK: constexpr, DIM: constexpr):
    """Score BLOCK chunks for one chooser and query; the D numbers of a vector are padded to DIM.

    HEADS: how many heads' scores are summed, and how many heads share a row of summaries. SCORE: whether summaries are
    the minimum and maximum of keys, and whether the smallest score is the best.
    """
    n_keys, n, size = sizes
    seen = n_keys
    first = tl.program_id(0) * BLOCK
    chooser, query = tl.program_id(1) // n, tl.program_id(1) % n
    if len(position):
        seen = tl.minimum(tl.load(position[0] + query) // size, n_keys).to(tl.int32)
    i = first + tl.arange(0, BLOCK)
    j = tl.arange(0, DIM)
    if first < seen:
        total = tl.zeros((BLOCK,), tl.float32)
        there = (i < seen)[:, None] & (j < dim)[None, :]
        for h in range(HEADS[0]):
            head = (chooser * HEADS[0] + h).to(tl.int64)
            vector = tl.load(q.at + head * q.head + query * q.row + j, mask=j < dim, other=0.0).to(tl.float32)
            if len(keys) == 2:
                at = tl.load(keys[0] + query * keys[1] + head // HEADS[1]).to(q.at.dtype)
                row = (1 + SCORE[0]) * dim
                at = tl.multiple_of(at, _ALIGN) + i.to(tl.int64)[:, None] * row + j[None, :]
            else:
                at = keys[0] + head // HEADS[1] * keys[1] + i.to(tl.int64)[:, None] * keys[2] + j[None, :]
            some = tl.load(at, mask=there, other=0.0).to(tl.float32) * vector[None, :]
            if SCORE[0]:
                more = tl.load(at + dim, mask=there, other=0.0).to(tl.float32) * vector[None, :]
                some = tl.maximum(some, more)
            total += tl.sum(some, 1)
        if SCORE[1]:
            total = -total
        tl.store(out + tl.program_id(1).to(tl.int64) * n_keys + i, total, mask=i < seen)


@triton.jit(do_not_specialize=["sizes"])
def _choose(scores, forced, into, start, sizes, ROWS: constexpr, BLOCK: constexpr, SLOTS: constexpr, KEEP: constexpr):
    """Choose for ROWS queries among up to BLOCK chunks; write ids to `into[0]`, or runs to `into[0]` and `into[1]`.

    Sort keys are unsigned integers in the order of the scores; a chunk that cannot be taken has the sort key 0. The
    n-th largest sort key, `worst`, is found bit by bit from the highest: it is the largest number such that at least n
    sort keys are ≥ `worst`. If fewer than n chunks can be taken, `worst` is 0, and all of them are taken.
    """
    first_index, n_rows, n_queries, n_chunks, size, n = sizes
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    query = row % n_queries
    index = tl.load(start[0] + query, mask=row < n_rows, other=0) if len(start) else first_index + query
    own = index // size
    i = tl.arange(0, BLOCK)[None, :]
    seen = (i < tl.minimum(own, n_chunks)[:, None]) & (row < n_rows)[:, None]
    score = tl.load(scores + row[:, None] * n_chunks + i, mask=seen, other=0.0).to(tl.float32)
    bits = score.to(tl.uint32, bitcast=True)
    key = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    key = tl.where(bits == 0xFF800000, 0, key)  # a chunk with the score -inf cannot be taken
    key = tl.where(score != score, 0xFFFFFFFE, key)
    taken_first = (i < 0) & seen
    if KEEP[0]:
        taken_first = taken_first | (i < KEEP[0])
    if KEEP[1]:
        taken_first = taken_first | (i >= own[:, None] - KEEP[1])
    if len(forced):
        named = tl.load(forced[0] + query[:, None] * n_chunks + i, mask=seen, other=0)
        taken_first = taken_first | (named != 0)
    key = tl.where(taken_first, 0xFFFFFFFF, key)
    key = tl.where(seen, key, 0).to(tl.uint32)

    worst = tl.zeros((ROWS,), tl.uint32)
    n_best = tl.where(row < n_rows, -1, n)
    bit = tl.full((), 0x80000000, tl.uint32)
    n_left = tl.full((), 1, tl.int32)
    while (bit != 0) & (n_left != 0):
        count = tl.sum((key >= (worst | bit)[:, None]).to(tl.int32), 1)
        n_best = tl.where(count >= n, count, n_best)
        worst = tl.where(count >= n, worst | bit, worst)
        n_left = tl.sum((n_best != n).to(tl.int32), 0)
        bit = bit >> 1
    above = key > worst[:, None]
    equal = (key == worst[:, None]) & (key != 0)
    n_skipped = tl.sum((above | equal).to(tl.int32), 1) - n
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32), 1) > n_skipped[:, None]))

    width = n + 1 if KEEP[2] else n
    to = row[:, None] * width
    slot = to + tl.cumsum(taken.to(tl.int32), 1) - 1
    found = tl.broadcast_to(i, (ROWS, BLOCK)).to(tl.int64)
    slots = tl.arange(0, SLOTS)[None, :]
    empty = (slots >= tl.sum(taken.to(tl.int32), 1)[:, None]) & (slots < n) & (row < n_rows)[:, None]
    if len(into) == 2:
        zero = tl.zeros((ROWS, SLOTS), tl.int64)
        tl.store(into[0] + slot, found * size, mask=taken)
        tl.store(into[1] + slot, found * 0 + size, mask=taken)
        tl.store(into[0] + to + slots, zero, mask=empty)
        tl.store(into[1] + to + slots, zero, mask=empty)
        if KEEP[2]:
            tl.store(into[0] + row * width + n, own * size, mask=row < n_rows)
            tl.store(into[1] + row * width + n, index % size + 1, mask=row < n_rows)
    else:
        tl.store(into[0] + slot, found, mask=taken)
        tl.store(into[0] + to + slots, tl.full((ROWS, SLOTS), -1, tl.int64), mask=empty)


@triton.jit(do_not_specialize=["sizes"])
def _runs(chosen, position, first, count, sizes, BLOCK: constexpr):
    n, size, n_queries = sizes
    i, row = tl.arange(0, BLOCK), tl.program_id(0)
    chunk = tl.load(chosen + row * n + i, mask=i < n, other=-1)
    start, number = chunk * size, tl.where(chunk < 0, 0, size).to(tl.int64)
    width = n
    if len(position):
        at = tl.load(position[0] + row % n_queries)
        own = at // size * size
        start, number = tl.where(i == n, own, start), tl.where(i == n, at + 1 - own, number)
        width = n + 1
    to = row * width + i
    tl.store(first + to, start, mask=i < width)
    tl.store(count + to, number, mask=i < width)
