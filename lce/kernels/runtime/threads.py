"""The threads of CPU kernels: as many as PyTorch's, without Python, asleep while no kernel runs.

`threads_body` says how threads share a kernel. A thread that cannot be started is done without. A process
that is forked starts threads of its own. Threads end with the process; they hold nothing that it has to wait for.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lce.kernels.runtime import library, words

_MOST = 1024  # threads
_USEFUL = 70  # percent of the threads' time that kernels must have used, or fewer threads work for a while
_nothing = ctypes.c_int64()  # where the compiled `threads.run` writes that it has no result
Call = tuple[int, int, Sequence[int], int, int]  # the arguments of `run`


class Scratch:
    """Memory for kernels that run one after the other, for all threads that run a kernel together."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._n_bytes = self._first = 0

    def of(self, n_bytes: int) -> tuple[Tensor | None, int]:
        """Return memory of at least so many bytes, and the address of the first multiple of 64 in it."""
        if self._n_bytes < n_bytes:
            self._memory = memory = torch.empty(n_bytes + 63, dtype=torch.uint8)
            self._n_bytes, self._first = n_bytes, -(-memory.data_ptr() // 64) * 64
        return self._memory, self._first


class _OfThread(threading.local):
    """The scratch of each Python thread, for the kernels that it calls."""

    def __init__(self) -> None:
        self.scratch = Scratch()


own = _OfThread()


def run(address: int, n: int, args: Sequence[int], least: int, memory: int) -> None:
    """Run the kernel at an address on the items `0..n-1`; threads take `least` items or more at a time.

    Each thread has `memory` bytes of its own at an address that is a multiple of 64. The first 8 bytes are 0 when the
    thread takes its first items; the others are not initialised. If two threads call at the same time, the second one
    runs its kernel alone. Time: 1.5 us and the kernel's.
    """
    held, job = job_of(own.scratch, address, n, args, least, memory)
    run_jobs(job.buffer_info()[0])
    del held


def run_slice(job: array[int], first: int, stop: int) -> None:
    """Run a job on the items `first..stop-1`. What kernels write to their arguments is there for the next slice."""
    job[words.CALL_FIRST // 8], job[words.CALL_ITEMS // 8] = first, stop
    run_jobs(job.buffer_info()[0])


def job_of(
    scratch: Scratch, address: int, n: int, args: Sequence[int], least: int, memory: int
) -> tuple[Tensor | None, array[int]]:
    """Return the words of a job, which `words` names, and the memory that they point to."""
    number = 1 if n < 2 * least else min(n // least, torch.get_num_threads())
    pool, stride = 0, -(-memory // 64) * 64
    if number > 1:
        pool, number = _pool.address, _pool.with_threads(number)
    held, at = scratch.of(number * stride)
    return held, array("q", (0, pool, address, 0, n, least, number, at, stride, *args))


def adapt(adapts: bool) -> None:
    """Have fewer threads work for a while if threads are late, which is the default, or have all work at any time.

    Both begin with all threads. A process that is forked begins with the default.
    """
    _pool.adapt(adapts)


class Jobs:
    """Calls of kernels that run again and again, one after the other, without Python between them."""

    def __init__(self, calls: Sequence[Call], scratch: Scratch) -> None:
        self._calls, self._scratch = calls, scratch
        self._made_for = 0, 0
        self._jobs: list[array[int]] = []
        self._held: list[Tensor | None] = []

    def run(self) -> None:
        """Run all calls, on as many threads as PyTorch has now. Time: 2 us and the kernels'."""
        run_jobs(self.linked(0))

    def linked(self, following: int) -> int:
        """Return the address of the first job, after linking the last one to the job at the address `following`."""
        if (now := (_pool.address, torch.get_num_threads())) != self._made_for:
            made = [job_of(self._scratch, *call) for call in self._calls]
            self._made_for, self._held, self._jobs = now, [held for held, _ in made], [job for _, job in made]
            for job, after in pairwise(self._jobs):
                job[words.CALL_NEXT // 8] = after.buffer_info()[0]
        if not self._jobs:
            return following
        self._jobs[-1][words.CALL_NEXT // 8] = following
        return self._jobs[0].buffer_info()[0]


def run_jobs(first: int) -> None:
    """Run the job at an address, if any, and the jobs that are linked to it."""
    if first:
        _entry()(ctypes.addressof(_nothing), None, 0, 0, 0, first)


@cache
def _entry() -> Any:
    """Return the compiled `threads.run`; its first arguments are for a result, which is nothing, and for an error."""
    kinds = (ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 4)
    return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(library.address("threads.run", None))


class Pool:
    """The workers of this process, and the memory that they share, which stays until the process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._libc = ctypes.CDLL(None)
        shared = mmap.mmap(-1, words.WORKERS + _MOST * words.WORKER_BYTES)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(shared))  # workers read it even while Python ends
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
        self.n_threads, self._most = 1, _MOST
        mac = sys.platform == "darwin"  # whose semaphores without a name are the dispatch library's
        names = ("dispatch_semaphore_wait", "dispatch_semaphore_signal") if mac else ("sem_wait", "sem_post")
        for word, name in zip((words.WAIT, words.POST, words.CLOCK), (*names, "clock_gettime"), strict=True):
            self._set(self.address + word, ctypes.cast(getattr(self._libc, name), ctypes.c_void_p).value or 0)
        self._set(self.address + words.WALL, time.CLOCK_MONOTONIC)
        self._set(self.address + words.CPU, time.CLOCK_THREAD_CPUTIME_ID)
        self.adapt(True)
        self._set(self.address + words.HOLD, 10_000_000)
        self._set(self.address + words.SEMAPHORE, self._semaphore(self.address))

    def adapt(self, adapts: bool) -> None:
        """Do what `adapt` says, for this pool."""
        self._set(self.address + words.USEFUL, _USEFUL if adapts else 0)
        self._set(self.address + words.UNTIL, 0)

    def with_threads(self, number: int) -> int:
        """Return how many threads there are, at most `number`, after starting those that were missing."""
        if number > self.n_threads and self._most > self.n_threads:
            with self._lock:
                self._start(min(number, self._most))
        return min(number, self.n_threads)

    def _start(self, number: int) -> None:
        work, thread = library.address("threads.work", None), ctypes.c_size_t()
        create, before = self._libc.pthread_create, signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while self.n_threads < number:
                at = self.address + words.WORKERS + (self.n_threads - 1) * words.WORKER_BYTES
                self._set(at + words.POOL, self.address)
                self._set(at + words.INDEX, self.n_threads)
                self._set(at + words.SEMAPHORE, self._semaphore(at))
                if create(ctypes.byref(thread), None, ctypes.c_void_p(work), ctypes.c_void_p(at)):
                    self._most = self.n_threads  # the system starts no more
                    return
                self.n_threads += 1
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _semaphore(self, slot: int) -> int:
        if sys.platform == "darwin":
            create = self._libc.dispatch_semaphore_create
            create.restype = ctypes.c_void_p
            return int(create(ctypes.c_long(0)))
        self._libc.sem_init(ctypes.c_void_p(slot + words.SEMAPHORE_AT), 0, 0)
        return slot + words.SEMAPHORE_AT

    def _set(self, address: int, value: int) -> None:
        ctypes.c_int64.from_address(address).value = value


_pool = Pool()


def _renew() -> None:
    """Forget the threads of the parent, which a forked process does not have."""
    global _pool
    _pool = Pool()


os.register_at_fork(after_in_child=_renew)
