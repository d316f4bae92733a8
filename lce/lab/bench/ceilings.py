"""The machine: its name, and its ceilings, measured: reading and copying memory, and products of matrices."""

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
MOST_BYTES, LEAST_BYTES = 1 << 30, 1 << 26  # of a tensor that is read: far more than the caches hold
Shape = tuple[int, int]  # of a matrix: what goes in, what comes out


@dataclass(frozen=True)
class Ceilings:
    """The best of several tries. Bytes a second for reading and copying, which counts a byte once read and once
    written; floating-point operations a second for products, of `rows` rows with every matrix of a layer.
    """

    reading: float
    copying: float
    product: float
    rows: int

    def best(self, other: Ceilings) -> Ceilings:
        """Return the higher of two measurements, each by itself."""
        return Ceilings(
            max(self.reading, other.reading), max(self.copying, other.copying), max(self.product, other.product),
            self.rows,
        )  # fmt: skip


def machine() -> str:
    """Return the processor, its cores, the GPU if there is one, and the versions of torch and Python."""
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
    """Measure the machine with torch's threads of now. Time: a second or two. Bytes: 2 GiB, less where memory is."""
    best = Stopwatch(device)
    free = free_memory(device) or 8 * MOST_BYTES
    n = max(LEAST_BYTES, min(MOST_BYTES, free // 8)) // torch.float32.itemsize
    reading, copying = _memory(n, device, best)
    flops = seconds = 0.0
    for n_in, n_out in shapes:
        x, weight = (torch.randn(size, n_in, device=device).to(dtype) for size in (rows, n_out))
        flops += 2.0 * rows * n_in * n_out
        seconds += min(best(partial(product, x, weight)) for product in products(dtype, device))
    return Ceilings(reading, copying, flops / seconds, rows)


def _memory(n: int, device: torch.device, best: Stopwatch) -> tuple[float, float]:
    """Return bytes a second of reading `n` numbers, and of copying them, which reads and writes each byte."""
    numbers, other = (torch.ones(n, dtype=torch.float32, device=device) for _ in range(2))
    whole = numbers.view(torch.int64)
    reading = min(best(lambda: numbers.sum()), best(lambda: whole.sum()))
    return numbers.nbytes / reading, 2 * numbers.nbytes / best(lambda: other.copy_(numbers))


def products(dtype: torch.dtype, device: torch.device) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """Return the ways to multiply `x [T, in]` by a weight `[out, in]`: PyTorch's, and oneDNN's where there is one."""
    found: list[Callable[[Tensor, Tensor], Tensor]] = [F.linear]
    if device.type == "cpu" and dtype == torch.float32:

        def onednn(x: Tensor, weight: Tensor) -> Tensor:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
            return out

        try:
            onednn(torch.zeros(1, 8), torch.zeros(8, 8))
            found.append(onednn)
        except (AttributeError, RuntimeError, TypeError):  # no public operator: it may be missing
            pass
    return found


@dataclass(frozen=True)
class Stopwatch:
    """The shortest of several runs, in seconds, after one that does not count."""

    device: torch.device
    runs: int = 5

    def __call__(self, work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(self.runs + 1):
            started = self.now()
            work()
            seconds.append(self.now() - started)
        return min(seconds[1:])

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
