"""The machine: free memory and disk, processor cores, and settings of the allocator and of waiting threads.

Importing this module does not import torch, because `wait_passively` must be called before torch is loaded.
"""

import ctypes
import functools
import os
import resource
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lce.errors import CapacityError, UsageError
from lce.sizes import size_text

if TYPE_CHECKING:
    import torch

MEMINFO = Path("/proc/meminfo")
MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # larger limits mean no limit, for which cgroup version 1 writes about 2^63 bytes

TRIM_THRESHOLD = 512 << 20  # the most bytes of freed memory that glibc keeps at the end of its heap
MMAP_THRESHOLD = 32 << 20  # glibc maps a larger allocation separately, and unmaps the allocation when it is freed

IMPORT_SPACE = 1536 << 20  # the address space that importing torch and Numba and compiling kernels takes
IMPORT_MEMORY = 128 << 20  # the memory that importing torch and Numba takes

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "0"}

_threaded: set[int] = set()  # the process ids of this process and its ancestors that have computed with several threads


def free_memory(device: "torch.device") -> int | None:
    """Return the bytes that can be allocated on a device, including PyTorch's unused reserve; None if unknown."""
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return free_host_memory() if device.type == "cpu" else None


def free_host_memory() -> int | None:
    """Return the available bytes of host memory, within the limits of this process' cgroups; None if unknown."""
    available = _numbers(MEMINFO).get("MemAvailable:")
    return min([*_memory_limits(), *([] if available is None else [available * 1024])], default=None)


def free_disk(folder: Path) -> int | None:
    """Return the free bytes of the disk of a folder, which need not exist yet; None if unknown."""
    try:
        return shutil.disk_usage(existing(folder)).free
    except OSError:
        return None


def disk_name(folder: Path) -> str:
    """Return the name of the disk of a folder, which need not exist yet."""
    try:
        return f"disk {os.stat(existing(folder)).st_dev}"
    except OSError:
        return f"disk of {folder.absolute()}"


def memory_name(device: "torch.device") -> str:
    """Return a name for the memory of a device. `cuda` gives the name of the current GPU."""
    if str(device) != "cuda":
        return str(device)
    import torch

    return f"cuda:{torch.cuda.current_device() if torch.cuda.is_available() else 0}"


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest parent that exists. Raises `OSError` if a file is in the way."""
    folder = folder.absolute()
    if not (found := next(each for each in (folder, *folder.parents) if each.exists())).is_dir():
        raise NotADirectoryError(found)
    return found


def usable_cores() -> int:
    """Return how many cores this process can use, by its CPU affinity and the quotas of its cgroups."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # only Linux has `sched_getaffinity`
        cores = os.cpu_count() or 1
    return max(1, min([cores, *_core_limits()]))


def default_threads() -> int | None:
    """Return the number of threads for torch: its default, at most `usable_cores`; None if the environment sets one."""
    if any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        return None
    check_environment()
    import torch

    return min(torch.get_num_threads(), usable_cores())


def wait_passively() -> None:
    """Set the environment so that waiting OpenMP threads soon sleep. Call this before torch is loaded.

    By default they spin, on a busy machine even on the core that the slowest thread needs. With `PASSIVE` they spin for
    about 20 microseconds, as kernels of a decode step follow each other faster than a thread wakes up. Settings stay.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in PASSIVE):
        os.environ.update(PASSIVE)


def check_environment() -> None:
    """Raise an error if torch and Numba could not be imported here: where memory is short, torch may end the process.

    Raises `UsageError` for a wrong number of threads in the environment, `CapacityError` for too little memory.
    """
    if "torch" in sys.modules:
        return
    for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):
        text = os.environ.get(name) or "1"
        if not all(part.strip().isdecimal() and int(part) > 0 for part in text.split(",")):
            raise UsageError(f"{name} is {text!r}; expected a number of threads, 1 or more; correct it, or unset it")
    free, (limit, _) = free_host_memory(), resource.getrlimit(resource.RLIMIT_AS)
    if free is not None and free < IMPORT_MEMORY:
        has = f"{size_text(free)} is available; end other programs, or raise the limit"
        raise CapacityError(f"importing torch takes {size_text(IMPORT_MEMORY)} of memory or more, and {has}")
    if limit != resource.RLIM_INFINITY and limit < IMPORT_SPACE:
        has = f"the limit is {size_text(limit)}; raise it (ulimit -v)"
        raise CapacityError(f"importing torch takes {size_text(IMPORT_SPACE)} of address space or more, and {has}")


class InCaller(Executor):
    """An executor without threads: the caller does the work."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **options))
        except Exception as error:
            done.set_exception(error)
        return done


def executor(n_threads: int, name: str) -> Executor:
    """Start a pool of threads, or return `InCaller` if the system starts no more threads for this process."""
    pool, begin = ThreadPoolExecutor(n_threads, name), threading.Event()
    try:
        for _ in range(n_threads):  # each waits, so that the next one needs a thread of its own
            pool.submit(begin.wait)
        return pool
    except RuntimeError:
        pool.shutdown(wait=False, cancel_futures=True)
        return InCaller()
    finally:
        begin.set()


@functools.cache
def lasting_executor(n_threads: int, name: str) -> Executor:
    """Return the `executor` of this process that has a name; the first call starts its threads."""
    return executor(n_threads, name)


os.register_at_fork(after_in_child=lasting_executor.cache_clear)  # a forked process does not have the threads


def uses_threads() -> None:
    """Record that this process computes with several threads. Call this before such work.

    OpenMP's threads do not survive a fork. Raises `UsageError` in a fork of a process that called this function, and
    `CapacityError` if the system does not start that many threads: OpenMP would end the process.
    """
    import torch

    if (n := torch.get_num_threads()) == 1 or os.getpid() in _threaded:
        return
    if _threaded:
        fault = "this process was forked from one that had computed with several threads, which would hang here"
        remedy = "torch.set_num_threads(1) in it, or start processes by multiprocessing's 'spawn' and load there"
        raise UsageError(f"{fault}; call {remedy}")
    others = executor(n - 1, "lce-probe")
    others.shutdown()
    if isinstance(others, InCaller):
        fault = f"the system starts no more threads for this process, which computes with {n}"
        raise CapacityError(f"{fault}; give --threads 1 (threads=1), or raise the limit (ulimit -u)")
    _threaded.add(os.getpid())


def peak_memory() -> dict[str, int]:
    """Return the peak bytes of this process in memory (`process`) and, if it used GPUs, allocated on GPUs (`gpu`)."""
    peaks = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        peaks["gpu"] = sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
    return peaks


def _memory_limits() -> Iterator[int]:
    """Yield, for each memory limit of this process' cgroups, the bytes that the limit leaves free."""
    old, new = "memory.limit_in_bytes memory.usage_in_bytes", "memory.max memory.current"
    for folder, words in _groups("memory", old, new):
        if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[0]) < UNLIMITED:
            stat = _numbers(folder / "memory.stat")  # version 1 has the sums over a group's children as total_...
            names = [f"{kind}_file" for kind in ("active", "inactive")]
            cached = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in names)
            yield max(0, int(words[0]) - int(words[1]) + cached)


def _core_limits() -> Iterator[int]:
    """Yield the number of cores, rounded up, that each CPU quota of this process' cgroups allows."""
    for _, words in _groups("cpu", "cpu.cfs_quota_us cpu.cfs_period_us", "cpu.max"):
        if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]):
            yield -(-int(words[0]) // int(words[1]))  # "max" and "-1" mean no quota; `isdecimal` is false for both


def _groups(controller: str, old: str, new: str) -> Iterator[tuple[Path, list[str]]]:
    """Yield a controller's folders, parents too, and the words in their files: `old` in cgroups 1, `new` in 2."""
    for line in _text(MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = CGROUPS / controller if controllers else CGROUPS
            here = root / path.lstrip("/")
            for folder in (here, *here.parents):
                if folder.is_relative_to(root):
                    names = (old if controllers else new).split()
                    yield folder, " ".join(_text(folder / name) for name in names).split()


def _numbers(path: Path) -> dict[str, int]:
    pairs = (line.split()[:2] for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def keep_freed_memory() -> None:
    """Make glibc reuse the memory of one layer's activations for the next layer. Does nothing without glibc.

    By default glibc returns them to the system each time, and the page faults slow a prefill down. Now it keeps up to
    `TRIM_THRESHOLD` bytes, but returns allocations above `MMAP_THRESHOLD`, such as a long context's keys.
    """
    for number, size in ((-1, TRIM_THRESHOLD), (-3, MMAP_THRESHOLD)):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
        _glibc("mallopt", number, size)


def give_back_freed_memory() -> None:
    """Return to the system the freed memory that `keep_freed_memory` made glibc keep. Does nothing without glibc."""
    _glibc("malloc_trim", 0)


def _glibc(name: str, *numbers: int) -> None:
    if sys.platform.startswith("linux") and (function := getattr(ctypes.CDLL(None), name, None)):
        function(*numbers)
