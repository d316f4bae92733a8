"""Products of a few input rows with a weight matrix, which is read once, on GPUs."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lce.kernels.product.blocks import BlockMatrix, BlockType
from lce.kernels.product.blocks_triton import stored_in, weights
from lce.kernels.runtime.launching import MOST_ROWS, launch

_COLUMNS = 1024  # numbers of each weight row that a program reads at a time: each thread reads 16 bytes
_TILE = 16_384  # bytes of weights that a program reads at a time
_PROGRAMS = 512  # programs that keep a GPU with 132 processors busy


def product(
    x: Tensor,
    weight: Tensor | BlockMatrix,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    onto: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `x @ weight.T`, `[T, out]`, for `x [T, in]` and `weight [out, in]`, and the operations around the product.

    The options are those of `product.products.product`. T is up to `MOST_ROWS`. The tensors are contiguous, on
    one GPU and of the dtypes named there. Arithmetic is float32, rounded once at the end. One launch. Bytes moved: the
    weights once, and x once from the cache for each program.
    """
    (n, size), kind = x.shape, None if isinstance(weight, Tensor) else weight.kind
    dtype = weight.dtype if isinstance(weight, Tensor) else (x if norm is None else norm).dtype
    n_rows, width = weight.shape
    n_parts = 2 if gated else 1
    n_out = n_rows // n_parts
    fits = 0 < n <= MOST_ROWS and size == width and n_rows == n_parts * n_out
    assert fits, (x.shape, weight.shape)
    out = x.new_empty(n, n_out, dtype=out_dtype or dtype) if onto is None else onto
    assert out.shape == (n, n_out), (out.shape, n, n_out)
    some = [x, out, *(tensor for tensor in (weight, bias, norm) if isinstance(tensor, Tensor))]
    fits = all(y.is_contiguous() and y.dtype in (dtype, torch.float32) for y in some)
    assert fits, [(y.stride(), y.dtype) for y in some]
    columns = min(_COLUMNS, triton.next_power_of_2(size))  # a multiple of any group
    row_bytes = _COLUMNS * (4 if kind else dtype.itemsize)  # of weights in registers
    rows = max(n_parts, _TILE // row_bytes // (1 if n == 1 else 2))
    while rows > n_parts and n_rows < rows * _PROGRAMS:
        rows //= 2
    shape = Product(size, n, rows // n_parts, columns, n_parts, onto is not None, kind)
    given = tuple(() if tensor is None else (tensor,) for tensor in (bias, norm))
    stored = weight if isinstance(weight, Tensor) else stored_in(weight)
    launch(_product, (triton.cdiv(n_rows, rows),), x, stored, *given, out, n_out, eps, P=shape, num_warps=4)
    return out


@dataclass(frozen=True)
class Product:
    """The constants for which the kernel `_product` is compiled."""

    size: int  # the number of inputs
    n: int  # the number of rows of x
    rows: int  # numbers of each output row that a program computes
    columns: int  # inputs that a program reads at a time
    parts: int  # weight rows for each number of the result: 2 with a gate, else 1
    adds: bool  # whether the result is added to the output
    kind: BlockType | None = None  # the type of the weights' blocks; None: `weight` is a plain matrix


@triton.jit
def _product(x, weight, bias, norm, out, n_out, eps, P: tl.constexpr):
    """Compute `P.rows` numbers of each row of `out`, from `P.parts` times as many weight rows.

    With two parts, each weight row from the first half of the matrix is followed by its counterpart from the second
    half. The products are divided by the root mean square of x only at the end, so x is read once. A state has the sums
    of products and of squares for one row of x, in registers.
    """
    rows = tl.program_id(0) * P.rows + tl.arange(0, P.rows)
    of_part = tl.arange(0, P.rows * P.parts)
    lines = tl.program_id(0) * P.rows + of_part // P.parts
    there = lines < n_out
    lines += of_part % P.parts * n_out
    state0 = _none(P.rows * P.parts, P.columns)
    state1, state2, state3 = state0, state0, state0
    for first in range(0, P.size, P.columns):
        here = first + tl.arange(0, P.columns)
        inside = here < P.size
        if P.kind is None:
            at, those = weight + lines.to(tl.int64)[:, None] * P.size + here[None, :], there[:, None] & inside[None, :]
            w = tl.load(at, mask=those, other=0.0, eviction_policy="evict_first").to(tl.float32)
        else:
            w = weights(weight, lines, there, first, P.rows * P.parts, P)
        factor = tl.where(inside, 1.0, 1.0)
        if len(norm):
            factor = tl.load(norm[0] + here, mask=inside, other=0.0).to(tl.float32)
        state0 = _add(x, here, inside, w, factor, state0)
        if P.n > 1:
            state1 = _add(x + P.size, here, inside, w, factor, state1)
        if P.n > 2:
            state2 = _add(x + 2 * P.size, here, inside, w, factor, state2)
        if P.n > 3:
            state3 = _add(x + 3 * P.size, here, inside, w, factor, state3)
    into = out + rows
    more = tl.where(there, 0.0, 0.0)
    if len(bias):
        more = tl.load(bias[0] + lines, mask=there, other=0.0).to(tl.float32)
    _finish(state0, eps, more, into, rows < n_out, norm, P)
    if P.n > 1:
        _finish(state1, eps, more, into + n_out, rows < n_out, norm, P)
    if P.n > 2:
        _finish(state2, eps, more, into + 2 * n_out, rows < n_out, norm, P)
    if P.n > 3:
        _finish(state3, eps, more, into + 3 * n_out, rows < n_out, norm, P)


@triton.jit
def _none(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the first state of a row of x: zero sums of products `[ROWS, COLUMNS]` and of squares `[COLUMNS]`."""
    return tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((COLUMNS,), tl.float32)


@triton.jit
def _add(x, here, inside, w, factor, state):
    """Add the columns `here` of one row of x, times the weights `w`, to the row's state; return the new state."""
    some = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    return state[0] + w * (some * factor)[None, :], state[1] + some * some


@triton.jit
def _finish(state, eps, more, into, there, norm, P: tl.constexpr):
    """Finish one row: apply the norm, the bias `more` and the gate, add the old output (`P.adds`), and store."""
    total = tl.sum(state[0], 1)
    if len(norm):
        total *= 1.0 / tl.sqrt(tl.sum(state[1], 0) / P.size + eps)
    total += more
    if P.parts == 2:
        gate, up = tl.split(total.reshape(P.rows, 2))
        total = gate / (1.0 + tl.exp(tl.minimum(-gate, 88.0))) * up
    if P.adds:
        total += tl.load(into, mask=there, other=0.0).to(tl.float32)
    tl.store(into, total.to(into.dtype.element_ty), mask=there)
