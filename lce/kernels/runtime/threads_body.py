"""The threads that share a kernel's items: how a job is published, how its items are taken, and how threads wait.

All threads share the memory of the pool. Its word `LEFT` has the number of items that no thread has taken yet and, in
higher bits, the number of threads that may take some. A thread takes items by one compare-and-swap, and only then reads
what the job is: a job cannot end before all items that were taken are done, so the job that is read is the one whose
items were taken. A thread that wakes up too late finds no items, and nobody waits for it. A thread without items spins
for a short time, then sleeps at a semaphore.

The code calls functions of the C library at addresses in the pool's memory, so it needs no linking.
"""

from typing import Any

from llvmlite import ir
from numba import types

from lce.kernels.runtime import words
from lce.kernels.runtime.compiling import call_with, features, inner, intrinsic_of, kernel

_I64, _I32 = ir.IntType(64), ir.IntType(32)
_WORD = types.intp

_BITS = 40  # bits of the number of items in the word `LEFT`
_ITEMS = (1 << _BITS) - 1
_TAKES = 2  # a thread takes the items left, divided by this number and by the number of threads
_SPIN = 50_000  # nanoseconds that a worker looks for items before it sleeps
_LONG_SPIN, _STREAK = 1_000_000, 64  # the same, after so many jobs that followed each other faster, as in decode
_SPINS = 32  # its pauses between two looks at the clock
_PATIENCE = 1000  # pauses that a caller waits for workers before it sleeps
# Nanoseconds: between jobs that are looked at together, of such a look, and of working with fewer threads.
_APART, _WINDOW, _LEAST_HOLD, _MOST_HOLD = 500_000, 3_000_000, 10_000_000, 160_000_000
_STRIKES = 2  # bad looks one after the other, because a thread that wakes up may be late once


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(_I64))


def _store(builder: Any, address: Any, value: Any) -> None:
    builder.store_atomic(value, _word(builder, address), "seq_cst", 8)


def _swap(builder: Any, address: Any, old: Any, new: Any) -> Any:
    found = builder.cmpxchg(_word(builder, address), old, new, "seq_cst", "seq_cst")
    return builder.zext(builder.extract_value(found, 1), _I64)


def _pause(builder: Any) -> None:
    arm = "neon" in features()
    kind = ir.FunctionType(ir.VoidType(), [_I32] if arm else [])
    hint = builder.module.declare_intrinsic("llvm.aarch64.hint" if arm else "llvm.x86.sse2.pause", fnty=kind)
    builder.call(hint, [ir.Constant(_I32, 1)] if arm else [])


def _call_c(builder: Any, function: Any, first: Any, second: Any) -> Any:
    kind = ir.FunctionType(_I32, [_I64, _I64])
    return builder.zext(builder.call(builder.inttoptr(function, ir.PointerType(kind)), [first, second]), _I64)


# Atomic operations on the integer at an address, in one order for all threads. `swap(address, old, new)` returns 1, or
# 0 if the integer was not `old`.
load = intrinsic_of("load", _WORD(_WORD), lambda b, at: b.load_atomic(_word(b, at), "seq_cst", 8))
store = intrinsic_of("store", types.void(_WORD, _WORD), _store)
add = intrinsic_of("add", _WORD(_WORD, _WORD), lambda b, at, x: b.atomic_rmw("add", _word(b, at), x, "seq_cst"))
swap = intrinsic_of("swap", _WORD(_WORD, _WORD, _WORD), _swap)
pause = intrinsic_of("pause", types.void(), _pause)  # lets the other thread of a core run, and saves power
call_c = intrinsic_of("call_c", _WORD(_WORD, _WORD, _WORD), _call_c)  # calls a function of C with two arguments
# The first argument of the machine code itself: what `pthread_create` gives a thread.
given = intrinsic_of("given", _WORD(), lambda b: b.ptrtoint(b.function.args[0], _I64))


@inner
def _now(pool, clock, into):
    """Return the nanoseconds of a clock. `into` is the address of 16 bytes for the C library's answer."""
    call_c(load(pool + words.CLOCK), clock, into)
    return load(into) * 1_000_000_000 + load(into + 8)


@inner
def _run(job, index, first, stop):
    """Run a job's kernel on some of the job's items, with the memory of thread number `index`."""
    memory = load(job + words.CALL_MEMORY) + index * load(job + words.CALL_STRIDE)
    call_with(load(job + words.CALL_KERNEL), first, stop, memory, job + words.CALL_ARGS)


@inner
def _wanted(pool, index):
    """Return whether thread number `index` may take items: the word `LEFT`, or 0."""
    left = load(pool + words.LEFT)
    return left if left & _ITEMS and index < left >> _BITS else 0


@inner
def _take(pool, index):
    """Run the job's kernel on items until none is left; return the number of items that this thread ran."""
    done = 0
    while True:
        left = _wanted(pool, index)
        if not left:
            return done
        n, least = left & _ITEMS, load(pool + words.LEAST)
        taken = max(least, n // (_TAKES * (left >> _BITS)))
        if n - taken < least:
            taken = n
        if swap(pool + words.LEFT, left, left - taken):
            job = load(pool + words.JOB)
            first = load(job + words.CALL_ITEMS) - n
            _run(job, index, first, first + taken)
            done += taken


@kernel
def work(first, stop, memory):
    """Run items of all jobs, for ever: what a worker does. `given` is the address of its words."""
    me = given()
    pool, index, streak = load(me + words.POOL), load(me + words.INDEX), 0
    while True:
        spins, began = 0, 0
        while not _wanted(pool, index):
            spins += 1
            if spins % _SPINS == 0:
                now = _now(pool, load(pool + words.WALL), me + words.TIME)
                began = began or now
                # A thread that spins while too few cores are free takes time from the others.
                if now - began >= (_LONG_SPIN if streak >= _STREAK and now >= load(pool + words.UNTIL) else _SPIN):
                    store(me + words.ASLEEP, 1)
                    if not _wanted(pool, index) or not swap(me + words.ASLEEP, 1, 0):
                        call_c(load(pool + words.WAIT), load(me + words.SEMAPHORE), -1)
                        swap(me + words.ASLEEP, 1, 0)  # if a signal ended the call
                    now = _now(pool, load(pool + words.WALL), me + words.TIME)
                    if now - began >= _LONG_SPIN:
                        streak = -1
                    began = 0
            pause()
        streak += 1
        done = _take(pool, index)
        if done:
            add(pool + words.DONE, done)
            if swap(pool + words.ASLEEP, 1, 0):
                call_c(load(pool + words.POST), load(pool + words.SEMAPHORE), 0)


@kernel
def run(first, stop, memory, args):
    """Run the job at the address `args`, and the jobs that follow it."""
    job = args
    while job:
        _run_job(job)
        job = load(job + words.CALL_NEXT)


@kernel
def run_chains(first, stop, memory, table):
    """Run jobs one after the other, from each of some addresses on: a chain has all its work done by one thread."""
    for number in range(first, stop):
        job = load(table + 8 * number)
        while job:
            if load(job + words.CALL_STRIDE):
                store(memory, 0)
            from_item, to_item = load(job + words.CALL_FIRST), load(job + words.CALL_ITEMS)
            call_with(load(job + words.CALL_KERNEL), from_item, to_item, memory, job + words.CALL_ARGS)
            job = load(job + words.CALL_NEXT)


@inner
def _run_job(job):
    """Run a job: with the pool's workers, or alone if another thread has the pool."""
    pool, n_threads = load(job + words.CALL_POOL), load(job + words.CALL_THREADS)
    first, stop = load(job + words.CALL_FIRST), load(job + words.CALL_ITEMS)
    memory_at, stride = load(job + words.CALL_MEMORY), load(job + words.CALL_STRIDE)
    for i in range(n_threads if stride else 0):
        store(memory_at + i * stride, 0)
    if n_threads > 1 and swap(pool + words.LOCK, 0, 1):
        now = _now(pool, load(pool + words.WALL), pool + words.TIME)
        if now < load(pool + words.UNTIL):
            n_threads = min(n_threads, load(pool + words.FEWER))
        if n_threads > 1:
            _share(pool, job, stop - first, n_threads, now)
            store(pool + words.LOCK, 0)
            return
        store(pool + words.LOCK, 0)
    _run(job, 0, first, stop)


@inner
def _share(pool, job, n, n_threads, began):
    """Run a job with workers, and look at the time that this took."""
    if began - load(pool + words.ENDED) > _APART:
        store(pool + words.BEGAN, began)
        store(pool + words.RAN, _now(pool, load(pool + words.CPU), pool + words.TIME))
        for word in (words.WORK, words.SPENT, words.SLEPT):
            store(pool + word, 0)
    store(pool + words.JOB, job)
    store(pool + words.LEAST, load(job + words.CALL_LEAST))
    store(pool + words.DONE, 0)
    store(pool + words.LEFT, n_threads << _BITS | n)
    for i in range(n_threads - 1):
        worker = pool + words.WORKERS + i * words.WORKER_BYTES
        if load(worker + words.ASLEEP) and swap(worker + words.ASLEEP, 1, 0):
            call_c(load(pool + words.POST), load(worker + words.SEMAPHORE), 0)
    own = _take(pool, 0)
    worked = _now(pool, load(pool + words.WALL), pool + words.TIME) - began
    _wait(pool, n - own)
    ended = _now(pool, load(pool + words.WALL), pool + words.TIME)
    store(pool + words.WORK, load(pool + words.WORK) + min(worked * n // max(own, 1), worked * n_threads))
    store(pool + words.SPENT, load(pool + words.SPENT) + (ended - began) * n_threads)
    store(pool + words.ENDED, ended)
    if ended - load(pool + words.BEGAN) >= _WINDOW:
        _judge(pool, n_threads, ended)


@inner
def _wait(pool, missing):
    """Wait until workers have done the items that they took."""
    spins = 0
    while load(pool + words.DONE) < missing:
        spins += 1
        if spins % _PATIENCE == 0:
            store(pool + words.ASLEEP, 1)
            before = _now(pool, load(pool + words.WALL), pool + words.TIME)
            if load(pool + words.DONE) < missing or not swap(pool + words.ASLEEP, 1, 0):
                call_c(load(pool + words.WAIT), load(pool + words.SEMAPHORE), -1)
                swap(pool + words.ASLEEP, 1, 0)
            slept = _now(pool, load(pool + words.WALL), pool + words.TIME) - before
            store(pool + words.SLEPT, load(pool + words.SLEPT) + slept)
        pause()


@inner
def _judge(pool, n_threads, now):
    """Work with fewer threads for a while if the threads of the last jobs did too little of what they could have done.

    What they did is estimated from the caller's own items: the time that the caller would have taken for all items. The
    time in which the caller was ready to run, but the system ran something else, is not the caller's.
    """
    passed = now - load(pool + words.BEGAN)
    ran = _now(pool, load(pool + words.CPU), pool + words.TIME) - load(pool + words.RAN) + load(pool + words.SLEPT)
    percent = 100 * load(pool + words.WORK) // max(load(pool + words.SPENT), 1) * min(ran, passed) // passed
    store(pool + words.PERCENT, percent)
    if percent >= load(pool + words.USEFUL):
        store(pool + words.STRIKES, 0)
        store(pool + words.HOLD, _LEAST_HOLD)
    elif add(pool + words.STRIKES, 1) >= _STRIKES - 1:
        store(pool + words.STRIKES, 0)
        store(pool + words.FEWER, max((percent * n_threads + 50) // 100, 1))
        store(pool + words.UNTIL, now + load(pool + words.HOLD))
        store(pool + words.HOLD, min(2 * load(pool + words.HOLD), _MOST_HOLD))
    store(pool + words.ENDED, 0)  # the next job begins another look
