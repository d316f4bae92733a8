"""Free memory, bounded by control groups, and the free disk of a folder that need not exist."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from lce import system

CPU = torch.device("cpu")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 4,000 KiB available, in no control group."""
    for name in ("MEMINFO", "MEMBERSHIP", "CGROUPS"):
        monkeypatch.setattr(system, name, tmp_path / name)
    (tmp_path / "MEMINFO").write_text("MemTotal:  9000 kB\nMemFree:  100 kB\nMemAvailable:  4000 kB\nHugePages:  0\n")
    return tmp_path


def group(folder: Path, limit: str, usage: int, stat: str, v1: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(stat)


def test_this_machine() -> None:
    available = system.free_memory(CPU)
    assert available is not None
    assert 1 << 20 < available < 1 << 50
    assert system.free_memory(torch.device("meta")) is None


def test_the_memory_that_the_system_calls_available(machine: Path) -> None:
    assert system.free_memory(CPU) == 4000 * 1024
    (machine / "MEMINFO").unlink()
    assert (system.free_memory(CPU) or 0) > 0, "free pages, without /proc/meminfo"


def test_a_control_group_bounds_it_and_page_cache_does_not_count(machine: Path) -> None:
    (machine / "MEMBERSHIP").write_text("0::/jobs/mine\n")
    group(machine / "CGROUPS/jobs/mine", "max", 500_000, "")
    assert system.free_memory(CPU) == 4000 * 1024
    group(machine / "CGROUPS/jobs", "900000", 600_000, "anon 1\nactive_file 30000\ninactive_file 4000\n")
    assert system.free_memory(CPU) == 334_000, "a parent's limit"
    group(machine / "CGROUPS/jobs/mine", "500000", 700_000, "")
    assert system.free_memory(CPU) == 0


def test_control_groups_of_version_1(machine: Path) -> None:
    (machine / "MEMBERSHIP").write_text("5:cpu:/\n4:memory:/seen/from/outside\n0::/\n")
    stat = "active_file 7\ntotal_active_file 1000\ntotal_inactive_file 500\n"
    group(machine / "CGROUPS/memory", "800000", 100_000, stat, v1=True)
    assert system.free_memory(CPU) == 701_500
    group(machine / "CGROUPS/memory", "9223372036854771712", 100_000, stat, v1=True)
    assert system.free_memory(CPU) == 4000 * 1024


def test_the_free_disk_of_a_folder_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = system.free_disk(tmp_path / "to" / "be" / "made")
    assert free is not None
    assert abs(free - shutil.disk_usage(tmp_path).free) < 1 << 30
    monkeypatch.chdir(tmp_path)
    assert system.free_disk(Path("made")) is not None
    (tmp_path / "file").write_text("")
    assert system.free_disk(tmp_path / "file" / "below") is None
