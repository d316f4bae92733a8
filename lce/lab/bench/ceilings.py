"""Describes the machine, and measures how fast it reads memory, copies memory and multiplies matrices."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lce.system import free_memory

CPUINFO = Path("/proc/cpuinfo")
MOST_BYTES, LEAST_BYTES = 1 << 30, 1 << 26  # Bounds of the bytes of the tensor to read: far more than CPU caches hold.
Shape = tuple[int, int]  # The number of inputs and of outputs of a weight matrix.


@dataclass(frozen=True)
class Ceilings:
    """The machine's best measured rates, which bound the speed of a model.

    `reading` and `copying` are memory rates in bytes per second; a copied byte counts as two. `product` is the rate of
    matrix products in floating-point operations per second, for `rows` rows times every weight matrix of a layer.
    """

    reading: float
    copying: float
    product: float
    rows: int

    def best(self, other: Ceilings) -> Ceilings:
        """Return the higher value of each rate in `self` and `other`, two measurements with the same `rows`."""
        return Ceilings(*map(max, astuple(self), astuple(other)))


def machine() -> str:
    """Return the processor, its cores, the GPU if any, and the versions of torch and Python as text."""
    cpu = platform.processor() or platform.machine()
    for line in CPUINFO.read_text().splitlines() if CPUINFO.exists() else []:
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{cpu}, {os.cpu_count()} cores{gpu}, torch {torch.__version__} with {torch.get_num_threads()} threads, "
        f"Python {platform.python_version()}"
    )


def ceilings(shapes: Iterable[Shape], rows: int, dtype: torch.dtype, device: torch.device) -> Ceilings:
    """Measure the machine with torch's current threads. Takes 1 to 2 s and 2 GiB or, if less, 1/4 of free memory.

    `shapes` are the shapes of the weight matrices to multiply; `rows` is the number of input rows.
    """
    free = free_memory(device) or 8 * MOST_BYTES
    n = max(LEAST_BYTES, min(MOST_BYTES, free // 8)) // torch.float32.itemsize
    numbers, other = (torch.ones(n, dtype=torch.float32, device=device) for _ in range(2))
    reading = min(shortest(x.sum, device) for x in (numbers, numbers.view(torch.int64)))
    copying = shortest(lambda: other.copy_(numbers), device)
    flops = seconds = 0.0
    for n_in, n_out in shapes:
        x, weight = (torch.randn(size, n_in, device=device).to(dtype) for size in (rows, n_out))
        flops += 2.0 * rows * n_in * n_out
        seconds += min(shortest(partial(product, x, weight), device) for product in products(dtype, device))
    return Ceilings(numbers.nbytes / reading, 2 * numbers.nbytes / copying, flops / seconds, rows)


def products(dtype: torch.dtype, device: torch.device) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """Return functions that multiply `x [T, in]` by a weight `[out, in]`: PyTorch's, and oneDNN's if available."""
    found: list[Callable[[Tensor, Tensor], Tensor]] = [F.linear]
    if device.type == "cpu" and dtype == torch.float32:

        def onednn(x: Tensor, weight: Tensor) -> Tensor:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
            return out

        try:
            onednn(torch.zeros(1, 8), torch.zeros(8, 8))
            found.append(onednn)
        except (AttributeError, RuntimeError, TypeError):  # the operator is private and may be missing
            pass
    return found


def shortest(work: Callable[[], object], device: torch.device, runs: int = 5) -> float:
    """Return the seconds of the fastest of `runs` calls of `work`, after an untimed call."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    seconds = []
    for _ in range(runs + 1):
        started = now()
        work()
        seconds.append(now() - started)
    return min(seconds[1:])
