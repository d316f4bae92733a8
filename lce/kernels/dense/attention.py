"""Attention on CPUs, in prefill and decode: of queries to all keys, or of each query to its chosen tiles."""

import ctypes
import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.kernels.rows.int8_rows import row_bytes
from lce.kernels.runtime.kernel import Kernel, Kernels
from lce.kernels.runtime.shared import ALIGNED, CHOSEN_ROWS, KEYS, QUERY_ROWS, READ_PIECE

PIECE = 256  # keys of a piece for a generated token; pieces are tasks of their own
_LEAST_CHOSEN = 256  # keys of the chosen tiles that a task of a generated token has: all threads have work
_FINISHED_ROWS = 64  # the smallest number of queries that a thread of `finish_chosen` takes
_LEAST_TASKS = 16  # tasks of a call: all threads have work

_dense_tasks, _routed_tasks = Kernels("attention.dense_tasks"), Kernels("attention.routed_tasks")
_attend_rows, _finish_chosen = Kernels("rows.attend_rows"), Kernels("attention.finish_chosen")
_attend_rows8 = Kernels("int8_rows.attend_rows")


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    generated: bool = False,
    first: int = 0,
    unseen: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute attention of queries `q [H, T, D]` to keys and values `k v [G, N, D]`.

    Returns the output `[H, T, D]` and each query's log-sum-exp `[H, T]` (float32). H / G query heads share a KV head.
    The tensors are on the CPU, of one dtype, with a contiguous last dimension. With `causal`, query t sees the keys up
    to `N - T + t`, so the last query sees the last key; `window` limits each query to its nearest `window` keys. If
    given, `cos sin [m · T, D/2]` rotate the queries: m neighbouring KV heads take T rows each. Keys are read once per
    `QUERY_ROWS` queries of the heads that share keys. Time: O(H · T · N · D). Memory: about a megabyte per thread.

    A query's bits depend on what it sees, on `generated` and on the index `first` of key 0, not on T. For tokens that
    were not generated, `first` is a multiple of `ALIGNED`. No query sees the first `unseen` keys. Keys are summed in
    pieces on the grid of their indices: those of generated tokens are short and read in place.
    """
    (n_heads, n_queries, dim), (groups, n_keys, _) = q.shape, k.shape
    rep, (q_head, q_row, q_one) = n_heads // groups, q.stride()
    (k_group, k_row, k_one), (v_group, v_row, v_one) = k.stride(), v.stride()
    vector, kernel, more = _stored(q, k, v)
    assert k.shape == v.shape == (groups, n_keys, vector), (k.shape, v.shape)
    assert q_one == k_one == v_one == 1, (q_one, k_one, v_one)
    assert n_heads == rep * groups, (n_heads, groups)
    n_turns = 1
    if cos is not None and sin is not None:
        n_turns = len(cos) // n_queries
        assert cos.shape == sin.shape == (n_turns * n_queries, dim // 2), (cos.shape, sin.shape)
        assert groups % n_turns == 0, (groups, n_turns)
        assert cos.dtype is sin.dtype is q.dtype, (cos.dtype, sin.dtype)
        cos, sin = cos.contiguous(), sin.contiguous()
    out, lse = torch.empty(n_heads, n_queries, dim, dtype=q.dtype), torch.empty(n_heads, n_queries)
    assert generated or first % ALIGNED == 0, first
    piece = PIECE if generated else READ_PIECE
    per_block = 1 if generated else min(n_queries, max(1, QUERY_ROWS // rep))
    split = generated or per_block == n_queries
    n_blocks, place = groups * -(-n_queries // per_block), first % piece
    n_tasks = n_blocks * (-(-(place + n_keys) // piece) if split else 1)
    n_rows = rep * per_block
    partial = torch.empty(n_tasks * n_rows * (dim + 17)) if n_tasks > n_blocks else out  # unused with one piece
    sizes = groups, rep, n_queries, n_keys, dim, causal, n_keys if window is None else window, per_block, piece, split
    strides: tuple[int, ...] = q_head, q_row, k_group, k_row, v_group, v_row
    if k.itemsize != q.itemsize:
        strides = q_head, q_row, *(x * k.itemsize // q.itemsize for x in strides[2:])
    kernels, done = (_steepness(dim), kernel.address, _attend_rows[q.dtype].address), [0] * n_blocks
    given = q, k, v, cos, sin, out, lse, *sizes, generated, place, unseen, n_turns, *strides, *kernels, partial, *done
    _dense_tasks[q.dtype](n_tasks, *given, memory=_memory(n_rows, dim) + more)
    return out, lse


class LaneQueries:
    """The attention of generated tokens of B texts, `q [H, B, D]`, each to a span of keys of its own text.

    `cos sin [B, D/2]` rotate the queries. `spans` has the first key and the stop of each, as indices in the text. Each
    call of `attend` computes what `dense_attention` does for a token: its part of `out [B, H, D]`, `lse [B, H]`. The
    bits are the same, too. Time: O(H · D) for each key of a span. Memory: D + 17 numbers for each head and piece.
    """

    def __init__(self, q: Tensor, cos: Tensor, sin: Tensor, spans: Sequence[tuple[int, int]]) -> None:
        (n_heads, n_lanes, dim), self.spans = q.shape, spans
        assert cos.shape == sin.shape == (n_lanes, dim // 2), (cos.shape, sin.shape)
        contiguous = q.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous()
        assert contiguous, (q.stride(), cos.stride(), sin.stride())
        self.q, self.turns = q, (cos, sin)
        self.out, self.lse = torch.empty(n_lanes, n_heads, dim, dtype=q.dtype), torch.empty(n_lanes, n_heads)
        self._n_pieces = [-(-(start % PIECE + stop - start) // PIECE) for start, stop in spans]
        self._partial = torch.empty(sum(self._n_pieces) * n_heads * (dim + 17))
        held = ((x.data_ptr(), x.itemsize * n) for x, n in ((q, q.stride(1)), (cos, dim // 2), (sin, dim // 2)))
        self._asked = *held, (self.out.data_ptr(), q.itemsize * n_heads * dim), (self.lse.data_ptr(), 4 * n_heads)

    def attend(self, lane: int, k: Tensor, v: Tensor, first: int) -> None:
        """Attend in a lane: `k v [G, -, D]`; row 0 of the keys is that of token `first`, row 0 of the values of 0."""
        q, (start, stop), n_pieces = self.q, self.spans[lane], self._n_pieces[lane]
        (n_heads, _, dim), groups, size = q.shape, len(k), q.itemsize
        (k_group, k_row, k_one), (v_group, v_row, v_one) = k.stride(), v.stride()
        assert k.dtype is v.dtype is q.dtype, (k.dtype, v.dtype)
        assert first <= start < stop <= min(first + k.shape[1], v.shape[1]), (first, start, stop, k.shape, v.shape)
        assert (k_one, v_one, k.shape[2], v.shape[2]) == (1, 1, dim, dim), (k.shape, v.shape)
        q_at, cos_at, sin_at, out_at, lse_at = (at + lane * n_bytes for at, n_bytes in self._asked)
        k_at, v_at = k.data_ptr() + (start - first) * k_row * size, v.data_ptr() + start * v_row * size
        partial_at = self._partial.data_ptr() + 4 * sum(self._n_pieces[:lane]) * n_heads * (dim + 17)
        rep, n_keys, rows = n_heads // groups, stop - start, _attend_rows[q.dtype].address
        sizes = groups, rep, 1, n_keys, dim, False, n_keys, 1, PIECE, True, True, start % PIECE, 0, 1
        strides, done = (q.stride(0), 0, k_group, k_row, v_group, v_row), [0] * groups
        addresses, kernels = (q_at, k_at, v_at, cos_at, sin_at, out_at, lse_at), (_steepness(dim), rows, rows)
        given = *addresses, *sizes, *strides, *kernels, partial_at, *done
        _dense_tasks[q.dtype](groups * n_pieces, *given, memory=_memory(rep, dim))


class RoutedAttention:
    """The attention of queries `q [H, T, D]` to the tiles that each of them chose, `chosen [H, T, K]` (int64).

    For slot s of its list, query t is rotated by row `turn[t, s]` of `cos sin [P, D/2]`. `turn` is `[T, K]`, or
    `[T, 1]` if all slots share a rotation, or `[1, 1]`. Call `add` with each round of tiles, then `finish`. A number
    below 0 in `chosen` is no choice. The tensors are on the CPU, of one dtype.

    A task takes `CHOSEN_ROWS` rows or fewer, queries of the heads that share a KV head, through the chunks that one of
    them chose: a chunk's keys are packed once for all rows of the task that chose it. Time: O(H · T · K · L · D).
    Memory: H · T · D numbers of float32.
    """

    def __init__(
        self, q: Tensor, cos: Tensor, sin: Tensor, turn: Tensor, chosen: Tensor, generated: bool = False
    ) -> None:
        self.generated = generated
        (n_queries, dim), n_slots = q.shape[1:], chosen.shape[-1]
        self.q, self.chosen, self.turn = q, chosen.contiguous(), turn.expand(n_queries, -1).contiguous()
        self.turns = cos.contiguous(), sin.contiguous()
        fits = cos.shape == sin.shape == (len(cos), dim // 2) and turn.shape[1] in (1, n_slots)
        assert fits, (cos.shape, sin.shape, turn.shape, chosen.shape, q.shape)
        assert chosen.shape[:2] == q.shape[:2], (chosen.shape, q.shape)
        assert turn.dtype is chosen.dtype is torch.int64, (turn.dtype, chosen.dtype)
        assert cos.dtype is sin.dtype is q.dtype, (cos.dtype, sin.dtype, q.dtype)
        assert q.stride(2) == 1, q.stride()
        if turn.numel():
            numbers = _numbers(self.turn)
            assert 0 <= numbers.min() <= numbers.max() < len(cos), (turn.aminmax(), len(cos))
        self.sums: Tensor | None = None

    def add(self, k: Tensor, v: Tensor, tile: Tensor) -> None:
        """Add the attention to tiles `k v [E, L, D]`. `tile [G, chunks]` has the number of each chunk's tile, or -1.

        Each round has the chunks after those of the rounds before: then the result does not depend on the rounds.
        """
        if not self.chosen.numel():
            return
        (n_heads, n_queries, dim), q, tile = self.q.shape, self.q, tile.contiguous()
        (groups, n_chunks), (n_tiles, size, _), n_slots = tile.shape, k.shape, self.chosen.shape[-1]
        vector, kernel, more = _stored(q, k, v)
        assert k.shape == v.shape == (n_tiles, size, vector), (k.shape, v.shape)
        assert k.stride(2) == v.stride(2) == 1, (k.stride(), v.stride())
        assert tile.dtype is torch.int64, tile.dtype
        assert n_heads % groups == 0, (n_heads, groups)
        assert _numbers(tile).max() < n_tiles, (tile.max(), n_tiles)
        assert _numbers(self.chosen).max() < n_chunks, (self.chosen.max(), n_chunks)
        rep, begun = n_heads // groups, self.sums is not None
        if self.generated:
            per_block = 1
            piece = max(-(-n_slots // max(1, _LEAST_TASKS // groups)), min(n_slots, -(-_LEAST_CHOSEN // size)), 1)
        else:
            per_block, piece = max(1, min(-(-groups * n_queries // _LEAST_TASKS), CHOSEN_ROWS // rep)), n_slots
        n_blocks, n_pieces = -(-n_queries // per_block), -(-n_slots // piece)
        if self.sums is None:
            self.sums = torch.empty(n_heads * n_queries, n_pieces, -(-dim // 16) * 16)
            self.states = torch.empty(n_heads * n_queries, n_pieces, 2)
        tensors = q, *self.turns, self.turn, self.chosen, tile, k, v, self.states, self.sums
        sizes = groups, rep, n_queries, n_slots, self.turn.shape[1], n_chunks, size, dim, per_block, piece, begun
        strides = (stride * x.itemsize // q.itemsize for x in (q, k, v) for stride in x.stride()[:2])
        kernels = kernel.address, _attend_rows[q.dtype].address
        given = *tensors, *sizes, *strides, _steepness(dim), self.generated, *kernels
        n_rows = rep * per_block
        memory = _memory(n_rows, dim) + more + 8 * (n_chunks + 1 + n_rows * (n_slots + piece)) + 64
        _routed_tasks[q.dtype](groups * n_blocks * n_pieces, *given, memory=memory)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the output `[H, T, D]` and log-sum-exps `[H, T]` (float32); 0 and -inf for a query without a tile."""
        (*shape, dim), dtype = self.q.shape, self.q.dtype
        if self.sums is None:
            return torch.zeros(*shape, dim, dtype=dtype), torch.full(shape, -torch.inf)
        out, lse = torch.empty(*shape, dim, dtype=dtype), torch.empty(*shape)
        given = self.states, self.sums, out, lse, self.sums.shape[1], dim
        _finish_chosen[dtype](lse.numel(), *given, least=_FINISHED_ROWS)
        return out, lse


def _numbers(x: Tensor) -> NDArray[np.int64]:
    """Return the numbers of a contiguous int64 tensor, read without an operator of PyTorch.

    An operator in a layer's attention would keep its kernels from serving other layers.
    """
    memory = (ctypes.c_byte * x.nbytes).from_address(x.data_ptr())
    return np.frombuffer(memory, dtype=np.int64)  # type: ignore[call-overload]  # reads any object with a buffer


def _stored(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, Kernel, int]:
    """Return how many elements a key has, the kernel of a task, and the bytes of memory that it needs besides.

    Strides of keys and values are whole numbers of the queries' dtype: rows of 8 bits have whole words.
    """
    assert k.dtype is v.dtype, (k.dtype, v.dtype)
    if k.dtype is torch.uint8:
        return row_bytes(q.shape[-1]), _attend_rows8[q.dtype], 64 + 2 * KEYS * q.shape[-1] * q.itemsize
    assert q.dtype is k.dtype, (q.dtype, k.dtype)
    return q.shape[-1], _attend_rows[q.dtype], 0


def _steepness(dim: int) -> float:
    """Return `log2(e) / √dim`: a dot product times that is a score; weights are 2^score."""
    return 1 / math.sqrt(dim) * 1.4426950408889634


@cache
def _memory(n_rows: int, dim: int) -> int:
    """Return the bytes of a thread's memory: what `rows.scratch` divides for n rows, arguments, and rows' totals."""
    wide = -(-dim // 64) * 64
    return 192 + 4 * ((n_rows + 5) * (dim + 8 + 2 * wide) + (dim + wide + 14) * KEYS + 32)
