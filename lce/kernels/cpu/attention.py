"""Attention on CPUs, in prefill and decode: of queries to all keys, or of each query to its chosen tiles.

A tile is the keys and values of one chunk of one KV head. Threads take tasks from a queue, and `rows.attend_rows`
computes a task. Only shapes and chosen tiles determine the tasks, so a result's bits do not depend on the number of
threads.
"""

from __future__ import annotations

import math
from array import array

import numpy as np
import torch
from numba import carray, float32, int64
from torch import Tensor

from lce.kernels.cpu.compiling import Kernel, argument_of, arguments, by_dtype, call, inner
from lce.kernels.cpu.numbers import exp2, itemsize, pointer, read, stored, write
from lce.kernels.cpu.rows import LOWEST, attend_rows, finish, put_query, scratch, scratch_size
from lce.kernels.cpu.vectors import take

ROWS = 96  # the most queries (of all heads) in a task; with so many, packing keys costs little beside the products
FEW = 32  # if a KV head has at most FEW queries (of all its heads), its keys are cut into pieces of PIECE keys
PIECE = 512  # keys of a piece; if a KV head has more than FEW and at most ROWS queries, a piece has 8 times as many
_SLOT_ROWS = 64  # the smallest number of queries that a thread of `merge_slots` takes


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None, cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention of queries `q [H, T, D]` to keys and values `k v [G, N, D]`.

    Returns the output `[H, T, D]` and each query's log-sum-exp `[H, T]` (float32). H / G query heads share a KV head.
    The tensors are on the CPU, of one dtype, with a contiguous last dimension. With `causal`, query t sees the keys up
    to `N - T + t`, so the last query sees the last key; `window` limits each query to its nearest `window` keys. If
    given, `cos sin [T, D/2]` rotate the queries. Keys are read once per `ROWS` queries of the heads that share keys.
    Time: O(H · T · N · D). Memory: about a megabyte per thread.
    """
    (n_heads, n_queries, dim), (groups, n_keys, _) = q.shape, k.shape
    rep, (q_head, q_row, q_one) = n_heads // groups, q.stride()
    (k_group, k_row, k_one), (v_group, v_row, v_one) = k.stride(), v.stride()
    assert k.shape == v.shape == (groups, n_keys, dim), (k.shape, v.shape)
    assert q_one == k_one == v_one == 1, (q_one, k_one, v_one)
    assert n_heads == rep * groups, (n_heads, groups)
    assert q.dtype is k.dtype is v.dtype, (q.dtype, k.dtype, v.dtype)
    cos_at, sin_at = 0, 0
    if cos is not None and sin is not None:
        assert cos.shape == sin.shape == (n_queries, dim // 2), (cos.shape, sin.shape)
        assert cos.dtype is sin.dtype is q.dtype, (cos.dtype, sin.dtype)
        cos, sin = cos.contiguous(), sin.contiguous()
        cos_at, sin_at = cos.data_ptr(), sin.data_ptr()
    out, lse = torch.empty(n_heads, n_queries, dim, dtype=q.dtype), torch.empty(n_heads, n_queries)
    n_rows, per_block, piece, n_pieces = rep * n_queries, n_queries, n_keys, 1
    if n_rows > ROWS:
        per_block = max(1, ROWS // rep)
    else:
        piece = PIECE if n_rows <= FEW else 8 * PIECE
        n_pieces = -(-n_keys // piece)
    n_tasks = groups * -(-n_queries // per_block) * n_pieces
    partial = torch.empty(n_tasks * n_rows * (dim + 17)) if n_pieces > 1 else out  # unused with one piece
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), cos_at, sin_at, out.data_ptr(), lse.data_ptr()
    sizes = groups, rep, n_queries, n_keys, dim, causal, n_keys if window is None else window, per_block, piece
    strides = q_head, q_row, k_group, k_row, v_group, v_row
    kernels, queues = (_steepness(dim), attend_rows[q.dtype].address), [0] * (1 + groups)
    given = array("q", (*addresses, *sizes, *strides, *kernels, partial.data_ptr(), *queues))
    _attend[q.dtype](n_tasks, given.buffer_info()[0])
    return out, lse


def attend_tiles(
    q: Tensor, cos: Tensor, sin: Tensor, tile: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Compute attention of A = H · T · K rows, each to one of E tiles of L keys and values, `k v [E, L, D]`.

    Row `a = (h·T + t)·K + s` is query `q[h, t]` of `q [H, T, D]`, rotated by `cos[t, s]` and `sin[t, s]`. The row
    attends tile `tile[a]`, the s-th of the query's K tiles; `tile [A]` is int64. `cos sin` are `[T, K, D/2]`, or
    `[T, 1, D/2]` if all K are the same. Writes `out [A, D]` and log-sum-exps `lse [A]` (float32), except for rows whose
    tile is -1. A tile is packed once per `ROWS` rows that attend it. Time: O(A · L · D), and a sort of A numbers.
    """
    n_heads, n_queries, dim = q.shape
    n_slots = tile.numel() // (n_heads * n_queries)
    n_tiles, size = k.shape[:2]
    assert k.shape == v.shape == (n_tiles, size, dim)
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    cos, sin = (x.expand(n_queries, -1, -1).contiguous() for x in (cos, sin))
    n_turns = cos.shape[1]
    fits = cos.shape == sin.shape == (n_queries, n_turns, dim // 2) and n_turns in (1, n_slots)
    assert fits, (cos.shape, sin.shape, n_slots)
    fits = out.shape == (tile.numel(), dim) and all(x.is_contiguous() for x in (tile, out, lse))
    assert fits, (tile.shape, out.shape)
    assert tile.dtype == torch.int64
    assert cos.dtype == sin.dtype == q.dtype == out.dtype
    addresses = (x.data_ptr() for x in (q, cos, sin, tile, k, v, out, lse))
    sizes = n_heads, n_queries, n_slots, n_turns, n_tiles, size, dim
    strides = (stride for x in (q, k, v) for stride in x.stride()[:2])
    given = array("q", (*addresses, *sizes, *strides, _steepness(dim), attend_rows[q.dtype].address, 0))
    _attend_tiles[q.dtype](tile.numel(), given.buffer_info()[0])


def merge_slots(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge each query's attention to K tiles, `out [H, T, K, D]` and `lse [H, T, K]`, into one softmax.

    `lse` are log-sum-exps (float32), and both tensors are contiguous. Returns `[H, T, D]` and `[H, T]`. The output for
    a tile is not read if its log-sum-exp is -inf. Time: O(H · T · K · D).
    """
    *shape, n_slots, dim = out.shape
    fits = lse.shape == out.shape[:-1] and lse.dtype == torch.float32 and out.is_contiguous() and lse.is_contiguous()
    assert fits, (out.shape, lse.shape, lse.dtype)
    merged, total = torch.empty(*shape, dim, dtype=out.dtype), torch.empty(*shape)
    addresses = out.data_ptr(), lse.data_ptr(), merged.data_ptr(), total.data_ptr()
    _merge_slots[out.dtype](total.numel(), *addresses, n_slots, dim, least=_SLOT_ROWS)
    return merged, total


def _steepness(dim: int) -> int:
    """Return `log2(e) / √dim`, encoded by `argument_of`: a dot product times that is a score; weights are 2^score."""
    return argument_of(1 / math.sqrt(dim) * 1.4426950408889634)


@by_dtype(inner)
def _merge_pieces(states, partial, dim):
    """Merge results for n pieces of keys into piece 0: `states [n, 2]` (top score, weights' sum), `partial [n, D]`."""
    top = LOWEST
    for part in range(len(states)):
        top = max(top, states[part, 0])
    for part in range(1, len(states)):
        shrink = exp2(states[part, 0] - top)
        if part == 1:
            own = exp2(states[0, 0] - top)
            states[0, 1] *= own
            for d in range(dim):
                partial[0, d] *= own
        states[0, 1] += states[part, 1] * shrink
        for d in range(dim):
            partial[0, d] += partial[part, d] * shrink
    states[0, 0] = top


@by_dtype(Kernel)
def _attend(_first, _stop, args):
    q_at, k_at, v_at, cos_at, sin_at, out_at, lse_at = arguments(args, 7)
    groups, rep, n_queries, n_keys, dim, causal, window, per_block, piece = arguments(args + 56, 9)
    q_head, q_row, k_group, k_row, v_group, v_row, steepness, rows_at, partial_at = arguments(args + 128, 9)
    queue, done = args + 200, args + 208  # addresses: the next task's number, and each KV head's count of done pieces
    out = carray(pointer(out_at, stored), (groups * rep * n_queries, dim))
    lse = carray(pointer(lse_at, float32), (groups * rep * n_queries,))
    n_blocks, n_pieces = (n_queries + per_block - 1) // per_block, (n_keys + piece - 1) // piece
    n_tasks, n_rows = groups * n_blocks * n_pieces, rep * per_block
    wide = (dim + 15) // 16 * 16
    partial = carray(pointer(partial_at, float32), (groups, n_rows, n_pieces, wide))
    states_at = partial_at + 4 * n_tasks * n_rows * wide
    states = carray(pointer(states_at, float32), (groups, n_rows, n_pieces, 2))
    memory, given = np.empty(scratch_size(n_rows, dim), np.float32), np.empty(9, np.int64)
    queries, spans, state, sums, _, _, _, _ = scratch(memory.ctypes.data, n_rows, dim)
    given[0], given[1], given[2], given[8] = memory.ctypes.data, n_rows, dim, steepness
    given[5], given[7] = k_row * itemsize, v_row * itemsize
    while True:
        task = take(queue)
        if task >= n_tasks:
            break
        group, block, part = task // (n_blocks * n_pieces), task // n_pieces % n_blocks, task % n_pieces
        if causal:  # the last queries see the most keys, so their tasks start first
            block = n_blocks - 1 - block
        first_query = block * per_block
        n = min(per_block, n_queries - first_query)
        first, stop = part * piece, min(n_keys, part * piece + piece)
        if causal:
            behind = n_keys - n_queries + first_query
            first, stop = max(first, behind - window + 1), min(stop, behind + n)
        for row in range(rep * n):
            head, query = row // n, first_query + row % n
            at = q_at + ((group * rep + head) * q_head + query * q_row) * itemsize
            turn, turned, to = query * (dim // 2) * itemsize, cos_at != 0, queries[row].ctypes.data
            put_query(at, cos_at + turn if turned else at, sin_at + turn if turned else at, dim, turned, to)
            seen = n_keys - n_queries + query + 1 if causal else n_keys
            spans[row, 0], spans[row, 1] = max(seen - window, 0) if causal else 0, seen
            state[row, 0], state[row, 1] = LOWEST, 0
            sums[row] = 0
        given[3], given[4] = rep * n, k_at + group * k_group * itemsize
        given[6] = v_at + group * v_group * itemsize
        call(rows_at, first, stop, given.ctypes.data)
        for row in range(rep * n):
            if n_pieces > 1:
                states[group, row, part, 0], states[group, row, part, 1] = state[row, 0], state[row, 1]
                for d in range(wide):
                    partial[group, row, part, d] = sums[row, d]
            else:
                at = (group * rep + row // n) * n_queries + first_query + row % n
                finish(state[row], sums[row], out, lse, at, dim)
        if n_pieces > 1 and take(done + 8 * group) == n_pieces - 1:  # all other pieces of this KV head are done
            for row in range(n_rows):
                _merge_pieces(states[group, row], partial[group, row], dim)
                finish(states[group, row, 0], partial[group, row, 0], out, lse, group * n_rows + row, dim)
    memory[0] = 0  # keeps the memory alive up to here: Numba frees an array after its last use


@by_dtype(Kernel)
def _attend_tiles(_first, _stop, args):
    q_at, cos_at, sin_at, tile_at, k_at, v_at, out_at, lse_at = arguments(args, 8)
    n_heads, n_queries, n_slots, n_turns, n_tiles, size, dim = arguments(args + 64, 7)
    q_head, q_row, k_tile, k_row, v_tile, v_row, steepness, rows_at = arguments(args + 120, 8)
    queue, n_rows = args + 184, n_heads * n_queries * n_slots
    tile = carray(pointer(tile_at, int64), (n_rows,))
    out = carray(pointer(out_at, stored), (n_rows, dim))
    lse = carray(pointer(lse_at, float32), (n_rows,))
    order = _sorted_rows(tile, n_tiles)  # row numbers; each thread sorts all of them
    tasks = np.empty(len(order) + 1, np.int64)  # the index in `order` of each task's first row
    n_tasks, begin = 0, 0
    for i in range(len(order)):
        if i == 0 or tile[order[i]] != tile[order[i - 1]] or i - begin == ROWS:
            tasks[n_tasks] = begin = i
            n_tasks += 1
    tasks[n_tasks] = len(order)
    memory, given = np.empty(scratch_size(ROWS, dim), np.float32), np.empty(9, np.int64)
    queries, spans, state, sums, _, _, _, _ = scratch(memory.ctypes.data, ROWS, dim)
    given[0], given[1], given[2], given[8] = memory.ctypes.data, ROWS, dim, steepness
    given[5], given[7] = k_row * itemsize, v_row * itemsize
    while True:
        task = take(queue)
        if task >= n_tasks:
            break
        first, n = tasks[task], tasks[task + 1] - tasks[task]
        for i in range(n):
            row = order[first + i]
            query, slot = row // n_slots, row % n_slots
            head, query = query // n_queries, query % n_queries
            at = q_at + (head * q_head + query * q_row) * itemsize
            turn = (query * n_turns + slot % n_turns) * (dim // 2) * itemsize
            put_query(at, cos_at + turn, sin_at + turn, dim, True, queries[i].ctypes.data)
            spans[i, 0], spans[i, 1] = 0, size
            state[i, 0], state[i, 1] = LOWEST, 0
            sums[i] = 0
        which = tile[order[first]]
        given[3], given[4], given[6] = n, k_at + which * k_tile * itemsize, v_at + which * v_tile * itemsize
        call(rows_at, 0, size, given.ctypes.data)
        for i in range(n):
            finish(state[i], sums[i], out, lse, order[first + i], dim)
    memory[0] = 0  # keeps the memory alive up to here: Numba frees an array after its last use


@inner
def _sorted_rows(tile, n_tiles):
    """Return the numbers of the rows whose tile is not -1, sorted by tile: a stable radix sort with 11-bit digits."""
    n = 0
    for row in range(len(tile)):
        n += tile[row] >= 0
    order, spare, starts = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(2049, np.int64)
    n = 0
    for row in range(len(tile)):
        if tile[row] >= 0:
            order[n] = row
            n += 1
    shift = 0
    while (n_tiles - 1) >> shift:
        starts[:] = 0
        for i in range(n):
            starts[(tile[order[i]] >> shift & 2047) + 1] += 1
        for digit in range(2048):
            starts[digit + 1] += starts[digit]
        for i in range(n):
            digit = tile[order[i]] >> shift & 2047
            spare[starts[digit]] = order[i]
            starts[digit] += 1
        order, spare = spare, order
        shift += 11
    return order


@by_dtype(Kernel)
def _merge_slots(first, stop, out_at, lse_at, merged_at, total_at, n_slots, dim):
    out = carray(pointer(out_at, stored), (stop, n_slots, dim))
    lse = carray(pointer(lse_at, float32), (stop, n_slots))
    merged = carray(pointer(merged_at, stored), (stop, dim))
    total = carray(pointer(total_at, float32), (stop,))
    per_log2, sums = np.float32(1.4426950408889634), np.empty(dim, np.float32)
    for row in range(first, stop):
        top = np.float32(-np.inf)
        for slot in range(n_slots):
            top = max(top, lse[row, slot])
        sums[:] = 0
        weights = np.float32(0)
        for slot in range(n_slots):
            if lse[row, slot] == -np.inf:
                continue
            weight, part = exp2((lse[row, slot] - top) * per_log2), out[row, slot]
            weights += weight
            for d in range(dim):
                sums[d] += weight * read(part[d])
        share = np.float32(1) / weights if weights != 0 else np.float32(0)
        for d in range(dim):
            merged[row, d] = write(sums[d] * share)
        total[row] = top + np.log(weights) if weights != 0 else np.float32(-np.inf)
