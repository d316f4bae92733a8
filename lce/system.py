"""The machine: free memory, free disk, and the allocator's settings."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # version 1 of control groups writes about 2^63 for no limit

TRIM_THRESHOLD = 512 << 20  # bytes of freed memory that glibc keeps at the end of its heap, at most
MMAP_THRESHOLD = 32 << 20  # larger allocations are mappings of their own, returned to the system when freed

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process can still allocate on a device; None if unknown.

    CPU: the memory that the system calls available, page cache included, within the limits of the control groups. GPU:
    the device's free memory and the memory that PyTorch has reserved but not allocated.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu":
        return None
    return min((x for x in (_system(), *_groups()) if x is not None), default=None)


def free_disk(folder: Path) -> int | None:
    """Bytes that can be written in a folder, which need not exist yet; None if unknown."""
    folder = folder.absolute()
    for ancestor in (folder, *folder.parents):
        try:
            return shutil.disk_usage(ancestor).free
        except FileNotFoundError:
            continue
        except OSError:
            break
    return None


def _system() -> int | None:
    available = _numbers(MEMINFO).get("MemAvailable:")
    if available is not None:
        return available * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _groups() -> Iterator[int]:
    """The memory left under each limit of this process's control groups."""
    for line in _text(MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _group(CGROUPS, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _group(CGROUPS / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _group(root: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    """The memory left under each limit of a group and its parents. A container may not see `path`, but sees `root`."""
    here = root / path.lstrip("/")
    for folder in (here, *(parent for parent in here.parents if parent.is_relative_to(root))):
        bound = _text(folder / limit).strip()
        if not bound.isdecimal() or int(bound) >= UNLIMITED:
            continue
        used = _text(folder / usage).strip()
        if used.isdecimal():
            stat = _numbers(folder / "memory.stat")
            files = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            yield max(0, int(bound) - int(used) + files)


def _numbers(path: Path) -> dict[str, int]:
    """The numbers in a file whose lines are a name and a number, by name."""
    pairs = (line.split()[:2] for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def keep_freed_memory() -> None:
    """Make glibc reuse the buffers of one layer for the next, instead of returning them to the kernel.

    Every layer frees some megabytes of activations and allocates as much again. By default glibc returns them to the
    kernel each time, and the page faults slow a prefill down, on virtual machines most of all. The process keeps at
    most `TRIM_THRESHOLD` bytes. Allocations above `MMAP_THRESHOLD`, such as the keys of a long context, are still
    returned. Without glibc nothing happens.
    """
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD)
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)


def give_back_freed_memory() -> None:
    """Return to the kernel what `keep_freed_memory` keeps and nothing uses. Without glibc nothing happens."""
    malloc_trim = _glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _glibc(name: str) -> Callable[..., int] | None:
    """A function of the C library; None where the library does not have it."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
