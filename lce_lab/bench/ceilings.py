"""Describes the machine, and measures how fast it reads memory, copies memory and multiplies matrices."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lce.system import free_memory

CPUINFO = Path("/proc/cpuinfo")
MOST_BYTES, LEAST_BYTES = 1 << 30, 1 << 26  # Bounds of the bytes of the tensor to read.
L3_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # such as 32768K; absent without such a cache
USUAL = (torch.float32, torch.bfloat16, torch.int8)  # The dtypes whose products are measured.
Product = Callable[[Tensor, Tensor], Tensor]
Shape = tuple[int, int]  # The number of inputs and of outputs of a weight matrix.


@dataclass(frozen=True)
class Ceilings:
    """The machine's best measured rates, which bound the speed of a model.

    `reading` and `copying` are memory rates in bytes per second; a copied byte counts as two. `products` are the rates
    of matrix products in operations per second, by dtype, for `rows` rows times every weight matrix of a layer.
    """

    reading: float
    copying: float
    products: Mapping[str, float]
    rows: int

    @property
    def fastest(self) -> str:
        """The dtype of the fastest products."""
        return max(self.products, key=self.products.__getitem__)

    @property
    def product(self) -> float:
        """The highest rate of products in any dtype."""
        return self.products[self.fastest]

    def best(self, other: Ceilings) -> Ceilings:
        """Return the higher value of each rate in `self` and `other`, two measurements with the same `rows`."""
        names = {**self.products, **other.products}
        rates = {name: max(x.products.get(name, 0.0) for x in (self, other)) for name in names}
        reading, copying = max(self.reading, other.reading), max(self.copying, other.copying)
        return Ceilings(reading, copying, rates, max(self.rows, other.rows))


def machine() -> str:
    """Return the processor, its cores, the GPU if any, and the versions of torch and Python as text."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    cpu = next(named, platform.processor() or platform.machine())
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    used = f"torch {torch.__version__} with {torch.get_num_threads()} threads, Python {platform.python_version()}"
    return f"{cpu}, {os.cpu_count()} cores{gpu}, {used}"


def ceilings(shapes: Sequence[Shape], rows: int, dtype: torch.dtype, device: torch.device) -> Ceilings:
    """Measure the machine with torch's current threads. Takes some seconds and 2 GiB or, if less, 1/4 of free memory.

    `shapes` are those of the weight matrices to multiply by `rows` input rows. Products are measured in `dtype` and the
    `USUAL` dtypes, without those that multiply the first matrix at less than half of the highest rate.
    """
    reading = reading_speed(device)
    numbers, other = (torch.ones(_most_bytes(device) // 4, dtype=torch.float32, device=device) for _ in range(2))
    copying = shortest(lambda: other.copy_(numbers), device)
    first = {x: rate(shapes[:1], min(rows, 64), x, device) for x in dict.fromkeys((*USUAL, dtype))}
    fast = [x for x, least in first.items() if 2 * least >= max(first.values())]
    found = {str(x).removeprefix("torch."): rate(shapes, rows, x, device) for x in fast}
    return Ceilings(reading, 2 * numbers.nbytes / copying, found, rows)


def reading_speed(device: torch.device) -> float:
    """Return the bytes per second at which torch's current threads read memory that no cache holds."""
    numbers = torch.ones(_most_bytes(device) // 4, dtype=torch.float32, device=device)
    return numbers.nbytes / min(shortest(x.sum, device) for x in (numbers, numbers.view(torch.int64)))


def rate(shapes: Sequence[Shape], rows: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the operations per second of products with all the matrices; 0 if torch has none in this dtype."""
    operations = seconds = 0.0
    for n_in, n_out in shapes:
        x, weight = (torch.randn(size, n_in, device=device).to(dtype) for size in (rows, n_out))
        if dtype == torch.int8:  # in the order in which torch is fastest
            weight = weight.T.contiguous().T
        operations += 2.0 * rows * n_in * n_out
        try:
            seconds += min(shortest(partial(product, x, weight), device) for product in products(dtype, device))
        except RuntimeError:
            return 0.0
    return operations / seconds


def products(dtype: torch.dtype, device: torch.device) -> list[Product]:
    """Return functions that multiply `x [T, in]` by a weight `[out, in]`: PyTorch's, and oneDNN's if available."""
    if dtype == torch.int8:
        return [lambda x, weight: torch._int_mm(x, weight.T)]
    found: list[Product] = [F.linear]
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


def _most_bytes(device: torch.device) -> int:
    """Return the bytes of a tensor that is read: far more than caches hold, but a small part of free memory."""
    cache = 1024 * int(L3_SIZE.read_text().strip().rstrip("K")) if L3_SIZE.exists() else 0
    free = free_memory(device) or 8 * MOST_BYTES
    return max(LEAST_BYTES, 4 * cache, min(MOST_BYTES, free // 8))


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
