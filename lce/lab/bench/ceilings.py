"""The machine: its name and measured ceilings of reading memory, copying memory and matrix products."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lce.system import free_memory

CPUINFO = Path("/proc/cpuinfo")
MOST_BYTES, LEAST_BYTES = 1 << 30, 1 << 26  # of a tensor to read: far more than the caches
Shape = tuple[int, int]  # of a matrix: inputs, outputs


@dataclass(frozen=True)
class Ceilings:
    """The machine's best rates in several tries: `reading` and `copying` in bytes a second (copied bytes count twice),
    `product` in floating-point operations a second, for `rows` rows with every matrix of a layer.
    """

    reading: float
    copying: float
    product: float
    rows: int

    def best(self, other: Ceilings) -> Ceilings:
        """Return the higher of each rate of two measurements."""
        pairs = ((getattr(self, rate), getattr(other, rate)) for rate in ("reading", "copying", "product"))
        reading, copying, product = map(max, pairs)
        return Ceilings(reading, copying, product, self.rows)


def machine() -> str:
    """Return the processor, its cores, the GPU if any, and the versions of torch and Python."""
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
    """Measure the machine with torch's current threads. Time: 1 to 2 s. Bytes: 2 GiB, or a quarter of free memory."""
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
        except (AttributeError, RuntimeError, TypeError):  # a private operator, which may be missing
            pass
    return found


def shortest(work: Callable[[], object], device: torch.device, runs: int = 5) -> float:
    """Return the seconds of the shortest of several runs, after an untimed run."""

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
