"""How Triton kernels are launched: one door, through which every launch goes.

The modules of this folder import Triton, which comes with PyTorch on CUDA; nothing imports them before `usable` says
that they can run. With `TRITON_INTERPRET=1` in the environment before Triton is loaded, kernels run in Triton's
interpreter on CPU tensors: slow, and without a GPU.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lce.progress import notice

DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of kernels' inputs; arithmetic is float32
MOST_ROWS = 4  # rows of x that `products` takes; more are a product of matrices
MOST_CHUNKS = 1 << 14  # chunks that a program of `choices` chooses from, in its registers


@cache
def installed() -> bool:
    """Return whether Triton is there, and can compile: it wants a C compiler."""
    return missing() is None


@cache
def missing() -> str | None:
    """Return what kernels need and this machine lacks, or None. If there is a GPU, one kernel is run there.

    If that fails a notice says so, and PyTorch's operators serve. Takes a second if no run before has compiled it.
    """
    if importlib.util.find_spec("triton") is None:
        return "the triton package, which comes with PyTorch for CUDA"
    if interpreting() or not torch.cuda.is_available():
        return None
    try:
        from lce.kernels.cuda.trial import store_one

        launch(store_one, (1,), torch.empty(1, device="cuda"))
        torch.cuda.synchronize()
    except Exception as error:  # of a compiler, a linker, a driver
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        notice(f"Triton's kernels do not run here ({why}); PyTorch's operators are used")
        return f"a Triton that can compile here ({why})"
    return None


def interpreting() -> bool:
    """Return whether kernels run in the interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable(x: Tensor) -> bool:
    """Return whether kernels can run on this tensor."""
    return (x.is_cuda or interpreting()) and installed()


def runs_on(x: Tensor) -> bool:
    """Return whether lce takes these kernels for a tensor: on a GPU, of a dtype that they read, nothing to
    differentiate.
    """
    return x.is_cuda and x.dtype in DTYPES and not x.requires_grad and installed()


def flat(args: Any) -> Iterator[Any]:
    """Yield the arguments of a launch, those in tuples one by one."""
    for arg in args:
        if isinstance(arg, tuple):
            yield from flat(arg)
        else:
            yield arg


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a kernel's programs on the device of its first tensor, in the current stream; returns at once.

    CUDA starts at most 2^31 - 1 programs along the first axis of a grid, and 65,535 along the others.
    """
    assert all(n < 65_536 for n in grid[1:]), f"a grid of {grid}"
    if 0 in grid:
        return
    device = next(x.device for x in flat(args) if isinstance(x, Tensor))
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        with torch.cuda.device(device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)
