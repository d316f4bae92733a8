"""Free memory and cores, bounded by control groups; free disk; threads that wait, and processes that fork."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from lce import system
from tests.command import output

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
    assert 1 << 20 < available < 1 << 50
    assert system.free_memory(torch.device("meta")) is None


def test_the_memory_that_the_system_calls_available(machine: Path) -> None:
    assert system.free_memory(CPU) == 4000 * 1024
    (machine / "MEMINFO").unlink()
    assert system.free_memory(CPU) is None, "unknown, without /proc/meminfo"


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
    assert abs(free - shutil.disk_usage(tmp_path).free) < 1 << 30
    monkeypatch.chdir(tmp_path)
    assert system.free_disk(Path("made")) is not None
    (tmp_path / "file").write_text("")
    assert system.free_disk(tmp_path / "file" / "below") is None


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({}, 8),
        ({"jobs/mine/cpu.max": "max 100000"}, 8),
        ({"jobs/mine/cpu.max": "300000 100000"}, 3),
        ({"jobs/mine/cpu.max": "150000 100000"}, 2),
        ({"jobs/mine/cpu.max": "5000 100000"}, 1),
        ({"jobs/mine/cpu.max": "300000 100000", "jobs/cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "400000 100000"}, 4),
        ({"cpu.max": "9900000 100000"}, 8),
        ({"cpu.max": "what is this"}, 8),
        ({"cpu.max": "1 0"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "250000"}, 8),
    ],
)
def test_usable_cores(limits: dict[str, str], cores: int, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores are open to the process; control groups of both versions may leave it fewer."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (machine / "MEMBERSHIP").write_text("3:cpu,cpuacct:/outside\n0::/jobs/mine\n")
    for name, text in limits.items():
        file = machine / "CGROUPS" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert system.usable_cores() == cores


def test_threads_follow_the_environment_before_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for cores in (1, 3, 64):
        monkeypatch.setattr(system, "usable_cores", lambda cores=cores: cores)
        assert system.default_threads() == min(8, cores)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert system.default_threads() is None


def test_passive_waiting_is_set_unless_the_user_has_a_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    system.wait_passively()
    assert not os.environ  # torch is loaded: OpenMP has read its settings
    monkeypatch.delitem(sys.modules, "torch")
    for mine in system.PASSIVE:
        monkeypatch.setattr(os, "environ", {mine: "mine"})
        system.wait_passively()
        assert os.environ == {mine: "mine"}
    monkeypatch.setattr(os, "environ", {})
    system.wait_passively()
    assert os.environ == system.PASSIVE


def test_the_peak_of_the_process() -> None:
    peak = system.peak_memory()
    assert 10 << 20 < peak["process"] < 1 << 50
    status = Path("/proc/self/status")
    if status.exists():
        said = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        assert peak["process"] <= int(said) * 1024 <= system.peak_memory()["process"] + (64 << 20)


PARENT = """
import os, sys, torch, warnings
import lce
warnings.simplefilter("ignore")
folder = sys.argv[1]

def fork(what, *threads):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    for n in threads:
        torch.set_num_threads(n)
        for call in (lambda: engine.generate([5], max_tokens=1), lambda: lce.load(folder, dtype="float16")):
            try:
                call()
                print(what, n, "fine", flush=True)
            except lce.UsageError as error:
                print(what, n, error, flush=True)
    os._exit(0)

torch.set_num_threads(1)
engine = lce.load(folder)
engine.generate(list(range(2, 202)), max_tokens=2)
fork("one thread", 1, 2)
torch.set_num_threads(2)
fork("two threads, nothing computed by them", 2)
engine.generate(list(range(2, 202)), max_tokens=2)
fork("two threads", 2, 1)
"""


@pytest.mark.slow
def test_a_child_of_a_process_with_threads_is_refused_before_it_hangs(tiny_model: Path) -> None:
    said = output(PARENT, tiny_model).splitlines()
    assert len(said) == 10
    refused = [answer for answer in said if not answer.endswith(" fine")]
    assert refused == said[6:8]
    for answer in refused:
        assert answer.startswith("two threads 2 this process was forked from one that had computed with several")
        assert "torch.set_num_threads(1)" in answer
