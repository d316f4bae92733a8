"""The operations of a decoder layer between matrix products, on GPUs: one launch each. A kernel serves all lengths."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from lce.kernels.rows.rows_triton import heads as vectors_of
from lce.kernels.runtime.launching import LaneRows, Rows, launch

_NUMBERS = 2048  # numbers that a program computes at a time


def rms_norms(eps: float, *both: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Apply RMSNorm to each row of one or two tensors `[T, D]` or `[H, T, D]`, such as a layer's queries and keys.

    Each comes with its weight `[D]`. The results are contiguous. One launch.
    """
    dim = both[0][0].shape[-1]
    rows, width = _rows_of(dim)
    given, counts = list[Any](), list[int]()
    for x, weight in both:
        fits = x.shape[-1] == dim and weight.shape == (dim,) and weight.is_contiguous() and x.ndim in (2, 3)
        assert fits, (x.shape, weight.shape)
        x = x if x.stride(-1) == 1 else x.contiguous()
        heads, n = (1, len(x)) if x.ndim == 2 else x.shape[:2]
        head_stride = x.stride(0) if x.ndim == 3 else 0
        given.append((x, weight, x.new_empty(x.shape, dtype=weight.dtype), head_stride, x.stride(-2)))
        counts += heads * n, n
    n_programs = [triton.cdiv(n_rows, rows) for n_rows in counts[::2]]
    options = {"ROWS": rows, "DIM": width, "num_warps": min(16, max(4, width // 1024))}
    launch(_rms_norm, (sum(n_programs),), tuple(given), (n_programs[0], *counts), dim, eps, **options)
    return [one[2] for one in given]


def silu_mul(x: Tensor) -> Tensor:
    """Return `silu(a) * b`, `[T, D]`, for the halves a and b of each row of `x [T, 2·D]`, which is contiguous."""
    n, dim = x.shape[0], x.shape[1] // 2
    fits = x.is_contiguous() and x.shape[1] == 2 * dim
    assert fits, (x.shape, x.stride())
    out = x.new_empty(n, dim)
    block = min(_NUMBERS, triton.next_power_of_2(dim))
    launch(_silu_mul, (n * triton.cdiv(dim, block),), x, out, dim, BLOCK=block)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the vectors of `x [..., D]` by angles, given as cosines and sines `cos sin [..., D/2]`, as RoPE does.

    Shapes are broadcast, to at most three leading dimensions. Dimension i is paired with dimension i + D/2.
    """
    half = x.shape[-1] // 2
    fits = cos.shape == sin.shape and cos.shape[-1] == half and cos.dtype is sin.dtype
    assert fits, (x.shape, cos.shape, sin.shape)
    common = torch.broadcast_shapes(x.shape[:-1], cos.shape[:-1])
    assert len(common) <= 3, f"{list(common)}: more than three leading dimensions"
    x, cos, sin = (y if y.stride(-1) == 1 else y.contiguous() for y in (x, cos, sin))
    lead = (1,) * (3 - len(common)) + tuple(common)
    out = x.new_empty(*common, 2 * half)
    given = tuple((y, *y.expand(*lead, y.shape[-1]).stride()[:3]) for y in (x, cos, sin))
    rows, width = _rows_of(half)
    counts = lead[0] * lead[1] * lead[2], lead[1], lead[2]
    launch(_rotate, (triton.cdiv(counts[0], rows),), *given, out, counts, half, ROWS=rows, HALF=width)
    return out


def turns(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `scale · cos(a)` and `scale · sin(a)`, `[..., D/2]` each, for angles a = position · frequency.

    `positions [...]` is int64, and `frequencies [D/2]` is float64.
    """
    fits = positions.dtype == torch.int64 and frequencies.dtype == torch.float64 and frequencies.is_contiguous()
    assert fits, (positions.dtype, frequencies.dtype)
    positions, half = positions.contiguous(), len(frequencies)
    cos = torch.empty(*positions.shape, half, dtype=dtype, device=positions.device)
    sin = cos.new_empty(cos.shape)
    block = 256  # few numbers for each thread, because float64 is slow
    grid, options = (triton.cdiv(cos.numel(), block),), {"HALF": half, "SCALE": float(scale), "BLOCK": block}
    launch(_turns, grid, positions, frequencies, cos, sin, cos.numel(), **options)
    return cos, sin


def append(
    k: Tensor, v: Tensor, into_k: Rows, into_v: Rows, at: int | Tensor, cos: Tensor | None, sin: Tensor | None
) -> None:
    """Copy `k v [G, T, D]` to rows `at..at+T-1` of `into_k into_v [G, n, D]`; if given, `cos sin [T, D/2]` rotate k.

    `at` is a number or a tensor of one int64 on the device. The value of such a tensor is not checked against n. Token
    t goes to row `at[t]` of context t of `LaneRows`, `at [T]`, unless `at[t]` is negative.
    """
    heads, n, dim = k.shape
    assert v.shape == k.shape, (k.shape, v.shape)
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    turn = () if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
    assert all(x.shape == (n, dim // 2) for x in turn), [x.shape for x in turn]
    place: tuple[Tensor, ...] = (at,) if isinstance(at, Tensor) else ()
    start = 0 if isinstance(at, Tensor) else at
    assert place or 0 <= start <= into_k.shape[1] - n, (k.shape, into_k.shape, at)
    assert not place or (place[0].numel() in (1, n) and place[0].dtype == torch.int64), at
    if isinstance(into_k, LaneRows) and isinstance(into_v, LaneRows):
        fits = all(x.table.shape == (*place[0].shape, heads) and x.dtype is k.dtype for x in (into_k, into_v))
        into: tuple[Any, ...] = into_k.table, into_v.table
        place += (into_k.count,)
    else:
        assert isinstance(into_k, Tensor)
        assert isinstance(into_v, Tensor)
        fits = into_v.shape == into_k.shape and into_k.shape[::2] == (heads, dim) and into_k.stride(2) == 1
        fits, into = fits and into_k.stride() == into_v.stride(), (into_k, into_v, *into_k.stride()[:2])
    assert fits, (k.shape, into_k, into_v)
    rows, width = _rows_of(dim // 2)
    counts = heads * n, n
    grid, vectors = (triton.cdiv(heads * n, rows),), (vectors_of(k), vectors_of(v))
    launch(_append, grid, *vectors, turn, into, place, start, counts, dim // 2, ROWS=rows, HALF=width)


def take_lanes(rows: LaneRows, first: Tensor | None, n: int) -> Tensor:
    """Return copies `[heads, B, n, …]` of rows `first[b]..` of B contexts; None: from row 0 on. One launch."""
    (heads, _, *row), n_lanes = rows.shape, len(rows.table)
    taken = torch.empty(heads, n_lanes, n, *row, dtype=rows.dtype, device=rows.table.device)
    size = taken[0, 0].numel()
    grid, at = (heads * n_lanes, triton.cdiv(size, _NUMBERS)), () if first is None else (first,)
    launch(_take_lanes, grid, taken, rows.table, at, (heads, n_lanes), size, size // n, BLOCK=_NUMBERS)
    return taken


def take_rows(one: Tensor, two: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows `index [n]` (int64, in range) of two tensors `[G, N, D]` of equal strides: `[G, n, D]` each."""
    n_groups, _, dim = one.shape
    fits = two.shape == one.shape and two.stride() == one.stride() and one.stride(2) == 1
    assert fits, (one.shape, two.shape, one.stride(), two.stride())
    assert index.dtype == torch.int64, index.dtype
    index = index.contiguous()
    taken = one.new_empty(2, n_groups, len(index), dim)
    rows, width = _rows_of(dim)
    grid, counts = (triton.cdiv(n_groups * len(index), rows),), (n_groups * len(index), len(index))
    launch(_take_rows, grid, vectors_of(one), two, index, taken[0], taken[1], counts, dim, ROWS=rows, DIM=width)
    return taken[0], taken[1]


def _rows_of(width: int) -> tuple[int, int]:
    """Return how many rows of `width` numbers a program takes, and `width` rounded up to a power of two."""
    wide = triton.next_power_of_2(width)
    return max(1, _NUMBERS // wide), wide


@triton.jit(do_not_specialize=["counts"])
def _rms_norm(given, counts, dim, eps, ROWS: constexpr, DIM: constexpr):
    """Normalise rows of the first tensor in the first `counts[0]` programs, and rows of the second in the others."""
    program, n_programs = tl.program_id(0), counts[0]
    if len(given) == 2:
        if program < n_programs:
            _norm_rows(given[0], counts[1], counts[2], program, dim, eps, ROWS, DIM)
        else:
            _norm_rows(given[1], counts[3], counts[4], program - n_programs, dim, eps, ROWS, DIM)
    else:
        _norm_rows(given[0], counts[1], counts[2], program, dim, eps, ROWS, DIM)


@triton.jit
def _norm_rows(given, n_rows, n, program, dim, eps, ROWS: constexpr, DIM: constexpr):
    x, weight, out, head_stride, row_stride = given
    row = (program * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.arange(0, DIM)
    there = (row < n_rows)[:, None] & (j < dim)[None, :]
    at = x + (row // n * head_stride + row % n * row_stride)[:, None] + j[None, :]
    some = tl.load(at, mask=there, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(some * some, 1) / dim + eps)
    factor = tl.load(weight + j, mask=j < dim, other=0.0).to(tl.float32)
    normed = some * scale[:, None] * factor[None, :]
    tl.store(out + row[:, None] * dim + j[None, :], normed.to(out.dtype.element_ty), mask=there)


@triton.jit
def _silu_mul(x, out, dim, BLOCK: constexpr):
    n_blocks = tl.cdiv(dim, BLOCK)
    row = (tl.program_id(0) // n_blocks).to(tl.int64)
    j = tl.program_id(0) % n_blocks * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * dim + j, mask=j < dim, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * dim + dim + j, mask=j < dim, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(tl.minimum(-gate, 88.0))) * up
    tl.store(out + row * dim + j, result.to(out.dtype.element_ty), mask=j < dim)


@triton.jit
def _turned(x, cos, sin, half, there):
    """Return rotated halves `[ROWS, HALF]`; `x`, `cos` and `sin` are pointers, x to the first halves of the rows."""
    first = tl.load(x, mask=there, other=0.0).to(tl.float32)
    second = tl.load(x + half, mask=there, other=0.0).to(tl.float32)
    c = tl.load(cos, mask=there, other=0.0).to(tl.float32)
    s = tl.load(sin, mask=there, other=0.0).to(tl.float32)
    return first * c - second * s, second * c + first * s


@triton.jit(do_not_specialize=["counts"])
def _rotate(x, cos, sin, out, counts, half, ROWS: constexpr, HALF: constexpr):
    """Rotate ROWS rows of `[..., n1, n2, 2 · half]`; `x`, `cos` and `sin` are each a tensor and its three strides."""
    n_rows, n1, n2 = counts
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.arange(0, HALF)[None, :]
    there = (row < n_rows)[:, None] & (j < half)
    a, b, c = row // n2 // n1, row // n2 % n1, row % n2
    x_at = x[0] + (a * x[1] + b * x[2] + c * x[3])[:, None] + j
    cos_at = cos[0] + (a * cos[1] + b * cos[2] + c * cos[3])[:, None] + j
    sin_at = sin[0] + (a * sin[1] + b * sin[2] + c * sin[3])[:, None] + j
    first, second = _turned(x_at, cos_at, sin_at, half, there)
    to = out + row[:, None] * 2 * half + j
    tl.store(to, first.to(out.dtype.element_ty), mask=there)
    tl.store(to + half, second.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["n"])
def _turns(positions, frequencies, cos, sin, n, HALF: constexpr, SCALE: constexpr, BLOCK: constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    position = tl.load(positions + at // HALF, mask=there, other=0).to(tl.float64)
    angle = position * tl.load(frequencies + at % HALF, mask=there, other=0.0)
    c, s = (tl.cos(angle) * SCALE).to(tl.float32), (tl.sin(angle) * SCALE).to(tl.float32)
    tl.store(cos + at, c.to(cos.dtype.element_ty), mask=there)
    tl.store(sin + at, s.to(sin.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["first", "counts"])
def _append(k, v, turn, into, place, first, counts, half, ROWS: constexpr, HALF: constexpr):
    """Copy ROWS rows of k and v to `into`: two tensors, followed by their common strides of heads and of rows.

    The first row of `into` to write is `first`, or the integer in the tensor `place[0]` if there is one. Or `into` are
    two tables of addresses, and `place` the tokens' rows and how many tokens are written.
    """
    n_rows, n = counts
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.arange(0, HALF)[None, :]
    held = row < n_rows
    head, i = row // n, row % n
    if len(into) == 2:
        to_row = tl.load(place[0] + i, mask=held, other=-1)
        held = held & (to_row >= 0) & (i < tl.load(place[1]))
        at = i * (n_rows // n) + head
        to = to_row[:, None] * 2 * half + j
        to_k = tl.load(into[0] + at, mask=held, other=0).to(k.at.dtype)[:, None] + to
        to_v = tl.load(into[1] + at, mask=held, other=0).to(v.at.dtype)[:, None] + to
    else:
        first_row = tl.load(place[0]) if len(place) else first
        to = (head * into[2] + (first_row + i) * into[3])[:, None] + j
        to_k, to_v = into[0] + to, into[1] + to
    there = held[:, None] & (j < half)
    k_at = k.at + (head * k.head + i * k.row)[:, None] + j
    v_at = v.at + (head * v.head + i * v.row)[:, None] + j
    if len(turn):
        angle = i[:, None] * half + j
        left, right = _turned(k_at, turn[0] + angle, turn[1] + angle, half, there)
    else:
        left = tl.load(k_at, mask=there, other=0.0)
        right = tl.load(k_at + half, mask=there, other=0.0)
    tl.store(to_k, left.to(to_k.dtype.element_ty), mask=there)
    tl.store(to_k + half, right.to(to_k.dtype.element_ty), mask=there)
    tl.store(to_v, tl.load(v_at, mask=there, other=0.0), mask=there)
    tl.store(to_v + half, tl.load(v_at + half, mask=there, other=0.0), mask=there)


@triton.jit(do_not_specialize=["counts"])
def _take_lanes(taken, table, first, counts, size, width, BLOCK: constexpr):
    heads, n_lanes = counts
    head, lane = tl.program_id(0) // n_lanes, tl.program_id(0) % n_lanes
    at = tl.load(table + lane * heads + head).to(taken.dtype)
    if len(first):
        at += tl.load(first[0] + lane) * width
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    into = taken + tl.program_id(0).to(tl.int64) * size
    tl.store(into + j, tl.load(at + j, mask=j < size), mask=j < size)


@triton.jit(do_not_specialize=["counts"])
def _take_rows(one, two, index, taken_one, taken_two, counts, dim, ROWS: constexpr, DIM: constexpr):
    n_rows, n = counts
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.arange(0, DIM)[None, :]
    there = (row < n_rows)[:, None] & (j < dim)
    token = tl.load(index + row % n, mask=row < n_rows, other=0)
    at = (row // n * one.head + token * one.row)[:, None] + j
    to = row[:, None] * dim + j
    tl.store(taken_one + to, tl.load(one.at + at, mask=there, other=0.0), mask=there)
    tl.store(taken_two + to, tl.load(two + at, mask=there, other=0.0), mask=there)
