"""A plugin of pytest that runs kernels for arm64 in qemu-aarch64, while the rest of a test runs on this processor.

`LCE_CPU=arm64 python -m pytest -p tests.kernels.arm64.emulator tests/kernels/choose/test_choices.py` runs tests so.
Their kernels are loaded, and their jobs made, as on an arm64 processor; only the call of `threads.run` goes to the
driver in qemu. A page of memory that a kernel touches is sent there, and after the call the bytes that have changed are
written here. Kernels' threads are threads of the driver.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import threading
from functools import cache
from pathlib import Path
from select import select
from tempfile import TemporaryDirectory
from typing import IO, Any, cast

import numpy as np
import pytest

from lce.kernels.runtime import levels, library, threads, words
from tests.command import LIMIT, Process
from tests.kernels.arm64.driver import DONE, HAVE, KEPT, LENT, MISSING, PAGE, program

CPU = "neoverse-n1"  # it has the features of the level arm64, and neither bfloat16, nor products of matrices, nor SVE
RAN = "kernels that ran on arm64: "  # what the last line of the tests' output begins with
_APART = 1 << 32  # bytes between the memory of this process and qemu's own
_TRIES = 20  # of which about one in 16 fails
_THREADS = 4  # the most that tests use


@cache
def qemu() -> str | None:
    """Return the path of a qemu-aarch64 that knows the processor, if there is one."""
    for name in ("qemu-aarch64", "qemu-aarch64-static"):
        path = shutil.which(name)
        if path and CPU in Process([path, "-cpu", "help"]).communicate()[0]:
            return path
    return None


class Emulator:
    """The driver in qemu, which calls code at an address of this process."""

    def __init__(self) -> None:
        self._lock, self._memory = threading.Lock(), os.open("/proc/self/mem", os.O_RDONLY)
        self.kept: list[range] = []  # memory that the driver keeps, as only the driver writes it
        self.has: set[int] = set()  # the pages of it that the driver has got
        self.waiting: list[tuple[int, int]] = []  # threads that the next call starts: code and its argument
        driver = program()
        self.addresses = driver.addresses
        with TemporaryDirectory() as folder:
            path = Path(folder) / "driver"
            path.write_bytes(driver.file)
            path.chmod(0o700)
            for _ in range(_TRIES):
                if self._started(path):
                    return
                self.end()
        raise AssertionError("qemu's own memory is always near that of this process: are addresses not random?")

    def _started(self, path: Path) -> bool:
        """Start the driver; return whether qemu's own memory is apart from all that the driver may ask for."""
        command = [qemu() or "qemu-aarch64", "-B", "0", "-cpu", CPU, str(path)]
        self._process = Process(command, stdin=subprocess.PIPE, stderr=None)
        self._to, self._from = cast("IO[str]", self._process.stdin), cast("IO[str]", self._process.stdout)
        self._serve()
        ours, its = _memory_of("self"), _memory_of(str(self._process.pid))
        return all(a.stop + _APART <= b.start or b.stop + _APART <= a.start for a in ours for b in its)

    def end(self) -> None:
        """End the driver."""
        self._to.close()
        self._process.wait()
        self._from.close()

    def call(self, code: int, argument: int) -> None:
        """Start the threads that are waiting, and call code with an argument."""
        with self._lock:
            for thread in self.waiting:
                self._send(struct.pack("<3q", *thread, True))
                self._serve()
            self.waiting.clear()
            self._send(struct.pack("<3q", code, argument, False))
            self._serve()

    def _serve(self) -> None:
        """Send the pages that the driver asks for until it is done, and then write what has changed in them."""
        lent: dict[int, bytes] = {}
        while (page := struct.unpack("<q", self._read(8))[0]) != DONE:
            if page in lent or page in self.has:
                self._send(struct.pack("<q", HAVE))
                continue
            try:
                found = os.pread(self._memory, PAGE, page)
            except (OSError, OverflowError):
                self._send(struct.pack("<q", MISSING))
                raise AssertionError(f"a kernel touches {page:#x}, where this process has no memory") from None
            if any(page < each.stop and each.start < page + PAGE for each in self.kept):
                self.has.add(page)
                self._send(struct.pack("<q", KEPT) + found)
            else:
                lent[page] = found
                self._send(struct.pack("<q", LENT) + found)
        for page, before in lent.items():
            after = self._read(PAGE)
            if after != before:
                new = np.frombuffer(after, np.uint8)
                changed = new != np.frombuffer(before, np.uint8)
                here = np.ctypeslib.as_array((ctypes.c_uint8 * PAGE).from_address(page))
                here[changed] = new[changed]  # other bytes of the page may be Python's

    def _send(self, data: bytes) -> None:
        os.write(self._to.fileno(), data)  # all of it, as it is shorter than a pipe

    def _read(self, n: int) -> bytes:
        found = b""
        while len(found) < n:
            if not select([self._from], [], [], LIMIT)[0]:
                raise TimeoutError
            more = os.read(self._from.fileno(), n - len(found))
            if not more:
                raise AssertionError(f"the driver has ended: {self._process.wait()}")
            found += more
        return found


def _memory_of(process: str) -> list[range]:
    """Return the memory of a process, without its stack and what Linux itself maps, where no kernel's data are."""
    lines = [line.split() for line in Path("/proc", process, "maps").read_text().splitlines()]
    bounds = [line[0].split("-") for line in lines if not line[-1].startswith("[") or line[-1] == "[heap]"]
    return [range(int(first, 16), int(stop, 16)) for first, stop in bounds]


class _Libc:
    """The functions of the C library that start kernels' threads, in the driver."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator

    def pthread_create(self, _thread: Any, _kind: None, code: ctypes.c_void_p, argument: ctypes.c_void_p) -> int:
        self._emulator.waiting.append((code.value or 0, argument.value or 0))
        return 0

    def sem_init(self, semaphore: ctypes.c_void_p, _shared: int, _count: int) -> None:
        ctypes.memset(semaphore, 0, 16)


class Plugin:
    """Sends the calls of kernels to an emulator, and says at the end which kernels it ran."""

    def __init__(self) -> None:
        self._emulator, self._names, self._patch = Emulator(), dict[int, str](), pytest.MonkeyPatch()
        self._load, self._address = library.load, library.address
        self._patch.setattr(library, "load", self._loaded)
        self._patch.setattr(library, "address", self._named)
        self._patch.setattr(levels, "current", levels.asked)  # which refuses no level
        pool, at = threads._pool, self._emulator.addresses
        self._emulator.kept.append(range(pool.address, pool.address + words.WORKERS + _THREADS * words.WORKER_BYTES))
        self._patch.setattr(pool, "_libc", _Libc(self._emulator))
        for word, name in ((words.WAIT, "sem_wait"), (words.POST, "sem_post"), (words.CLOCK, "clock_gettime")):
            pool._set(pool.address + word, at[name])
        pool.with_threads(_THREADS)  # at once: the driver keeps the pool's memory as it is at the first call
        run = library.address("threads.run", None)
        self._patch.setattr(threads, "_entry", lambda: lambda *args: self._emulator.call(run, args[-1]))

    def _loaded(self, code: bytes) -> int:
        at = self._load(code)
        self._emulator.kept.append(range(at, at + len(code)))
        return at

    def _named(self, name: Any, kind: Any = None) -> int:
        at = self._address(name, kind)
        if isinstance(name, str):
            self._names[at] = library.file_name(name, kind)
        return at

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """A kernel has run if the driver has the page where its code begins."""
        ran = sorted(name for at, name in self._names.items() if at in self._emulator.has)
        terminalreporter.write_line(RAN + " ".join(ran))

    def pytest_unconfigure(self) -> None:
        self._patch.undo()
        self._emulator.end()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Plugin())
