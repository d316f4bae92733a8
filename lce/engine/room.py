"""How much room there is: memory that may still be taken, and space on the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # control groups of the first version say about 2^63 for no limit


def memory(device: torch.device) -> int | None:
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


def disk(folder: Path) -> int | None:
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
