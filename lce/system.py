"""The machine: free memory and disk, processor cores, and how the allocator and waiting threads behave.

Imports no torch before it is used: `wait_passively` must be called before torch is loaded.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lce.errors import UsageError

if TYPE_CHECKING:
    import torch

MEMINFO = Path("/proc/meminfo")
MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # version 1 of control groups writes about 2^63 for no limit
_MEMORY_FILES = {  # by the version of control groups: the limit, the usage, and what statistics begin with
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}

TRIM_THRESHOLD = 512 << 20  # bytes of freed memory that glibc keeps at the end of its heap, at most
MMAP_THRESHOLD = 32 << 20  # larger allocations are mappings of their own, returned to the system when freed

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "0"}

_threaded: set[int] = set()  # ids of this process or its ancestors that used several threads
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device, PyTorch's unused ones included; None if unknown."""
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return free_host_memory() if device.type == "cpu" else None


def free_host_memory() -> int | None:
    """Return the bytes that the system calls available, within the limits of control groups; None if unknown."""
    limits, available = [*_groups()], _numbers(MEMINFO).get("MemAvailable:")
    if available is not None:
        limits.append(available * 1024)
    else:
        with suppress(ValueError, OSError):
            limits.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def free_disk(folder: Path) -> int | None:
    """Return the bytes that can be written in a folder, which need not exist yet; None if unknown."""
    try:
        return shutil.disk_usage(_existing(folder)).free
    except OSError:
        return None


def disk_name(folder: Path) -> str:
    """Return a name for the disk of a folder, which need not exist yet: folders on one disk have one name."""
    try:
        return f"disk {os.stat(_existing(folder)).st_dev}"
    except OSError:
        return f"disk of {folder.absolute()}"


def memory_name(device: torch.device) -> str:
    """Return a name for the memory of a device, one for all ways to write the device."""
    if str(device) != "cuda":
        return str(device)
    import torch

    return f"cuda:{torch.cuda.current_device() if torch.cuda.is_available() else 0}"


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists. Raises OSError where a file stands in the way."""
    folder = folder.absolute()
    found = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    if not found.is_dir():
        raise NotADirectoryError(found)
    return found


def usable_cores() -> int:
    """Return how many cores this process can keep busy: its affinity, within the quotas of its control groups."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # only Linux has it
        cores = os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas())]))


def default_threads() -> int | None:
    """Return how many threads to use: torch's default, at most `usable_cores`; None if the environment sets them."""
    if any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        return None
    import torch

    return min(torch.get_num_threads(), usable_cores())


def wait_passively() -> None:
    """Make threads that wait for others sleep soon instead of spinning; call it before torch is loaded.

    OpenMP threads that wait for the slowest one spin, on a busy machine even on the core that the slowest one needs.
    Some 20 microseconds of spinning remain: kernels of a decode step follow each other within that, and to wake a
    thread takes longer. A setting that the environment has already is left alone.
    """
    if not any(name in os.environ for name in PASSIVE):
        os.environ.update(PASSIVE)


def uses_threads() -> None:
    """Record that this process computes with several threads; call it before such work.

    OpenMP's threads do not survive a fork, and a child that needs them hangs. So this raises `UsageError` in a process
    forked after its parent called it, unless the process computes with one thread.
    """
    import torch

    if torch.get_num_threads() == 1:
        return
    here = os.getpid()
    if here not in _threaded:
        if _threaded:
            raise UsageError(
                "this process was forked from one that had computed with several threads, which would hang here; call "
                "torch.set_num_threads(1) in it, or start processes by multiprocessing's 'spawn' and load there"
            )
        _threaded.add(here)


def peak_memory() -> dict[str, int]:
    """Return the most bytes that this process has had: resident in memory, and allocated on a GPU if it uses one."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        peaks["gpu"] = sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
    return peaks


def _groups() -> Iterator[int]:
    """Yield the memory left under each limit of this process's control groups."""
    for folder, version in _folders("memory"):
        limit, usage, prefix = _MEMORY_FILES[version]
        bound, used = (_text(folder / name).strip() for name in (limit, usage))
        if bound.isdecimal() and used.isdecimal() and int(bound) < UNLIMITED:
            stat = _numbers(folder / "memory.stat")
            files = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            yield max(0, int(bound) - int(used) + files)


def _quotas() -> Iterator[float]:
    """Yield the processor cores under each limit of this process's control groups."""
    for folder, version in _folders("cpu"):
        if version == 2:
            words = _text(folder / "cpu.max").split()
        else:
            words = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            yield int(words[0]) / int(words[1])  # no limit is "max" or -1


def _folders(controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folders with a controller's limits for this process, parents too, and their control groups' version."""
    for line in _text(MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = CGROUPS / controller if controllers else CGROUPS
            here = root / path.lstrip("/")
            for folder in (here, *here.parents):
                if folder.is_relative_to(root):
                    yield folder, 1 if controllers else 2


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers in a file whose lines are a name and a number, by name."""
    pairs = (line.split()[:2] for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def keep_freed_memory() -> None:
    """Make glibc reuse the buffers of one layer for the next. Does nothing without glibc.

    Every layer frees some megabytes of activations and allocates as much again. By default glibc returns them to the
    kernel each time, and the page faults slow a prefill down, on virtual machines most of all. The process keeps at
    most `TRIM_THRESHOLD` bytes; allocations above `MMAP_THRESHOLD`, such as a long context's keys, are still returned.
    """
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD)
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)


def give_back_freed_memory() -> None:
    """Return unused memory that `keep_freed_memory` kept to the kernel. Does nothing without glibc."""
    malloc_trim = _glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _glibc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; None if the library lacks it."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
