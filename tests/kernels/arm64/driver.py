"""The driver: a program for Linux on arm64 that calls kernels. `emulator` runs it in qemu-aarch64.

It reads calls from its standard input. Its memory has no page of the caller's at first: a thread that touches a page
gets a signal, whose handler asks for the page's bytes on the standard output and puts them at the same address. So
addresses mean the same in the driver and in the process that calls it. After a call, the driver sends back the pages
that it was lent.

It is written in the language of kernels and compiled as they are. Only what enters and leaves the system is written in
instructions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from lce.kernels.runtime.compiling import call, inner, intrinsic_of, machine_code
from lce.kernels.runtime.threads_body import add, given, load, store, swap

PAGE = 4096
DONE = 1  # what the driver sends after a call; before, it sends addresses of pages, which are multiples of 4096
HAVE, LENT, KEPT, MISSING = range(4)  # answers about a page; a page that is kept is not sent back

_BASE = 0x1000_0000  # the address of the program's file in its memory
_DATA = _BASE + 0x10_0000  # its words, and then the addresses of the pages that it was lent
_LOCK, _N_LENT, _BOX, _LENT = _DATA, _DATA + 8, _DATA + 16, _DATA + PAGE
_MOST_LENT = 1 << 17  # pages

_STUBS = {  # instructions
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
    "clock_gettime": (  # as the function of the C library
        0xD2800E28,  # mov x8, #113
        0xD4000001,  # svc #0
        0xD65F03C0,  # ret
    ),
    "spawn": (  # (flags of clone, end of the thread's stack, its code, the code's argument)
        0xAA0203EA,  # mov x10, x2
        0xAA0303EB,  # mov x11, x3
        0xD2801B88,  # mov x8, #220
        0xD4000001,  # svc #0
        0xB4000040,  # cbz x0, to the new thread's code, behind `ret`
        0xD65F03C0,  # ret
        0xAA0B03E0,  # mov x0, x11
        0xD61F0140,  # br x10
    ),
    "handler": (  # of a signal: calls `fetch` with the address of what the system says about the signal
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
_CALL_OF_FETCH = 20  # where `bl` is in `handler`, in bytes
_STUBS_AT = {name: _BASE + 256 + 64 * i for i, name in enumerate(_STUBS)}
_HANDLER = _STUBS_AT["handler"]

# Linux's numbers on arm64: of system calls, of what `futex` does, of the signal, and of flags.
_READ, _WRITE, _EXIT, _FUTEX, _ACTION, _UNMAP, _MOVE, _MAP = 63, 64, 94, 98, 134, 215, 216, 222
_WAIT, _WAKE = 128, 129
_SEGV, _WITH_INFO = 11, 4
_MEMORY, _ANYWHERE, _THERE = 7, 0x22, 3  # readable, writable and executable; private and anonymous; moved to an address
_THREAD, _STACK = 0x50F00, 1 << 20  # what a thread shares with the others: all; and bytes


def _stub(name: str, n_args: int) -> Callable[..., Any]:
    def emit(builder: Any, *args: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word] * n_args)
        return builder.call(builder.inttoptr(word(_STUBS_AT[name]), ir.PointerType(kind)), args)

    return intrinsic_of(name, types.intp(*[types.intp] * n_args), emit)


_syscall, _spawn = _stub("syscall", 7), _stub("spawn", 4)


@inner
def _receive(at, n):
    """Read n bytes."""
    while n > 0:
        got = _syscall(_READ, 0, at, n, 0, 0, 0)
        if got <= 0:  # the caller has ended
            _syscall(_EXIT, 0, 0, 0, 0, 0, 0)
        at += got
        n -= got


@inner
def _send(at, n):
    """Write n bytes."""
    while n > 0:
        sent = _syscall(_WRITE, 1, at, n, 0, 0, 0)
        at += sent
        n -= sent


@inner
def _lock():
    """Wait until no other thread talks with the caller."""
    while not swap(_LOCK, 0, 1):
        _syscall(_FUTEX, _LOCK, _WAIT, 1, 0, 0, 0)


@inner
def _unlock():
    """Let other threads talk with the caller."""
    store(_LOCK, 0)
    _syscall(_FUTEX, _LOCK, _WAKE, 1, 0, 0, 0)


def _main():
    """Run calls, for ever: three words, which are the code, its argument, and whether a new thread is to run it."""
    for i, word in enumerate((_HANDLER, _WITH_INFO, 0, 0)):
        store(_BOX + 8 * i, word)
    _syscall(_ACTION, _SEGV, _BOX, 0, 8, 0, 0)
    _lock()
    while True:
        store(_BOX, DONE)
        _send(_BOX, 8)
        for i in range(load(_N_LENT)):
            page = load(_LENT + 8 * i)
            _send(page, PAGE)
            _syscall(_UNMAP, page, PAGE, 0, 0, 0, 0)
        store(_N_LENT, 0)
        _receive(_BOX, 24)
        code, argument, is_thread = load(_BOX), load(_BOX + 8), load(_BOX + 16)
        _unlock()
        if is_thread:
            stack = _syscall(_MAP, 0, _STACK, _MEMORY, _ANYWHERE, -1, 0)
            _spawn(_THREAD, stack + _STACK, code, argument)
        else:
            call(code, 0, 0, argument)
        _lock()


def _fetch(info):
    """Get the page that this thread has touched, unless another thread got it meanwhile.

    The page appears at its address by one system call, so no thread sees it without its bytes.
    """
    _lock()
    page = load(info + 16) & -PAGE
    store(_BOX, page)
    _send(_BOX, 8)
    _receive(_BOX, 8)
    answer = load(_BOX)
    if answer == MISSING:
        _syscall(_EXIT, 1, 0, 0, 0, 0, 0)
    if answer != HAVE:
        new = _syscall(_MAP, 0, PAGE, _MEMORY, _ANYWHERE, -1, 0)
        _receive(new, PAGE)
        _syscall(_MOVE, new, PAGE, PAGE, _THERE, page, 0)
    if answer == LENT:
        store(_LENT + 8 * load(_N_LENT), page)
        add(_N_LENT, 1)
    _unlock()


def _sem_wait():
    """Count a semaphore down. `given` is its address; its second word has the count, as the first takes a result."""
    count = given() + 8
    while True:
        n = load(count)
        if n > 0 and swap(count, n, n - 1):
            return
        _syscall(_FUTEX, count, _WAIT, 0, 0, 0, 0)


def _sem_post():
    """Count a semaphore up. `given` is its address."""
    add(given() + 8, 1)
    _syscall(_FUTEX, given() + 8, _WAKE, 1, 0, 0, 0)


class Program(NamedTuple):
    """The driver as an ELF file, and the addresses of its functions in its memory."""

    file: bytes
    addresses: dict[str, int]


def program() -> Program:
    """Compile the driver, for the level that LCE_CPU names."""
    file, addresses = bytearray(PAGE), dict(_STUBS_AT)
    for name, body in {"main": _main, "fetch": _fetch, "sem_wait": _sem_wait, "sem_post": _sem_post}.items():
        addresses[name] = _BASE + len(file)
        code = machine_code(name, body)
        file += code + bytes(-len(code) % PAGE)
    assert len(file) <= _DATA - _BASE, len(file)
    for name, instructions in _STUBS.items():
        struct.pack_into(f"<{len(instructions)}I", file, addresses[name] - _BASE, *instructions)
    place = _HANDLER + _CALL_OF_FETCH
    distance = addresses["fetch"] - place >> 2 & 0x3FF_FFFF
    struct.pack_into("<I", file, place - _BASE, 0x9400_0000 | distance)
    # For processor 183, arm64; the only segment is readable, writable and executable, and ends with zeros.
    size = _LENT + 8 * _MOST_LENT - _BASE
    header = struct.pack("<HHIQQQIHHHHHH", 2, 183, 1, addresses["main"], 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 7, 0, _BASE, _BASE, len(file), size, PAGE)
    start = b"\x7fELF\x02\x01\x01" + bytes(9) + header + segment
    file[: len(start)] = start
    return Program(bytes(file), addresses)
