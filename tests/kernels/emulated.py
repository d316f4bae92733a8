"""Runs the kernels for arm64 under qemu's emulation of a program, while the rest of a test runs on this processor.

`python -m pytest -p tests.kernels.emulated tests/kernels/cpu/test_choices.py`, with `LCE_CPU=arm64`, runs tests so. A
small program for arm64, the driver, runs in qemu-aarch64. It is asked for calls over a pipe. Its memory is empty at
first: when a kernel touches a page for the first time in a call, the driver gets the page's bytes from this process, at
the same address. After the call it sends the pages back, and what the kernel changed is written here. So kernels and
their arguments are the same as on a processor of arm64. Kernels' threads are threads of the driver.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from numba import types

from lce.kernels import levels
from lce.kernels.code import words
from lce.kernels.code.compiling import call, intrinsic_of, machine_code
from lce.kernels.code.threads import add, given, load, store, swap
from lce.kernels.cpu import library, threads

PAGE = 4096
_BASE = 0x1000_0000  # where the driver's file lies in its memory
_BODIES = _BASE + PAGE  # a page for each of its bodies
_DATA = _BASE + 0x10_0000  # its words, and then the addresses of the pages that it must send back
LOCK, N_PAGES, BOX, TABLE = _DATA, _DATA + 8, _DATA + 16, _DATA + PAGE
_MOST_PAGES = 1 << 17
DONE = 1  # what the driver says in the place of a page's address, after a call
HAVE, LENT, KEPT, MISSING = range(4)  # what this process answers about a page
_APART = 1 << 32  # bytes between the memory of this process and the memory that qemu itself uses

# Code that no compiler of ours makes: the words of instructions, and the names by which the driver calls them.
_STUBS = {
    "syscall": (  # (number, six arguments)
        0xAA0003E8,  # mov x8, x0
        0xAA0103E0,  # mov x0, x1
        0xAA0203E1,  # mov x1, x2
        0xAA0303E2,  # mov x2, x3
        0xAA0403E3,  # mov x3, x4
        0xAA0503E4,  # mov x4, x5
        0xAA0603E5,  # mov x5, x6
        0xD4000001,  # svc #0
        0xD65F03C0,  # ret
    ),
    "clock_gettime": (
        0xD2800E28,  # mov x8, #113
        0xD4000001,  # svc #0
        0xD65F03C0,  # ret
    ),
    "spawn": (  # (flags of clone, the end of a stack, the code of a thread, its argument)
        0xAA0203EA,  # mov x10, x2
        0xAA0303EB,  # mov x11, x3
        0xD2801B88,  # mov x8, #220
        0xD4000001,  # svc #0
        0xB4000040,  # cbz x0, to the instruction after the next
        0xD65F03C0,  # ret
        0xAA0B03E0,  # mov x0, x11
        0xD61F0140,  # br x10
    ),
    "handler": (  # of a signal: calls `fetch`, with the address of what is known about the signal
        0xD10083FF,  # sub sp, sp, #32
        0xF9000BFE,  # str x30, [sp, #16]
        0xAA0103E2,  # mov x2, x1
        0x910003E0,  # mov x0, sp
        0xAA1F03E1,  # mov x1, xzr
        0x94000000,  # bl fetch
        0xF9400BFE,  # ldr x30, [sp, #16]
        0x910083FF,  # add sp, sp, #32
        0xD65F03C0,  # ret
    ),
}
_AT = {name: _BASE + 256 + 64 * i for i, name in enumerate(_STUBS)}

_I64 = ir.IntType(64)
_READ, _WRITE, _EXIT, _FUTEX, _ACTION, _UNMAP, _MOVE, _MAP = 63, 64, 94, 98, 134, 215, 216, 222  # Linux's, on arm64
_WAIT, _WAKE = 128, 129  # of a futex of one process
_FLAGS = 0x50F00  # of clone, for a thread: CLONE_VM, FS, FILES, SIGHAND, THREAD and SYSVSEM
_HANDLER, _STACK = _AT["handler"], 1 << 20


def _caller(name: str, n: int) -> Any:
    def emit(builder: Any, *values: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64] * n)
        return builder.call(builder.inttoptr(_I64(_AT[name]), ir.PointerType(kind)), values)

    return intrinsic_of(name, types.intp(*[types.intp] * n), emit)


syscall, spawn = _caller("syscall", 7), _caller("spawn", 4)


def _driver() -> dict[str, Any]:
    """The bodies of the driver, in the language of kernels."""
    from lce.kernels.code.compiling import inner

    @inner
    def receive(at, n):
        """Read n bytes from the pipe."""
        while n > 0:
            got = syscall(_READ, 0, at, n, 0, 0, 0)
            if got <= 0:
                syscall(_EXIT, 0, 0, 0, 0, 0, 0)
            at += got
            n -= got

    @inner
    def send(at, n):
        """Write n bytes to the pipe."""
        while n > 0:
            got = syscall(_WRITE, 1, at, n, 0, 0, 0)
            at += got
            n -= got

    @inner
    def lock():
        """Take the pipe, which one thread at a time uses."""
        while not swap(LOCK, 0, 1):
            syscall(_FUTEX, LOCK, _WAIT, 1, 0, 0, 0)

    @inner
    def unlock():
        """Give the pipe back."""
        store(LOCK, 0)
        syscall(_FUTEX, LOCK, _WAKE, 1, 0, 0, 0)

    def main():
        """Answer calls of kernels, for ever: the address of the code, its argument, and whether a thread calls it."""
        store(BOX, _HANDLER)
        store(BOX + 8, 4)  # SA_SIGINFO
        store(BOX + 16, 0)
        store(BOX + 24, 0)
        syscall(_ACTION, 11, BOX, 0, 8, 0, 0)
        lock()
        while True:
            store(BOX, DONE)
            send(BOX, 8)
            for i in range(load(N_PAGES)):
                page = load(TABLE + 8 * i)
                send(page, PAGE)
                syscall(_UNMAP, page, PAGE, 0, 0, 0, 0)
            store(N_PAGES, 0)
            receive(BOX, 24)
            code, argument, is_new = load(BOX), load(BOX + 8), load(BOX + 16)
            unlock()
            if is_new:
                stack = syscall(_MAP, 0, _STACK, 3, 0x22, -1, 0)
                spawn(_FLAGS, stack + _STACK, code, argument)
            else:
                call(code, 0, 0, argument)
            lock()

    def fetch(info):
        """Get the page that a thread has touched, unless another thread has got it meanwhile."""
        page = load(info + 16) & -PAGE
        lock()
        store(BOX, page)
        send(BOX, 8)
        receive(BOX, 8)
        found = load(BOX)
        if found == MISSING:
            syscall(_EXIT, 1, 0, 0, 0, 0, 0)
        if found != HAVE:
            new = syscall(_MAP, 0, PAGE, 7, 0x22, -1, 0)  # private, without a file
            receive(new, PAGE)
            syscall(_MOVE, new, PAGE, PAGE, 3, page, 0)  # so no thread sees a page before its bytes are there
        if found == LENT:
            store(TABLE + 8 * load(N_PAGES), page)
            add(N_PAGES, 1)
        unlock()

    def sem_wait():
        """Count a semaphore down; `given` is its address. Its second word is the count, its first a result's place."""
        count = given() + 8
        while True:
            n = load(count)
            if n > 0 and swap(count, n, n - 1):
                return
            syscall(_FUTEX, count, _WAIT, 0, 0, 0, 0)

    def sem_post():
        """Count a semaphore up; `given` is its address."""
        add(given() + 8, 1)
        syscall(_FUTEX, given() + 8, _WAKE, 1, 0, 0, 0)

    return {"main": main, "fetch": fetch, "sem_wait": sem_wait, "sem_post": sem_post}


def _program() -> bytes:
    """The driver's file: an ELF file that holds the stubs and the bodies, and whose memory goes on with zeros."""
    file, at = bytearray(PAGE), dict(_AT)
    for name, body in _driver().items():
        at[name] = _BASE + len(file)
        code = machine_code(f"the driver's {name}", body)
        file += code + bytes(-len(code) % PAGE)
    assert len(file) <= _DATA - _BASE, len(file)
    for name, stub in _STUBS.items():
        code = bytearray(struct.pack(f"<{len(stub)}I", *stub))
        if name == "handler":
            struct.pack_into("<I", code, 20, 0x94000000 | (at["fetch"] - at[name] - 20 >> 2 & 0x3FF_FFFF))
        file[at[name] - _BASE : at[name] - _BASE + len(code)] = code
    _addresses.update(at)
    # A file for processor 183, arm64, with one segment that may be read, written and executed.
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 2, 183, 1, at["main"], 64, 0, 0, 64, 56, 1, 0, 0, 0)
    size = TABLE + 8 * _MOST_PAGES - _BASE
    head += struct.pack("<IIQQQQQQ", 1, 7, 0, _BASE, _BASE, len(file), size, PAGE)
    file[: len(head)] = head
    return bytes(file)


_addresses: dict[str, int] = {}


def _maps(process: int | str) -> list[range]:
    """The memory of a process, but for its stack and what the kernel of the system gives it."""
    lines = [line.split() for line in Path(f"/proc/{process}/maps").read_text().splitlines()]
    used = [line[0].split("-") for line in lines if not line[-1].startswith("[") or line[-1] == "[heap]"]
    return [range(int(first, 16), int(stop, 16)) for first, stop in used]


class Emulator:
    """The driver in qemu, and the calls that it has run."""

    def __init__(self, qemu: str) -> None:
        self._lock, self._qemu, self._own = threading.Lock(), qemu, os.open("/proc/self/mem", os.O_RDONLY)
        self.threads: list[tuple[int, int, bool]] = []  # the code of threads that the next call starts, and its argument
        self.kept: list[range] = []  # memory that the driver keeps after a call
        self._has: set[int] = set()  # the pages that it has kept
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(_program())
        os.chmod(file.name, 0o700)
        self._file = file.name
        while not self._started():
            self.process.kill()
            self.process.wait()

    def _started(self) -> bool:
        """Start the driver; return whether qemu's own memory is apart from the memory that the driver may ask for."""
        self.process = subprocess.Popen([self._qemu, self._file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._serve()
        ours, theirs = _maps("self"), _maps(self.process.pid)
        return all(a.stop + _APART <= b.start or b.stop + _APART <= a.start for a in ours for b in theirs)

    def call(self, code: int, argument: int) -> None:
        """Call code with an argument in the driver's first thread, after starting the threads that were asked for."""
        with self._lock:
            for each in (*self.threads, (code, argument, False)):
                self.process.stdin.write(struct.pack("<3q", *each))
                self._serve()
            self.threads.clear()

    def _serve(self) -> None:
        """Give the driver the pages that it asks for, until the call has ended, and take them back."""
        lent: dict[int, bytes] = {}
        while (page := struct.unpack("<q", self._read(8))[0]) != DONE:
            if page in lent or page in self._has:
                self.process.stdin.write(struct.pack("<q", HAVE))
                continue
            try:
                found = os.pread(self._own, PAGE, page)
            except (OSError, OverflowError):
                self.process.stdin.write(struct.pack("<q", MISSING))
                raise AssertionError(f"a kernel touches {page:#x}, which is no memory of this process") from None
            kept = any(page < each.stop and each.start < page + PAGE for each in self.kept)
            if kept:
                self._has.add(page)
            else:
                lent[page] = found
            self.process.stdin.write(struct.pack("<q", KEPT if kept else LENT) + found)
        for page, before in lent.items():
            after = self._read(PAGE)
            if before != after:
                new = np.frombuffer(after, np.uint8)
                changed = new != np.frombuffer(before, np.uint8)
                np.frombuffer((ctypes.c_char * PAGE).from_address(page), np.uint8)[changed] = new[changed]

    def _read(self, n: int) -> bytes:
        found = b""
        while len(found) < n:
            if not (more := self.process.stdout.read(n - len(found))):
                raise AssertionError(f"the driver ended: {self.process.wait()}")
            found += more
        return found


class _Libc:
    """The functions of the C library that kernels' threads need."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator

    def pthread_create(self, thread: Any, kind: None, code: ctypes.c_void_p, argument: ctypes.c_void_p) -> int:
        self.emulator.threads.append((code.value or 0, argument.value or 0, True))
        return 0

    def sem_init(self, semaphore: ctypes.c_void_p, shared: int, count: int) -> None:
        ctypes.memset(semaphore, 0, 16)


def emulate() -> Emulator:
    emulator = Emulator(os.environ["QEMU"])
    levels.current = levels.asked
    load_code = library.load

    def noted(code: bytes) -> int:
        at = load_code(code)
        emulator.kept.append(range(at, at + len(code)))
        return at

    library.load = noted
    pool = threads._pool
    pool._libc = _Libc(emulator)
    emulator.kept.append(range(pool.address, pool.address + words.WORKERS + 1024 * words.WORKER_BYTES))
    for word, name in ((words.WAIT, "sem_wait"), (words.POST, "sem_post"), (words.CLOCK, "clock_gettime")):
        pool._set(pool.address + word, _addresses[name])
    run = library.address("threads.run", None)
    threads._entry = lambda: lambda *args: emulator.call(run, args[-1])
    pool.with_threads(4)
    return emulator


def pytest_configure(config: pytest.Config) -> None:
    config.emulator = emulate()
