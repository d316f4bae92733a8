"""Attention on CPUs, for prefill and decode: dense, and over chosen tiles. `rows` has the work of a task.

The work is cut into tasks by the shapes alone, and threads take tasks from a queue: the bits of a result do not depend
on their number.
"""

from __future__ import annotations

import math
from functools import cache

import numba
import numpy as np
import torch
from numba import carray, float32, int64
from torch import Tensor

from lce.kernels.cpu.compiling import Kernel, inner, kernel, n_threads
from lce.kernels.cpu.numbers import READ, STORED, WRITE, exp2, pointer
from lce.kernels.cpu.rows import LOWEST, core, scratch, scratch_size
from lce.kernels.cpu.vectors import take

ROWS = 96  # queries of a task: packing keys costs little beside their products
FEW = 32  # up to here a problem's keys are divided among tasks
PIECE = 512  # keys of such a task, and of others 8 times as many


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None, cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend `k v [G, N, D]` with `q [H, T, D]`: `out [H, T, D]`, `lse [H, T]` (float32); H / G query heads share a KV
    head.

    Of one dtype, on the CPU, the last dimension contiguous. Causal: the last query sees the last key; with `window` a
    query sees its nearest `window` keys at most. Query t is turned by `cos sin [t]`, `[T, D/2]`, on its way. Keys are
    read once for each `ROWS` queries of all heads that share them. Time: O(H · T · N · D). Bytes: about a megabyte a
    thread.
    """
    (n_heads, n_queries, dim), (groups, n_keys, _) = q.shape, k.shape
    rep, (q_head, q_row, q_one), (k_group, k_row, k_one) = n_heads // groups, q.stride(), k.stride()
    v_group, v_row, v_one = v.stride()
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
    _attend(q.dtype)(
        q.data_ptr(), rep * q_head, q_head, q_row, cos_at, sin_at, k.data_ptr(), k_group, k_row, v.data_ptr(), v_group,
        v_row, out.data_ptr(), lse.data_ptr(), groups, rep, n_queries, n_keys, dim, causal,
        n_keys if window is None else window, 1 / math.sqrt(dim), n_threads(),
    )  # fmt: skip
    return out, lse


def attend_tiles(
    q: Tensor, cos: Tensor, sin: Tensor, tile: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Attend chosen tiles. Row `a = (h·T + t)·K + s` is `q[h, t]` turned by `cos sin [t, s]`, and sees tile `tile[a]`
    of `k v`.

    `q [H, T, D]`, `cos sin [T, K, D/2]` or `[T, 1, D/2]` of one dtype, `tile [A]` int64, -1 for none, `k v [E, L, D]`.
    Writes `out [A, D]` and `lse [A]` (float32) where there is a tile. Each tile is packed once for every `ROWS` rows
    that chose it. Time: O(A · L · D), and a sort of A numbers.
    """
    n_heads, n_queries, dim = q.shape
    n_slots = tile.numel() // (n_heads * n_queries)
    n_tiles, size = k.shape[:2]
    assert k.shape == v.shape == (n_tiles, size, dim)
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    cos, sin = (x.expand(n_queries, -1, -1).contiguous() for x in (cos, sin))
    assert cos.shape == sin.shape == (n_queries, cos.shape[1], dim // 2)
    assert cos.shape[1] in (1, n_slots)
    assert tile.dtype == torch.int64
    assert out.shape == (tile.numel(), dim)
    assert all(x.is_contiguous() for x in (tile, out, lse))
    assert cos.dtype == sin.dtype == q.dtype == out.dtype
    _attend_tiles(q.dtype)(
        q.data_ptr(), q.stride(0), q.stride(1), cos.data_ptr(), sin.data_ptr(), cos.shape[1], tile.data_ptr(),
        k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0), v.stride(1), out.data_ptr(), lse.data_ptr(),
        n_heads, n_queries, n_slots, n_tiles, size, dim, 1 / math.sqrt(dim), n_threads(),
    )  # fmt: skip


def merge_slots(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge `out [H, T, K, D]`, `lse [H, T, K]` into one softmax over K: `[H, T, D]` and `[H, T]`. Time: O(H · T · K ·
    D).
    """
    *shape, n_slots, dim = out.shape
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32
    assert lse.shape == out.shape[:-1]
    merged, total = torch.empty(*shape, dim, dtype=out.dtype), torch.empty(*shape)
    _merge_slots(out.dtype)(
        out.data_ptr(), lse.data_ptr(), merged.data_ptr(), total.data_ptr(), total.numel(), n_slots, dim
    )
    return merged, total


@cache
def _attend(dtype: torch.dtype) -> Kernel:
    stored, itemsize = STORED[dtype], dtype.itemsize
    put_query, attend_rows, finish, per_word = core(dtype)

    @kernel(f"void({'intp, ' * 21}float64, intp)")
    def compiled(
        q_at, q_group, q_head, q_row, cos_at, sin_at, k_at, k_group, k_row, v_at, v_group, v_row, out_at, lse_at,
        groups, rep, n_queries, n_keys, dim, causal, window, scale, n_workers,
    ):  # fmt: skip
        out = carray(pointer(out_at, stored), (groups * rep * n_queries, dim))
        lse = carray(pointer(lse_at, float32), (groups * rep * n_queries,))
        steepness = np.float32(scale * 1.4426950408889634)
        per_block = max(1, ROWS // rep) if rep * n_queries > ROWS else n_queries  # queries of a task, of all R heads
        n_blocks, n_rows = (n_queries + per_block - 1) // per_block, rep * per_block
        piece = PIECE if rep * n_queries <= FEW else 8 * PIECE
        n_pieces = (n_keys + piece - 1) // piece
        if rep * n_queries > ROWS:
            n_pieces, piece = 1, n_keys
        n_tasks = groups * n_blocks * n_pieces
        wide = (dim + 15) // 16 * 16
        states = np.empty((n_tasks if n_pieces > 1 else 0, n_rows, 2), np.float32)
        partial = np.empty((n_tasks if n_pieces > 1 else 0, n_rows, wide), np.float32)
        queue, room = np.zeros(2, np.int64), scratch_size(n_rows, dim, per_word)
        memory = np.empty(n_workers * room, np.float32)
        for _ in numba.prange(n_workers):
            worker = take(queue[1:].ctypes.data)
            queries, spans, state, sums, keys, values, scores, weights = scratch(
                memory.ctypes.data + 4 * worker * room, n_rows, dim, per_word
            )
            while True:
                task = take(queue.ctypes.data)
                if task >= n_tasks:
                    break
                group, block, part = task // (n_blocks * n_pieces), task // n_pieces % n_blocks, task % n_pieces
                if causal:  # the last queries have the most keys: they come first
                    block = n_blocks - 1 - block
                first_query = block * per_block
                n = min(per_block, n_queries - first_query)
                first, stop = part * piece, min(n_keys, part * piece + piece)
                if causal:
                    behind = n_keys - n_queries + first_query
                    first, stop = max(first, behind - window + 1), min(stop, behind + n)
                for row in range(rep * n):
                    head, query = row // n, first_query + row % n
                    at = q_at + (group * q_group + head * q_head + query * q_row) * itemsize
                    turn, turned = query * (dim // 2) * itemsize, cos_at != 0
                    put_query(
                        at, cos_at + turn if turned else at, sin_at + turn if turned else at, dim, turned,
                        queries[row].ctypes.data,
                    )  # fmt: skip
                    seen = n_keys - n_queries + query + 1 if causal else n_keys
                    spans[row, 0], spans[row, 1] = max(seen - window, 0) if causal else 0, seen
                    state[row, 0], state[row, 1] = LOWEST, 0
                    sums[row] = 0
                attend_rows(
                    queries, rep * n, spans, k_at + group * k_group * itemsize, k_row,
                    v_at + group * v_group * itemsize, v_row, first, stop, dim, steepness, state, sums, keys, values,
                    scores, weights,
                )  # fmt: skip
                for row in range(rep * n):
                    if n_pieces > 1:
                        slot = (group * n_blocks + block) * n_pieces + part
                        states[slot, row] = state[row]
                        partial[slot, row] = sums[row]
                    else:
                        at = (group * rep + row // n) * n_queries + first_query + row % n
                        finish(state[row], sums[row], out, lse, at, dim)
        if n_pieces > 1:
            for at in numba.prange(groups * rep * n_queries):
                group, head, query = at // (rep * n_queries), at // n_queries % rep, at % n_queries
                block = query // per_block
                n = min(per_block, n_queries - block * per_block)
                row, slot = head * n + query % per_block, (group * n_blocks + block) * n_pieces
                top = LOWEST
                for part in range(n_pieces):
                    top = max(top, states[slot + part, row, 0])
                for part in range(1, n_pieces):
                    shrink = exp2(states[slot + part, row, 0] - top)
                    if part == 1:
                        own = exp2(states[slot, row, 0] - top)
                        states[slot, row, 1] *= own
                        for d in range(dim):
                            partial[slot, row, d] *= own
                    states[slot, row, 1] += states[slot + part, row, 1] * shrink
                    for d in range(dim):
                        partial[slot, row, d] += partial[slot + part, row, d] * shrink
                states[slot, row, 0] = top
                finish(states[slot, row], partial[slot, row], out, lse, at, dim)

    return compiled


@cache
def _attend_tiles(dtype: torch.dtype) -> Kernel:
    stored, itemsize = STORED[dtype], dtype.itemsize
    put_query, attend_rows, finish, per_word = core(dtype)

    @kernel(f"void({'intp, ' * 21}float64, intp)")
    def compiled(
        q_at, q_head, q_row, cos_at, sin_at, n_turns, tile_at, k_at, k_tile, k_row, v_at, v_tile, v_row, out_at, lse_at,
        n_heads, n_queries, n_slots, n_tiles, size, dim, scale, n_workers,
    ):  # fmt: skip
        n_rows = n_heads * n_queries * n_slots
        tile = carray(pointer(tile_at, int64), (n_rows,))
        out = carray(pointer(out_at, stored), (n_rows, dim))
        lse = carray(pointer(lse_at, float32), (n_rows,))
        steepness = np.float32(scale * 1.4426950408889634)
        order = _sorted_rows(tile, n_tiles)
        tasks = np.empty(len(order) + 1, np.int64)  # where in `order` each task begins: rows of one tile
        n_tasks, begin = 0, 0
        for i in range(len(order)):
            if i == 0 or tile[order[i]] != tile[order[i - 1]] or i - begin == ROWS:
                tasks[n_tasks] = begin = i
                n_tasks += 1
        tasks[n_tasks] = len(order)
        queue, room = np.zeros(2, np.int64), scratch_size(ROWS, dim, per_word)
        memory = np.empty(n_workers * room, np.float32)
        for _ in numba.prange(n_workers):
            worker = take(queue[1:].ctypes.data)
            queries, spans, state, sums, keys, values, scores, weights = scratch(
                memory.ctypes.data + 4 * worker * room, ROWS, dim, per_word
            )
            while True:
                task = take(queue.ctypes.data)
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
                attend_rows(
                    queries, n, spans, k_at + which * k_tile * itemsize, k_row, v_at + which * v_tile * itemsize, v_row,
                    0, size, dim, steepness, state, sums, keys, values, scores, weights,
                )  # fmt: skip
                for i in range(n):
                    finish(state[i], sums[i], out, lse, order[first + i], dim)

    return compiled


@inner
def _sorted_rows(tile, n_tiles):
    """Sort the rows that have a tile by tile; rows of one tile stay in order. Many are counted, a few are sorted."""
    n = 0
    for row in range(len(tile)):
        n += tile[row] >= 0
    order = np.empty(n, np.int64)
    if len(tile) < n_tiles:
        keys, i = np.empty(n, np.int64), 0
        for row in range(len(tile)):
            if tile[row] >= 0:
                keys[i] = tile[row] * len(tile) + row
                i += 1
        keys.sort()
        for i in range(n):
            order[i] = keys[i] % len(tile)
        return order
    starts = np.zeros(n_tiles + 1, np.int64)
    for row in range(len(tile)):
        if tile[row] >= 0:
            starts[tile[row] + 1] += 1
    for i in range(n_tiles):
        starts[i + 1] += starts[i]
    for row in range(len(tile)):
        if tile[row] >= 0:
            order[starts[tile[row]]] = row
            starts[tile[row]] += 1
    return order


@cache
def _merge_slots(dtype: torch.dtype) -> Kernel:
    stored, read, write = STORED[dtype], READ[dtype], WRITE[dtype]

    @kernel("void(intp, intp, intp, intp, intp, intp, intp)")
    def compiled(out_at, lse_at, merged_at, total_at, n, n_slots, dim):
        out = carray(pointer(out_at, stored), (n, n_slots, dim))
        lse = carray(pointer(lse_at, float32), (n, n_slots))
        merged = carray(pointer(merged_at, stored), (n, dim))
        total = carray(pointer(total_at, float32), (n,))
        per_log2 = np.float32(1.4426950408889634)
        for task in numba.prange((n + 63) // 64):
            sums = np.empty(dim, np.float32)
            for row in range(task * 64, min(n, task * 64 + 64)):
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

    return compiled
