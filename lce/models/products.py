"""The one door to the kernels that the layers of a model are made of: products with weights, norms, gates, turns.

Each function takes the kernel that the tensors allow, and PyTorch's operators where there is none. Nothing else in
this room asks which kernel or device will run.
"""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from torch import Tensor

from lce.kernels.cpu import elementwise
from lce.kernels.cpu.compiling import MOST_ROWS
from lce.kernels.cpu.elementwise import runs_on
from lce.kernels.cpu.numbers import STORED
from lce.kernels.cpu.products import product
from lce.kernels.cuda import launching
from lce.profiling import timed
from lce.weights.packed import ROW_BLOCK, Matrix, PackedMatrix, Stacked

SHARED_ROWS = MOST_ROWS  # rows of several texts that share a product and keep the bits that each has alone
SCRATCH = 64 << 20  # bytes of unpacked rows that a product of many rows takes at a time
_thread = threading.local()
# An operator that is not part of PyTorch's public interface.
_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@timed("products")
def linear(
    x: Tensor, weight: Matrix, bias: Tensor | None = None, *, norm: Tensor | None = None, eps: float = 0.0,
    gated: bool = False, onto: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply `x [T, in]` with `weight [out, in]` transposed, plus `bias [out]`. Time: O(T · in · out).

    With `norm [in]` x is normalised first, as `rms_norm` does. `gated` takes SiLU of the first half of the result times
    the second: `[T, out / 2]`. With `onto` the result is added to that tensor, in place. A few rows take a kernel that
    reads the weights at the speed of memory, and rounds once at the end; on a GPU it is one launch. On a CPU each of up
    to `MOST_ROWS` rows has the bits that it has alone.
    """
    few = len(x) <= MOST_ROWS
    if not isinstance(weight, Tensor):
        if few:
            return weight.product(x.contiguous(), bias, norm=norm, eps=eps, gated=gated, onto=onto)
    elif few and x.is_cpu and _plain(x, weight, onto):
        return product(x, weight, bias, norm=norm, eps=eps, gated=gated, onto=onto)
    elif len(x) <= launching.MOST_ROWS and launching.runs_on(x) and _plain(x, weight, onto):
        from lce.kernels.cuda import products

        return products.product(x, weight, bias, norm=norm, eps=eps, gated=gated, onto=onto)
    if norm is not None:
        x = rms_norm(x, norm, eps)
    if onto is not None and x.is_cuda and bias is None and not gated and isinstance(weight, Tensor):
        return onto.addmm_(x, weight.T)  # one launch, which adds before it rounds
    out = _product_of_many(x, weight, bias)
    if gated:
        out = silu_mul(out)
    return out if onto is None else onto.add_(out)


def _plain(x: Tensor, weight: Tensor, onto: Tensor | None) -> bool:
    """Return whether the kernel takes these tensors as they lie."""
    if x.dtype not in STORED or weight.dtype is not x.dtype or x.requires_grad or weight.requires_grad:
        return False
    return x.is_contiguous() and weight.is_contiguous() and (onto is None or onto.is_contiguous())


def rows_of(weight: Tensor | PackedMatrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows `ids [T]` of a matrix, `[T, in]`; packed rows are unpacked to `dtype`."""
    return F.embedding(ids, weight) if isinstance(weight, Tensor) else weight.rows(ids, dtype)


def _product_of_many(x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
    """Multiply in float32 on a CPU by oneDNN, which PyTorch uses only for narrower dtypes; unpack packed weights.

    On AMD processors oneDNN is about twice as fast as the MKL routine behind `torch.nn.functional.linear`, and as
    exact.
    """
    if isinstance(weight, Stacked):
        return torch.cat([_product_of_many(x, *part) for part in weight.with_biases(bias)], dim=1)
    if not isinstance(weight, Tensor):
        return _product_of_unpacked(x, weight, bias)
    if _ONEDNN and x.dtype == torch.float32 and not x.is_cuda:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def _product_of_unpacked(x: Tensor, weight: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Unpack up to `SCRATCH` bytes of rows at a time. The thread keeps the memory, so that its pages stay mapped."""
    n_rows, size = weight.shape
    block = min(n_rows, max(ROW_BLOCK, SCRATCH // (size * x.element_size()) // ROW_BLOCK * ROW_BLOCK))
    needed, memory = block * size * x.element_size(), getattr(_thread, "memory", None)
    if memory is None or len(memory) < needed:
        memory = _thread.memory = torch.empty(needed, dtype=torch.uint8)
    scratch = memory[:needed].view(x.dtype).view(block, size)
    if block == n_rows:
        return _product_of_many(x, weight.unpacked(0, scratch), bias)
    whole = x.new_empty(len(x), n_rows)
    for first in range(0, n_rows, block):
        rows = weight.unpacked(first, scratch[: n_rows - first])
        part = None if bias is None else bias[first : first + len(rows)]
        whole[:, first : first + len(rows)] = _product_of_many(x, rows, part)
    return whole


@timed("norms")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide `x [..., D]` by its root mean square, times `weight [D]`; computed in float32 for any dtype."""
    if runs_on(x):
        return elementwise.rms_norm(x, weight, eps)
    if launching.runs_on(x):
        from lce.kernels.cuda import elementwise as on_gpu

        return on_gpu.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def norm_heads(q: Tensor, q_weight: Tensor, k: Tensor, k_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Apply `rms_norm` to queries and to keys, `[heads, T, D]` each; on a GPU in one launch."""
    if launching.runs_on(q):
        from lce.kernels.cuda import elementwise as on_gpu

        return on_gpu.rms_norm_two(q, q_weight, k, k_weight, eps)
    return rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)


@timed("activations")
def silu_mul(x: Tensor) -> Tensor:
    """Multiply SiLU of the first half of `x [T, 2·D]` with the second half: `[T, D]`."""
    if runs_on(x):
        return elementwise.silu_mul(x)
    if launching.runs_on(x):
        from lce.kernels.cuda import elementwise as on_gpu

        return on_gpu.silu_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def merge_heads(out: Tensor) -> Tensor:
    """Put the heads' outputs `[H, T, D]` side by side, `[T, H · D]`; a view for one token."""
    n = out.shape[1]
    return out.reshape(1, -1) if n == 1 else out.transpose(0, 1).reshape(n, -1)


def turns(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of `positions · frequencies [D/2]` (float64), times `scale`: `[*positions.shape, D/2]`
    each.
    """
    if positions.is_cuda and dtype in launching.DTYPES and launching.installed():
        from lce.kernels.cuda import elementwise as on_gpu

        cos, sin = on_gpu.turns(positions, frequencies, scale, dtype)
        return cos, sin
    angles = positions.to(torch.float64)[..., None] * frequencies
    cos, sin = angles.cos(), angles.sin_()
    if scale != 1:
        cos, sin = cos.mul_(scale), sin.mul_(scale)
    return cos.to(dtype), sin.to(dtype)
