"""Products of a few rows with a weight matrix, which read the weights once: see `lce.kernels.cpu.products` for CPUs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lce.kernels.cuda.launching import MOST_ROWS, launch

_COLUMNS = 1024  # numbers of a weight row that a program reads at a time: 16 bytes a thread of each row
_TILE = 16_384  # bytes of weights that a program reads at a time
_PROGRAMS = 512  # that keep 132 processors reading


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Tensor | None = None, eps: float = 0.0,
    gated: bool = False, onto: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply `x [T, in]` with `weight [out, in]` transposed, plus `bias [out]`: `[T, out]`, for T up to `MOST_ROWS`.

    With `norm [in]` the rows of x are first divided by their root mean square, and multiplied by it. `gated` takes the
    first half of the result, through the SiLU function, times the second: `[T, out / 2]`. With `onto` the result is
    added to that tensor, in place.

    One launch. All are contiguous, on one GPU and of one dtype. Arithmetic is float32, rounded once at the end. Bytes:
    the weights, once; x, once a program, from the cache. Each number is one sum in one order.
    """
    n, size = x.shape
    n_rows, width = weight.shape
    n_parts = 2 if gated else 1
    n_out = n_rows // n_parts
    fits = 0 < n <= MOST_ROWS and size == width and n_rows == n_parts * n_out and x.dtype is weight.dtype
    assert fits, (x.shape, weight.shape, x.dtype, weight.dtype)
    out = x.new_empty(n, n_out) if onto is None else onto
    assert out.shape == (n, n_out), (out.shape, n, n_out)
    some = [x, weight, out, *(tensor for tensor in (bias, norm) if tensor is not None)]
    assert all(tensor.is_contiguous() and tensor.dtype is x.dtype for tensor in some), [y.stride() for y in some]
    columns = min(_COLUMNS, triton.next_power_of_2(size))
    rows = max(n_parts, _TILE // (_COLUMNS * x.element_size()) // (1 if n == 1 else 2))
    while rows > n_parts and n_rows < rows * _PROGRAMS:
        rows //= 2
    launch(
        _product, (triton.cdiv(n_rows, rows),), x, weight, x if bias is None else bias, x if norm is None else norm,
        out, n_out, eps, SIZE=size, N=n, ROWS=rows // n_parts, COLUMNS=columns, PARTS=n_parts, BIASED=bias is not None,
        NORMED=norm is not None, ADDS=onto is not None, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _product(
    x, weight, bias, norm, out, n_out, eps,
    SIZE: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    BIASED: tl.constexpr, NORMED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS numbers of each row of `out`, from PARTS times as many weight rows.

    With two parts a weight row of the gate is followed by the one of the second half that belongs to it. The root mean
    square is a factor of the whole sum: x is read once. Each row of x has its own sums, all of them in registers.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    of_part = tl.arange(0, ROWS * PARTS)
    lines = tl.program_id(0) * ROWS + of_part // PARTS
    there = lines < n_out
    lines += of_part % PARTS * n_out
    at = weight + lines.to(tl.int64)[:, None] * SIZE
    sums0 = tl.zeros((ROWS * PARTS, COLUMNS), tl.float32)
    sums1 = sums0
    sums2 = sums0
    sums3 = sums0
    squares0 = tl.zeros((COLUMNS,), tl.float32)
    squares1 = squares0
    squares2 = squares0
    squares3 = squares0
    for first in range(0, SIZE, COLUMNS):
        here = first + tl.arange(0, COLUMNS)
        inside = here < SIZE
        w = tl.load(at + here[None, :], mask=there[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
        w = w.to(tl.float32)
        factor = tl.full((COLUMNS,), 1.0, tl.float32)
        if NORMED:
            factor = tl.load(norm + here, mask=inside, other=0.0).to(tl.float32)
        sums0, squares0 = _add(x, here, inside, w, factor, sums0, squares0)
        if N > 1:
            sums1, squares1 = _add(x + SIZE, here, inside, w, factor, sums1, squares1)
        if N > 2:
            sums2, squares2 = _add(x + 2 * SIZE, here, inside, w, factor, sums2, squares2)
        if N > 3:
            sums3, squares3 = _add(x + 3 * SIZE, here, inside, w, factor, sums3, squares3)
    into = out + rows
    more = tl.zeros((ROWS * PARTS,), tl.float32)
    if BIASED:
        more = tl.load(bias + lines, mask=there, other=0.0).to(tl.float32)
    _finish(sums0, squares0, eps, more, into, rows < n_out, SIZE, ROWS, PARTS, NORMED, ADDS)
    if N > 1:
        _finish(sums1, squares1, eps, more, into + n_out, rows < n_out, SIZE, ROWS, PARTS, NORMED, ADDS)
    if N > 2:
        _finish(sums2, squares2, eps, more, into + 2 * n_out, rows < n_out, SIZE, ROWS, PARTS, NORMED, ADDS)
    if N > 3:
        _finish(sums3, squares3, eps, more, into + 3 * n_out, rows < n_out, SIZE, ROWS, PARTS, NORMED, ADDS)


@triton.jit
def _add(x, here, inside, w, factor, sums, squares):
    """Add some columns more to the sums of one row of x, and of its squares."""
    some = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    return sums + w * (some * factor)[None, :], squares + some * some


@triton.jit
def _finish(
    sums, squares, eps, more, into, there,
    SIZE: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, NORMED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Finish one row's sums: bias, gate, and the sum with `out`."""
    total = tl.sum(sums, 1)
    if NORMED:
        total *= 1.0 / tl.sqrt(tl.sum(squares, 0) / SIZE + eps)
    total += more
    if PARTS == 2:
        gate, up = tl.split(tl.reshape(total, (ROWS, 2)))
        total = gate / (1.0 + tl.exp(tl.minimum(-gate, 88.0))) * up
    if ADDS:
        total += tl.load(into, mask=there, other=0.0).to(tl.float32)
    tl.store(into, total.to(into.dtype.element_ty), mask=there)
