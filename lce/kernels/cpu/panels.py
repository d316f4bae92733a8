"""Products of many rows in float32, with weights of any kind, and the dtypes for which they are the fastest.

PyTorch multiplies half-precision numbers slowly on processors without instructions for them: bfloat16 at an eighth of
the speed of float32. Here weights are converted to float32 as they are read, some at a time, and x is float32.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from lce.kernels.code.shared import GATES, LANES, PANEL_ROWS, PANELS, Gate
from lce.kernels.cpu.kernel import Kernels

SCRATCH = 4 << 20  # the most bytes of panels that a thread keeps, except that a panel is not divided: these fit caches
_pack, _product = Kernels("panels.pack"), Kernels("panels.product")
_thread = threading.local()  # `memory`: this thread's scratch memory for panels


class Packed(Protocol):
    """A packed matrix `[out, in]`; `padded` is the number of inputs of the panels that `panels` writes."""

    shape: tuple[int, int]

    @property
    def padded(self) -> int: ...

    def panels(self, first: int, n: int, at: int) -> None: ...


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


def product(
    x: Tensor, weight: Tensor | Packed, bias: Tensor | None, gate: Gate | None, onto: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return `x @ weight.T + bias` of `dtype`, `[T, out]`, for contiguous float32 `x [T, in]` and `weight [out, in]`.

    `gate` and `onto` are those of `lce.kernels.cpu.products.product`. Arithmetic is float32; only the result is
    rounded. Time: near that of float32 products; converting a weight takes as long as multiplying it with some ten
    rows. A row of the result has the same bits for any T and number of threads.
    """
    (n_rows, size), n, n_parts = weight.shape, len(x), 2 if gate else 1
    n_out = n_rows // n_parts
    out = torch.empty(n, n_out, dtype=dtype) if onto is None else onto
    fits = x.dtype is torch.float32 and x.is_contiguous() and x.shape[1] == size and out.is_contiguous()
    assert fits, (x.shape, x.stride(), weight.shape)
    assert out.shape == (n, n_out), out.shape
    stride = size if isinstance(weight, Tensor) else weight.padded
    panel_bytes = 4 * LANES * stride
    most = min(max(1, SCRATCH // (n_parts * panel_bytes)), -(-n_out // LANES))
    at, narrow = _scratch(most * n_parts * panel_bytes), out.dtype if bias is None else bias.dtype
    addresses = 0 if bias is None else bias.data_ptr(), out.data_ptr()
    options = GATES[gate], onto is not None, out.dtype is not narrow
    for first in range(0, n_out, most * LANES):
        n_here = min(most * LANES, n_out - first)
        n_panels = -(-n_here // LANES)
        for part in range(n_parts):
            row, to = part * n_out + first, at + part * n_panels * panel_bytes
            if isinstance(weight, Tensor):
                here = weight.data_ptr() + row * size * weight.element_size()
                _pack[weight.dtype](n_panels, here, to, n_here, size)
            else:
                weight.panels(row, n_panels, to)
        n_tasks, place = -(-n // PANEL_ROWS) * -(-n_panels // PANELS), (n, n_out, first, n_panels, size, stride)
        memory = 8 * PANEL_ROWS * LANES
        _product[narrow](n_tasks, x.data_ptr(), at, *addresses, *place, *options, memory=memory)
    return out


def _scratch(n_bytes: int) -> int:
    """Return the address, a multiple of 64, of memory that this thread keeps, because allocating it takes time."""
    memory = getattr(_thread, "memory", None)
    if memory is None or len(memory) < n_bytes + 64:
        memory = _thread.memory = torch.empty(n_bytes + 64, dtype=torch.uint8)
    return -(-int(memory.data_ptr()) // 64) * 64
