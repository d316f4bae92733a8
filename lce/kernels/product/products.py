"""Products of a few input rows with a weight matrix, which is read once, at the speed of memory.

The kernel also does the operations around a product in a decoder layer: the norm of the input, the bias, the gate of an
MLP, and the sum with the hidden states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lce.kernels.runtime.kernel import Kernels, argument_of
from lce.kernels.runtime.shared import BEGUN_BYTES, GATES, MOST_ROWS, PRODUCT_ROWS, Gate

_product = Kernels("products.product")
_APART = 80  # the most numbers of padding behind a row of x


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: Gate | None = None,
    onto: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias`, `[T, out]`, for `x [T, in]`, T ≤ `MOST_ROWS`, `weight [out, in]`, `bias [out]`.

    With `norm [in]`, each row of x is first divided by its root mean square and multiplied by `norm`. With `gate`, the
    first half a and second half b of each result row are combined to `gate(a) * b`: `[T, out / 2]`. With `onto`, the
    result is added to that tensor in place; `into`, a slice of columns perhaps, is a tensor to write the result to.

    All other tensors are contiguous, on the CPU and of one dtype, except that `out_dtype`, `onto` and an x with a norm
    may be float32. Arithmetic is float32, rounded once at the end. A row of the result has the same bits for any T and
    number of threads. Bytes moved: the weights once. With AVX-512, eight rows in bfloat16 take less than twice as long
    as one.
    """
    (n_rows, size), dtype = weight.shape, weight.dtype
    own, out, n_out, given = around_product(x, n_rows, size, bias, norm, eps, gate, onto, out_dtype, into)
    fits = weight.is_contiguous() and own is dtype
    assert fits, (weight.stride(), dtype, x.dtype)
    memory = BEGUN_BYTES + 4 * MOST_ROWS * (2 * PRODUCT_ROWS + size + _APART + 32 * PRODUCT_ROWS)
    _product[dtype](-(-n_out // PRODUCT_ROWS), x.data_ptr(), weight.data_ptr(), *given, memory=memory)
    return out


def around_product(
    x: Tensor,
    n_rows: int,
    width: int,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: Gate | None = None,
    onto: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    into: Tensor | None = None,
) -> tuple[torch.dtype, Tensor, int, tuple[int, ...]]:
    """Check the arguments of `product` other than the matrix, whose shape is `[n_rows, width]`.

    Returns the model's dtype, which is that of `norm` if given, else of x; the output; its number of columns; and the
    kernel's arguments after the addresses of x and the matrix.
    """
    (n, size), dtype = x.shape, x.dtype if norm is None else norm.dtype
    n_out = n_rows // 2 if gate else n_rows
    fits = n <= MOST_ROWS and size == width and x.is_contiguous()
    assert fits, (x.shape, n_rows, width)
    assert bias is None or bias.dtype is dtype, bias.dtype
    out = onto if into is None else into
    out = torch.empty(n, n_out, dtype=out_dtype or dtype) if out is None else out
    assert (out.shape, out.stride(1)) == ((n, n_out), 1), (out.shape, out.stride())
    wide_x, wide_out = x.dtype is not dtype, out.dtype is not dtype
    assert not wide_x or x.dtype is torch.float32, (x.dtype, dtype)
    assert not wide_out or out.dtype is torch.float32, (out.dtype, dtype)
    bias_at, norm_at = 0 if bias is None else bias.data_ptr(), 0 if norm is None else norm.data_ptr()
    flags = GATES[gate] | (onto is not None) << 2 | wide_x << 3 | wide_out << 4
    into_at = out.data_ptr(), out.stride(0)
    return dtype, out, n_out, (bias_at, norm_at, *into_at, n, n_out, width, flags, argument_of(eps))
