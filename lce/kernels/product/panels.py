"""Products of many rows with weights of any kind, and the dtypes in which they are the fastest.

PyTorch multiplies half-precision numbers slowly on processors without instructions for them, bfloat16 at an eighth of
the speed of float32; and its threads wait for each other, long where other programs use the cores.
"""

import os
import threading
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from lce.kernels.runtime import levels, shared
from lce.kernels.runtime.kernel import DTYPES, Kernels
from lce.kernels.runtime.shared import FEW_ROWS, GATES, MOST_ROWS, PACKED_ROWS, PANEL_COLUMNS, PANEL_ROWS, Gate

SCRATCH = 4 << 20  # the most bytes of unpacked weights that a thread keeps: these fit caches
PACKED = 16 << 20  # the most bytes of packed rows of x that a thread keeps, except that it packs a task's rows
_MEMORY = 4 * PANEL_ROWS * (2 * PANEL_COLUMNS + shared.PANEL_INPUTS + 34)  # of a thread, in bytes
_LEAST_PACKED = 1 << 17  # the smallest number of numbers that a thread packs: fewer take less time than waking a thread
_pack, _product, _plain = Kernels("panels.pack"), Kernels("panels.product"), Kernels("few_rows.plain")
_thread = threading.local()  # `memory`: this thread's scratch memory, by its use


class Packed(Protocol):
    """A packed matrix `[out, in]`, whose rows `unpacked` writes, and whose products with few rows `sums` writes."""

    shape: tuple[int, int]

    def unpacked(self, first: int, out: Tensor) -> Tensor: ...

    def sums(self, x: Tensor, out: Tensor) -> None: ...


@cache
def slow_dtypes() -> frozenset[torch.dtype]:
    """Return the half-precision dtypes that PyTorch multiplies more slowly than float32 on this processor.

    The answer follows the variables that restrict lce or oneDNN to an older processor's instructions.
    """
    has, level = torch.cpu.get_capabilities(), os.environ.get("LCE_CPU", "")
    most = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL"
    wide = level not in ("v3", "v4", "arm64")
    newest = most.upper() in ("ALL", "DEFAULT") or "AVX10" in most.upper()
    bfloat16 = any(has.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    float16 = any(has.get(name) for name in ("avx512_fp16", "amx_fp16"))
    found = {torch.bfloat16, torch.float16}
    if wide and bfloat16 and (newest or any(name in most.upper() for name in ("BF16", "FP16", "AMX"))):
        found.remove(torch.bfloat16)
    if wide and float16 and (newest or "FP16" in most.upper()):
        found.remove(torch.float16)
    return frozenset(found)


@cache
def has_tiles(dtype: torch.dtype) -> bool:
    """Return whether PyTorch multiplies matrices of a dtype by the processor's tiles (AMX)."""
    return (
        dtype is torch.bfloat16 and torch.cpu.get_capabilities().get("amx_bf16", False) and dtype not in slow_dtypes()
    )


@cache
def arithmetic(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which `product` multiplies weights of a dtype; None where PyTorch is faster.

    PyTorch is faster where the processor has instructions for products of matrices (AMX) or, on ARM, of bfloat16.
    """
    if dtype not in DTYPES:
        return None
    if dtype is torch.bfloat16 and levels.current().has("avx512bf16"):
        return None if has_tiles(dtype) else dtype
    return torch.float32 if dtype is torch.float32 or dtype in slow_dtypes() else None


def product(
    x: Tensor, weight: Tensor | Packed, bias: Tensor | None, gate: Gate | None, onto: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `x @ weight.T + bias` of `dtype`, `[T, out]`, for contiguous `x [T, in]` and `weight [out, in]`.

    x is float32, or bfloat16 where `arithmetic` says so. `gate` and `onto` are those of
    `products.product`. Sums are float32; only the result is rounded. Time: near that of the processor's
    products in the dtype of x; up to `MOST_ROWS` rows read the weights once, as they lie. A row of the result has the
    same bits for any T and number of threads.
    """
    (n_rows, size), n = weight.shape, len(x)
    n_out = n_rows // 2 if gate else n_rows
    out = torch.empty(n, n_out, dtype=dtype) if onto is None else onto
    fits = x.is_contiguous() and x.shape[1] == size and out.is_contiguous() and out.shape == (n, n_out)
    assert fits, (x.shape, x.stride(), weight.shape, out.shape)
    if x.dtype is torch.bfloat16 and size % 2:  # numbers are multiplied in pairs
        x = x.float()
    at_once = max(1, PACKED // (4 * size * PANEL_COLUMNS)) * PANEL_COLUMNS
    for first in range(0, n, at_once):
        here = slice(first, first + at_once) if n > at_once else ...
        _multiply(x[here], weight, bias, gate, onto is not None, out[here])
    return out


def _multiply(
    x: Tensor, weight: Tensor | Packed, bias: Tensor | None, gate: Gate | None, adds: bool, out: Tensor
) -> None:
    """Write what `product` returns, or with `adds` add it, to `out [T, out]`."""
    (n, size), n_out, n_parts = x.shape, out.shape[1], 2 if gate else 1
    in_place = isinstance(weight, Tensor) and weight.dtype in (x.dtype, *_widened())
    kept = weight.dtype if isinstance(weight, Tensor) and in_place else x.dtype
    narrow = kept
    if not in_place and narrow is torch.float32:  # unpacked weights of a model of another dtype, perhaps
        narrow = out.dtype if bias is None else bias.dtype
    kernel, options = _product[kept, narrow], (GATES[gate], adds, out.dtype is not narrow)
    if n <= MOST_ROWS and (not isinstance(weight, Tensor) or x.dtype in (torch.float32, weight.dtype)):
        sums = _sums(x, weight)
        given = None, sums, 4 * n_out, bias, out, n, n_out, 0, n_out, sums.shape[1], *options
        kernel(-(-n_out // PANEL_ROWS), *given, memory=_MEMORY, least=-(-_LEAST_PACKED // (PANEL_ROWS * n)))
        return
    packed_at = pack(x[None])
    row_bytes = size * x.itemsize
    most = n_out if in_place else max(PANEL_ROWS, SCRATCH // (n_parts * row_bytes) // PANEL_ROWS * PANEL_ROWS)
    for first in range(0, n_out, most):
        n_here = min(most, n_out - first)
        if in_place:
            assert isinstance(weight, Tensor)
            stored = weight
        else:
            stored = _scratch("weights", n_parts * n_here * size, x.dtype).view(n_parts * n_here, size)
            for part in range(n_parts):
                rows, here = stored[part * n_here : (part + 1) * n_here], part * n_out + first
                if isinstance(weight, Tensor):
                    rows.copy_(weight[here : here + n_here])
                else:
                    weight.unpacked(here, rows)
        half = n_here * size * stored.itemsize
        block = packed_at, stored, half, bias, out, n, n_out, first, n_here, size, *options
        kernel(-(-n_here // PANEL_ROWS) * -(-n // PANEL_COLUMNS), *block, memory=_MEMORY)


def _sums(x: Tensor, weight: Tensor | Packed) -> Tensor:
    """Return `x @ weight.T` in float32, `[T, -]` with padding behind a row, for T ≤ `MOST_ROWS`, in thread memory."""
    n_rows, size = weight.shape
    n_tasks = -(-n_rows // FEW_ROWS)
    sums = _scratch("sums", len(x) * n_tasks * FEW_ROWS, torch.float32).view(len(x), -1)
    if isinstance(weight, Tensor):
        kernel = _plain[weight.dtype, x.dtype]
        kernel(n_tasks, x, weight, sums, len(x), n_rows, size, memory=4 * shared.FEW_INPUTS * FEW_ROWS)
    else:
        weight.sums(x, sums)
    return sums


def pack(x: Tensor) -> int:
    """Pack matrices `x [H, T, in]` for products with rows of other matrices; return the address of the panels.

    The panels of a matrix have `T`, rounded up to a multiple of `PACKED_ROWS`, times `in` numbers. They lie in this
    thread's memory, which the next call of `pack` overwrites. Numbers of a row of x lie side by side. Panels are
    float32, or bfloat16 where `arithmetic` says bfloat16; then `in` is even.
    """
    n_matrices, n, size = x.shape
    matrix, row, one = (stride * x.itemsize for stride in x.stride())
    assert one == x.itemsize, x.stride()
    n_tasks = n_matrices * -(-n // PACKED_ROWS)
    packed = _scratch("x", n_tasks * PACKED_ROWS * size, torch.float32)
    least = -(-_LEAST_PACKED // (PACKED_ROWS * size))
    _pack[x.dtype](n_tasks, x, packed, n, size, matrix, row, least=least)
    return packed.data_ptr()


def _scratch(use: str, n: int, dtype: torch.dtype) -> Tensor:
    """Return n numbers of memory that this thread keeps for a use, because allocating memory takes time."""
    kept: dict[str, Tensor] = _thread.__dict__.setdefault("memory", {})
    if use not in kept or len(kept[use]) < n * dtype.itemsize:
        kept[use] = torch.empty(n * dtype.itemsize, dtype=torch.uint8)
    return kept[use][: n * dtype.itemsize].view(dtype)


@cache
def _widened() -> frozenset[torch.dtype]:
    """Return the dtypes of weights that the kernel widens to float32 itself."""
    return frozenset(dtype for dtype in (torch.bfloat16, torch.float16) if arithmetic(dtype) is not dtype)
