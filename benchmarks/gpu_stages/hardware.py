"""Stage 0: the machine, the versions, and the ceilings for comparison with later figures."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from gpu_stages.setup import Setup, seconds_of

PACKAGES = (
    "torch", "triton", "numpy", "numba", "llvmlite", "transformers", "safetensors", "tokenizers", "sentencepiece",
    "click", "tqdm", "jinja2", "pytest", "hypothesis", "flash-attn",
)  # fmt: skip


def run(setup: Setup) -> None:
    record = setup.record
    record["machine"] = machine(setup)
    record["packages"] = {name: version(name) for name in PACKAGES}
    with record.attempt("numba works") as cell:  # lce cannot be imported without numba
        from lce.kernels.merge import merging  # noqa: F401

        cell["ok"] = True
    with record.attempt("attention backend") as cell:
        from lce.attention import Attention

        cell["auto"] = Attention.choose("auto").name
    for name, measure in MEASUREMENTS.items():
        with record.attempt(name) as cell:
            cell.update(measure(setup))
    with record.attempt("kernels"):
        from gpu_stages import kernels

        kernels.run(setup)


def machine(setup: Setup) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "torch_cuda": torch.version.cuda,
    }  # fmt: skip
    if setup.cuda:
        properties = torch.cuda.get_device_properties(setup.device)
        found["gpu"] = properties.name
        found["gpu_memory_bytes"] = properties.total_memory
        found["gpu_processors"] = properties.multi_processor_count
        found["gpu_capability"] = list(torch.cuda.get_device_capability(setup.device))
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
        try:
            found["nvidia_smi"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            found["nvidia_smi"] = str(error)
    return found


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def copy_rate(setup: Setup) -> dict[str, float]:
    """Return a large copy's bytes read plus written a second on the device, and a sum's bytes read a second."""
    n = 1 << (16 if setup.tiny else 30)
    source = torch.randn(n, device=setup.device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copying = 2 * source.nbytes / seconds_of(setup, lambda: target.copy_(source))
    whole = source.view(torch.int32).float()
    return {"bytes_per_s": copying, "reading_bytes_per_s": whole.nbytes / seconds_of(setup, lambda: whole.sum())}


def product_rate(setup: Setup) -> dict[str, float]:
    """Return the floating-point operations a second of a square product in bfloat16."""
    n = 64 if setup.tiny else 8192
    a, b = (torch.randn(n, n, device=setup.device, dtype=torch.bfloat16) for _ in range(2))
    return {"flops": 2 * n**3 / seconds_of(setup, lambda: a @ b)}


def transfer_rates(setup: Setup) -> dict[str, float]:
    """Return the bytes a second of copies between pinned memory and the device, each way and both at once."""
    if not setup.cuda:
        return {}
    n = 1 << (16 if setup.tiny else 30)
    hosts = [torch.empty(n, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(n, dtype=torch.uint8, device=setup.device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        current = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(current)
        with torch.cuda.stream(streams[0]):
            devices[0].copy_(hosts[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            hosts[1].copy_(devices[1], non_blocking=True)
        for stream in streams:
            current.wait_stream(stream)

    return {
        "to_device_bytes_per_s": n / seconds_of(setup, lambda: devices[0].copy_(hosts[0], non_blocking=True)),
        "to_host_bytes_per_s": n / seconds_of(setup, lambda: hosts[1].copy_(devices[1], non_blocking=True)),
        "both_ways_bytes_per_s": 2 * n / seconds_of(setup, both),
    }


def launch_rate(setup: Setup) -> dict[str, float]:
    """Return the small kernels a second that PyTorch launches from Python, and the kernels a second of a graph."""
    n = 100 if setup.tiny else 5000
    x = torch.zeros(16, device=setup.device)

    def launches() -> None:
        for _ in range(n):
            x.add_(1.0)

    launches()
    setup.synchronize()
    started = time.perf_counter()
    launches()
    setup.synchronize()
    found = {"eager_per_s": n / (time.perf_counter() - started)}
    if setup.cuda:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launches()
        found["graph_per_s"] = n / seconds_of(setup, graph.replay)
    return found


MEASUREMENTS: dict[str, Callable[[Setup], dict[str, float]]] = {
    "copy": copy_rate, "product": product_rate, "transfers": transfer_rates, "launches": launch_rate,
}  # fmt: skip
