"""The launch of Triton kernels, and whether they can run on this machine.

The modules whose names end in `_triton` import Triton, which comes with PyTorch for CUDA, so callers import such a
module only after `usable` or `runs_on` returned True. If the environment has `TRITON_INTERPRET=1` before Triton is
imported, kernels run in Triton's interpreter on CPU tensors, slowly and without a GPU.
"""

import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lce.progress import notice

DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # dtypes that kernels read; arithmetic is float32
ALIGNED = 16  # the bytes of which addresses of rows are multiples, so that a thread reads as many at once
MOST_ROWS = 4  # the largest number of rows of x that `products.product` takes
MOST_CHUNKS = 1 << 14  # the largest number of chunks that `choices` chooses from: one program holds all in registers


@dataclass(frozen=True, eq=False)
class LaneRows:
    """Rows of numbers of B contexts, `shape` `[heads, rows, …]` each: at most as many rows as the longest one may have.

    `table [B, heads]` (int64, on the device) has the address of each head's row 0. Rows of the first `count [1]`
    contexts may be written; the others stand in for none, so that B is one of a few numbers.
    """

    table: Tensor
    count: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype


Rows = Tensor | LaneRows  # of one context, or of several


@cache
def installed() -> bool:
    """Return whether Triton is installed and can compile."""
    return missing() is None


@cache
def missing() -> str | None:
    """Return what the kernels need and this machine lacks; None if nothing is missing.

    On a GPU, one kernel is compiled and launched to find out, which takes a second if it is not in Triton's cache. If
    the launch fails, a notice on stderr says that PyTorch's operators are used instead.
    """
    if importlib.util.find_spec("triton") is None:
        return "the triton package, which comes with PyTorch for CUDA"
    if interpreting() or not torch.cuda.is_available():
        return None
    try:
        from lce.kernels.runtime.trial import store_one

        launch(store_one, (1,), torch.empty(1, device="cuda"))
        torch.cuda.synchronize()
    except Exception as error:  # any error of a C compiler, a linker or a driver
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        notice(f"Triton's kernels do not run here ({why}); PyTorch's operators are used")
        return f"a Triton that can compile here ({why})"
    return None


def interpreting() -> bool:
    """Return whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable(x: Tensor) -> bool:
    """Return whether kernels can run on a tensor's device, or be compiled for a tensor on `meta`."""
    return (x.is_cuda or x.is_meta or interpreting()) and installed()


def runs_on(x: Tensor) -> bool:
    """Return whether the kernels take a tensor: on a GPU or on `meta`, of a dtype in `DTYPES`, without a gradient."""
    return (x.is_cuda or x.is_meta) and x.dtype in DTYPES and not x.requires_grad and installed()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start a kernel's programs in the current stream, on the device of its first argument; return without waiting.

    The first argument is a tensor, or a tuple that begins with one. CUDA starts at most 2^31 - 1 programs along the
    first axis of a grid and 65,535 along each other axis. For tensors on `meta` the kernel is only compiled.
    """
    assert all(n < 65_536 for n in grid[1:]), f"a grid of {grid}"
    if 0 in grid:
        return
    first: Any = args[0]
    while isinstance(first, tuple):
        first = first[0]
    device = first.device
    if device.type == "meta":
        kernel.warmup(*args, grid=grid, **options)
    elif device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        with torch.cuda.device(device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)
