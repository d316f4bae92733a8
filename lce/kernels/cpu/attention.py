"""Attention on CPUs, in prefill and decode: of queries to all keys, or of each query to its chosen tiles.

A tile is the keys and values of one chunk of one KV head. An item is a task, which `rows.attend_rows` computes. Only
shapes and chosen tiles determine the tasks, so a result's bits do not depend on the number of threads.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from lce.kernels.code.shared import KEYS, QUERY_ROWS
from lce.kernels.cpu.int8_rows import row_bytes
from lce.kernels.cpu.kernel import Kernel, Kernels, argument_of

FEW = 32  # if a KV head has at most FEW queries (of all its heads), its keys are cut into pieces of PIECE keys
PIECE = 512  # keys of a piece; with more than FEW and at most QUERY_ROWS queries, a piece has 8 times as many
_LEAST_PIECE = 256  # keys of a piece of a short text: all threads have work
_SLOT_ROWS = 64  # the smallest number of queries that a thread of `merge_slots` takes

_attend, _attend_tiles = Kernels("attention.attend"), Kernels("attention.attend_tiles")
_sort_rows = Kernel("attention.sort_rows")
_attend_rows, _merge_slots = Kernels("rows.attend_rows"), Kernels("attention.merge_slots")
_attend_rows8 = Kernels("int8_rows.attend_rows")


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None, cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention of queries `q [H, T, D]` to keys and values `k v [G, N, D]`.

    Returns the output `[H, T, D]` and each query's log-sum-exp `[H, T]` (float32). H / G query heads share a KV head.
    The tensors are on the CPU, of one dtype, with a contiguous last dimension. With `causal`, query t sees the keys up
    to `N - T + t`, so the last query sees the last key; `window` limits each query to its nearest `window` keys. If
    given, `cos sin [T, D/2]` rotate the queries. Keys are read once per `QUERY_ROWS` queries of the heads that
    share keys. Time: O(H · T · N · D). Memory: about a megabyte per thread.
    """
    (n_heads, n_queries, dim), (groups, n_keys, _) = q.shape, k.shape
    rep, (q_head, q_row, q_one) = n_heads // groups, q.stride()
    (k_group, k_row, k_one), (v_group, v_row, v_one) = k.stride(), v.stride()
    vector, kernel, more = _stored(q, k, v)
    assert k.shape == v.shape == (groups, n_keys, vector), (k.shape, v.shape)
    assert q_one == k_one == v_one == 1, (q_one, k_one, v_one)
    assert n_heads == rep * groups, (n_heads, groups)
    cos_at, sin_at = 0, 0
    if cos is not None and sin is not None:
        assert cos.shape == sin.shape == (n_queries, dim // 2), (cos.shape, sin.shape)
        assert cos.dtype is sin.dtype is q.dtype, (cos.dtype, sin.dtype)
        cos, sin = cos.contiguous(), sin.contiguous()
        cos_at, sin_at = cos.data_ptr(), sin.data_ptr()
    out, lse = torch.empty(n_heads, n_queries, dim, dtype=q.dtype), torch.empty(n_heads, n_queries)
    n_rows, per_block, piece, n_pieces = rep * n_queries, n_queries, n_keys, 1
    if n_rows > QUERY_ROWS:
        per_block = max(1, QUERY_ROWS // rep)
    else:
        most = PIECE if n_rows <= FEW else 8 * PIECE
        piece = max(_LEAST_PIECE, min(most, groups * n_keys // 16 // _LEAST_PIECE * _LEAST_PIECE))
        n_pieces = -(-n_keys // piece)
    n_tasks = groups * -(-n_queries // per_block) * n_pieces
    partial = torch.empty(n_tasks * n_rows * (dim + 17)) if n_pieces > 1 else out  # unused with one piece
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), cos_at, sin_at, out.data_ptr(), lse.data_ptr()
    sizes = groups, rep, n_queries, n_keys, dim, causal, n_keys if window is None else window, per_block, piece
    strides: tuple[int, ...] = q_head, q_row, k_group, k_row, v_group, v_row
    if k.itemsize != q.itemsize:
        strides = q_head, q_row, *(x * k.itemsize // q.itemsize for x in strides[2:])
    kernels, done = (_steepness(dim), kernel.address, _attend_rows[q.dtype].address), [0] * groups
    given = *addresses, *sizes, *strides, *kernels, partial.data_ptr(), *done
    _attend[q.dtype](n_tasks, memory=_memory(rep * per_block, dim) + more, tail=given)
    return out, lse


def attend_tiles(
    q: Tensor, cos: Tensor, sin: Tensor, tile: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Compute attention of A = H · T · K rows, each to one of E tiles of L keys and values, `k v [E, L, D]`.

    Row `a = (h·T + t)·K + s` is query `q[h, t]` of `q [H, T, D]`, rotated by `cos[t, s]` and `sin[t, s]`. The row
    attends tile `tile[a]`, the s-th of the query's K tiles; `tile [A]` is int64. `cos sin` are `[T, K, D/2]`, or
    `[T, 1, D/2]` if all K are the same. Writes `out [A, D]` and log-sum-exps `lse [A]` (float32), except for rows whose
    tile is -1. A tile is packed once per `QUERY_ROWS` rows that attend it. Time: O(A · L · D), and a sort of A numbers.
    """
    n_heads, n_queries, dim = q.shape
    n_slots = tile.numel() // (n_heads * n_queries)
    n_tiles, size = k.shape[:2]
    vector, kernel, more = _stored(q, k, v)
    assert k.shape == v.shape == (n_tiles, size, vector)
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    cos, sin = (x.expand(n_queries, -1, -1).contiguous() for x in (cos, sin))
    n_turns = cos.shape[1]
    fits = cos.shape == sin.shape == (n_queries, n_turns, dim // 2) and n_turns in (1, n_slots)
    assert fits, (cos.shape, sin.shape, n_slots)
    fits = out.shape == (tile.numel(), dim) and all(x.is_contiguous() for x in (tile, out, lse))
    assert fits, (tile.shape, out.shape)
    assert tile.dtype == torch.int64
    assert cos.dtype == sin.dtype == q.dtype == out.dtype
    tasks = torch.empty(3 * tile.numel() + 2054, dtype=torch.int64)  # the first number is the number of tasks
    _sort_rows(1, tile.data_ptr(), tile.numel(), n_tiles, tasks.data_ptr())
    addresses = (x.data_ptr() for x in (q, cos, sin, tasks, k, v, out, lse))
    sizes = n_heads, n_queries, n_slots, n_turns, size, dim
    strides = (stride * x.itemsize // q.itemsize for x in (q, k, v) for stride in x.stride()[:2])
    kernels = _steepness(dim), kernel.address, _attend_rows[q.dtype].address
    given = *addresses, *sizes, *strides, *kernels
    _attend_tiles[q.dtype](int(tasks[0]), memory=_memory(QUERY_ROWS, dim) + more, tail=given)


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
    _merge_slots[out.dtype](total.numel(), *addresses, n_slots, dim, least=_SLOT_ROWS, memory=4 * dim)
    return merged, total


def _stored(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, Kernel, int]:
    """Return how many elements a key has, the kernel of a task, and the bytes of memory that it needs besides.

    Strides of keys and values are whole numbers of the queries' dtype: rows of 8 bits have whole words.
    """
    assert k.dtype is v.dtype, (k.dtype, v.dtype)
    if k.dtype is torch.uint8:
        return row_bytes(q.shape[-1]), _attend_rows8[q.dtype], 64 + 2 * KEYS * q.shape[-1] * q.itemsize
    assert q.dtype is k.dtype, (q.dtype, k.dtype)
    return q.shape[-1], _attend_rows[q.dtype], 0


@cache
def _steepness(dim: int) -> int:
    """Return `log2(e) / √dim`, encoded by `argument_of`: a dot product times that is a score; weights are 2^score."""
    return argument_of(1 / math.sqrt(dim) * 1.4426950408889634)


@cache
def _memory(n_rows: int, dim: int) -> int:
    """Return the bytes of a thread's memory: what `rows.scratch` divides for n rows, and arguments of `attend_rows`."""
    wide = -(-dim // 64) * 64
    return 128 + 4 * ((n_rows + 5) * (dim + 6 + wide) + (dim + wide + 14) * KEYS + 32)
