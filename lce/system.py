"""The machine: memory that may still be taken, free space on disk, and how the allocator is set."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # control groups of the first version say about 2^63 for no limit

KEPT = 512 << 20  # bytes of freed memory that glibc may keep at the end of its heap
LARGE = 32 << 20  # bytes from which an allocation is a mapping of its own, given back when it is freed

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process can still take on a device; None where that is not known.

    On the CPU what the system calls available, files that it could drop included, and no more than the control groups
    allow. On a GPU also what PyTorch holds and does not use.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    if device.type != "cpu":
        return None
    return min((x for x in (_system(), *_groups()) if x is not None), default=None)


def free_disk(folder: Path) -> int | None:
    """Bytes that may be written in a folder, which need not exist yet; None where that is not known."""
    folder = folder.absolute()
    for known in (folder, *folder.parents):
        try:
            return shutil.disk_usage(known).free
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
    """What each control group above this process leaves it, of those that have a limit."""
    for line in _text(MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _group(CGROUPS, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _group(CGROUPS / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _group(root: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    """A group and its parents; in a container `path` may be one that is not seen from inside, and the root stands."""
    here = root / path.lstrip("/")
    for folder in (here, *(parent for parent in here.parents if parent.is_relative_to(root))):
        most = _text(folder / limit).strip()
        if not most.isdecimal() or int(most) >= UNLIMITED:
            continue
        used = _text(folder / usage).strip()
        if used.isdecimal():
            stat = _numbers(folder / "memory.stat")
            files = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            yield max(0, int(most) - int(used) + files)


def _numbers(path: Path) -> dict[str, int]:
    """A file's lines of a name and a number."""
    pairs = (line.split()[:2] for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def keep_freed_memory() -> None:
    """Ask glibc to hand the buffers of one layer to the next, instead of giving them back and fetching new pages.

    Every layer frees activations of some megabytes and asks for as much again. Left alone, glibc returns them to the
    kernel each time, and on a virtual machine the page faults cost a tenth of a prefill. At most `KEPT` bytes are
    kept, for the whole process; what is larger than `LARGE`, such as a long context's keys, is still given back.
    Does nothing where there is no glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, KEPT)
        mallopt(_M_MMAP_THRESHOLD, LARGE)
