"""The operations of a decoder layer between matrix products: norms, gates, rotations, and copies of keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lce.kernels.runtime import launching
from lce.kernels.runtime.kernel import DTYPES, Kernel, Kernels, argument_of
from lce.kernels.runtime.shared import GATES, TAKEN_ROWS, WORD, Gate

ALONE = 1 << 15  # numbers that a thread computes in the time that waking other threads takes

_norm, _gate_mul = Kernels("elementwise.norm"), Kernels("elementwise.gate_mul")
_rotate, _append = Kernels("elementwise.rotate"), Kernels("elementwise.append")
_take_rows = Kernel("elementwise.take_rows")


def runs_on(x: Tensor) -> bool:
    """Return whether these kernels take a tensor: it is on the CPU, has a dtype in `DTYPES`, and needs no gradient."""
    return x.is_cpu and x.dtype in DTYPES and not x.requires_grad


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 0.0, dtype: torch.dtype | None = None, onto: Tensor | None = None
) -> Tensor:
    """Apply RMSNorm with `weight [D]` to each row of `x [T, D]` or `[H, T, D]`; return a contiguous tensor.

    Each row is divided by its root mean square and multiplied by `weight`, in float32; without a weight, x is only
    converted. The result has `dtype`, by default the weight's; or, in the weight's dtype, it is added to `onto`, which
    is float32, in place. Each of x, weight and result has the model's dtype or float32. Bytes moved: x and the result.
    """
    scale = x.new_empty(0) if weight is None else weight
    out = torch.empty(x.shape, dtype=dtype or scale.dtype) if onto is None else onto
    heads, n, dim = (1, *x.shape) if x.ndim == 2 else x.shape
    given = x.dtype, scale.dtype, out.dtype
    own = next((each for each in given if each is not torch.float32), torch.float32)
    fits = scale.shape == (dim if scale is weight else 0,) and out.shape == x.shape and {*given} <= {own, torch.float32}
    assert fits, (x.shape, scale.shape, out.shape, given)
    dense = scale.is_contiguous() and out.is_contiguous() and (onto is None or onto.dtype is torch.float32)
    assert dense, (scale.stride(), out.stride(), given)
    if x.stride(-1) != 1:
        x = x.contiguous()
    at, head, row = (x.data_ptr(), scale.data_ptr(), out.data_ptr()), x.stride(0) if x.ndim == 3 else 0, x.stride(-2)
    flags = sum((each is torch.float32) << bit for bit, each in enumerate(given)) | (onto is not None) << 3
    _norm[own](heads * n, *at, head, row, n, dim, flags, argument_of(eps), least=_share(dim), memory=8 * dim)
    return out


def gate_mul(x: Tensor, gate: Gate) -> Tensor:
    """Return `gate(a) * b`, `[T, D]`, for the first half a and the second half b of each row of `x [T, 2·D]`.

    x is contiguous. The result is computed in float32 and rounded once. Bytes moved: x once, the result once.
    """
    n, dim = x.shape[0], x.shape[1] // 2
    fits = x.is_contiguous() and x.shape[1] == 2 * dim
    assert fits, (x.shape, x.stride())
    out = torch.empty(n, dim, dtype=x.dtype)
    _gate_mul[x.dtype](n, x.data_ptr(), out.data_ptr(), dim, GATES[gate], least=_share(dim))
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the vectors of `x [..., D]` by angles, given as cosines and sines `cos sin [..., D/2]`, as RoPE does.

    Shapes are broadcast, to at most three leading dimensions. Dimension i is paired with dimension i + D/2. The result
    is computed in float32 and rounded once. Bytes moved: x once, the result once.
    """
    shape, turns, half, dtype = x.shape, cos.shape, x.shape[-1] // 2, x.dtype
    if turns[-1] != half or cos.dtype is not dtype or sin.shape != turns or sin.dtype is not dtype:
        raise ValueError(f"angles {list(turns)} {cos.dtype}, {list(sin.shape)} {sin.dtype} for {list(shape)}")
    if x.stride(-1) != 1:
        x = x.contiguous()
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    if len(shape) == 3 and len(turns) == 2 and turns[0] == shape[1]:  # `[H, T, D]` by `[T, D/2]`, the usual case
        lead, stride, turn_strides = (1, shape[0], shape[1]), x.stride(), (0, 0, cos.stride(0))
        x_strides = 0, stride[0], stride[1]
        out = torch.empty(shape, dtype=dtype)
    else:
        # PyTorch's own function of this name imports sympy, for 0.3 s to 2 s.
        common = np.broadcast_shapes(shape[:-1], turns[:-1])
        assert len(common) <= 3, f"{list(common)}: more than three leading dimensions"
        lead = (1,) * (3 - len(common)) + tuple(common)
        x_strides, turn_strides = _strides(x, common), _strides(cos, common)
        out = torch.empty(*common, shape[-1], dtype=dtype)
    n, at = lead[0] * lead[1] * lead[2], (x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr())
    _rotate[dtype](n, *at, *x_strides, *turn_strides, lead[1], lead[2], half, least=_share(2 * half))
    return out


def append(
    k: Tensor, v: Tensor, into_k: Tensor, into_v: Tensor, at: int, cos: Tensor | None, sin: Tensor | None
) -> None:
    """Copy `k v [G, T, D]` to rows `at..at+T-1` of `into_k into_v [G, n, D]`; if given, `cos sin [T, D/2]` rotate k.

    Bytes moved: k and v, read and written.
    """
    shape, into, dtype = k.shape, into_k.shape, k.dtype
    heads, n, dim = shape
    alike = v.shape == shape and into_v.shape == into and v.dtype is dtype is into_k.dtype is into_v.dtype
    assert alike, (shape, v.shape, into, into_v.shape)
    fits = into[0] == heads and into[2] == dim and 0 <= at <= into[1] - n
    assert fits, (shape, into, at)
    contiguous = into_k.is_contiguous() and into_v.is_contiguous()
    assert contiguous, (into_k.stride(), into_v.stride())
    k_stride, v_stride = k.stride(), v.stride()
    if k_stride[2] != 1 or v_stride[2] != 1:
        k, v = k.contiguous(), v.contiguous()
        k_stride, v_stride = k.stride(), v.stride()
    cos_at = sin_at = 0
    if cos is not None and sin is not None:
        fits = cos.shape == sin.shape == (n, dim // 2) and cos.dtype is dtype is sin.dtype
        assert fits, (cos.shape, sin.shape)
        cos, sin = cos.contiguous(), sin.contiguous()
        cos_at, sin_at = cos.data_ptr(), sin.data_ptr()
    addresses = k.data_ptr(), v.data_ptr(), cos_at, sin_at, into_k.data_ptr(), into_v.data_ptr()
    _append[dtype](heads * n, *addresses, *k_stride[:2], *v_stride[:2], at, into[1], n, dim, least=_share(dim))


def take_rows(tensors: tuple[Tensor, Tensor], index: Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return rows `index [n]` (int64, in range) of two tensors `[G, N, D]` of one dtype: two tensors `[G, n, D]`.

    On a CPU, the results use the memory of the flat tensor `into` if it is large enough: memory that an earlier layer
    used is still in the processor's caches. On a GPU, one launch copies both. Bytes moved: the rows, read and written.
    """
    one, two = tensors
    n_groups, _, dim = one.shape
    if launching.runs_on(one) and one.stride(2) == 1 and two.stride() == one.stride():
        from lce.kernels.elementwise import elementwise_triton as elementwise

        return elementwise.take_rows(one, two, index)
    words, odd = divmod(dim * one.element_size(), WORD)
    strides = one.stride()
    if odd or one.device.type != "cpu" or strides[1:] != (dim, 1) or two.stride() != strides:
        return one.index_select(1, index), two.index_select(1, index)
    assert two.shape == one.shape, two.shape
    assert index.dtype == torch.int64, index.dtype
    index = index.contiguous()
    shape = (2, n_groups, len(index), dim)
    if into is None or into.numel() < math.prod(shape):
        taken = one.new_empty(shape)
    else:
        fits = into.dtype == one.dtype and into.is_contiguous()
        assert fits, (into.dtype, into.stride())
        taken = into[: math.prod(shape)].view(shape)
    addresses = one.data_ptr(), two.data_ptr(), index.data_ptr(), taken.data_ptr()
    stride, n = strides[0] * one.element_size(), len(index)
    _take_rows(2 * n_groups * -(-n // TAKEN_ROWS), *addresses, n_groups, n, words, stride)
    return taken[0], taken[1]


def _strides(x: Tensor, common: Sequence[int]) -> tuple[int, int, int]:
    """Return the strides of x except the last, after expanding its leading dimensions to `common` and then to three."""
    strides = x.expand(*common, x.shape[-1]).stride()[:-1]
    first, second, third = (0,) * (3 - len(common)) + tuple(strides)
    return first, second, third


def _share(dim: int) -> int:
    """Return the smallest number of rows of `dim` numbers that a thread takes."""
    return ALONE // (2 * dim) or 1
