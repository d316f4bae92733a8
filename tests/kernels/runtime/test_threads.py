"""Threads share the items of a kernel: each item is run once, whatever threads there are and whenever they come."""

import os
import resource
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import carray, int64

from lce.kernels.product.products import product
from lce.kernels.runtime.kernel import Kernel, recording, seam
from lce.kernels.runtime.layer_jobs import LayerJobs
from lce.kernels.runtime.numbers import pointer
from lce.kernels.runtime.threads import Scratch, run_jobs
from tests.command import output, together

WORDS = 64  # of a thread's memory


def add_index(first, stop, memory, at):
    """Add each item's number, by way of the thread's own memory, to the item; so an item run twice shows."""
    items, own = carray(pointer(at, int64), (stop,)), carray(pointer(memory, int64), (WORDS,))
    for i in range(first, stop):
        for j in range(WORDS):
            own[j] = i
        for j in range(WORDS):
            items[i] += own[j]


kernel = Kernel(add_index)


@pytest.fixture(params=[1, 2, 4], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> int:
    torch.set_num_threads(request.param)
    return int(request.param)


def runs(n: int, times: int = 1, least: int = 1) -> bool:
    """Run the kernel on n items; return whether each item was run each time."""
    items = torch.zeros(n, dtype=torch.int64)
    for _ in range(times):
        kernel(n, items.data_ptr(), least=least, memory=8 * WORDS)
    return torch.equal(items, torch.arange(n) * WORDS * times)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 10_000])
def test_each_item_is_run_once(threads: int, n: int) -> None:
    assert all(runs(n, times=20, least=least) for least in (1, 2, 5, 100))


def test_many_small_jobs_of_one_python_thread_and_of_three_at_once(threads: int) -> None:
    assert runs(5, times=1000)
    assert together([lambda: runs(50, times=300)] * 3) == [True] * 3


def test_a_forked_process_starts_threads_of_its_own(threads: int) -> None:
    assert runs(64)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if runs(64, times=100) and n_workers() >= threads - 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert runs(64, times=100)


def n_workers() -> int:
    """The number of this process' threads that Python did not start; signals are blocked in workers."""
    statuses = [(task / "status").read_text() for task in Path("/proc/self/task").iterdir()]
    blocked = [int(line.split()[1], 16) for text in statuses for line in text.splitlines() if line.startswith("SigBlk")]
    return sum(bool(mask >> signal.SIGINT - 1 & 1) for mask in blocked)


def run_until_interrupted(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    while True:
        runs(64)


def test_interruptions_leave_the_threads_usable(threads: int) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(50):
            with pytest.raises(KeyboardInterrupt):
                run_until_interrupted(0.001 + 1e-5 * i)
            assert runs(64, times=3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


PROGRAM = """
import sys, time, torch
from tests.kernels.runtime.test_threads import n_workers, runs
torch.set_num_threads(4)
assert runs(64, times=50)
time.sleep(float(sys.argv[1]))
print(n_workers())
"""


@pytest.mark.slow
@pytest.mark.parametrize("pause", [pytest.param(0, id="spin"), pytest.param(0.05, id="sleep")])
def test_a_process_ends_beside_its_workers(pause: float) -> None:
    assert run_program(pause) == "3\n"


@pytest.mark.slow
def test_without_threads_the_caller_works_alone() -> None:
    """A default stack that fits no address space makes the system refuse every thread."""
    if resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY:
        pytest.skip("the stack is limited")
    assert run_program(0, stack=1 << 52) == "0\n"


def run_program(pause: float, stack: int = 0) -> str:
    own = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # of NumPy and PyTorch
    limit = partial(resource.setrlimit, resource.RLIMIT_STACK, (stack, resource.RLIM_INFINITY))
    return output(PROGRAM, str(pause), env=own, preexec_fn=limit if stack else None)


@pytest.mark.parametrize("uneven", [False, True])
def test_jobs_of_several_lanes_do_for_other_layers_what_was_recorded_for_one(threads: int, uneven: bool) -> None:
    """Each lane's calls make a chain for one thread, unless one lane has so much work that others would wait for it."""
    sizes = [400 if uneven and lane == 1 else 40 for lane in range(4)]
    torch.manual_seed(0)
    weights = [torch.randn(n, 96) for n in sizes]
    x = [[torch.randn(1, 96) for _ in sizes] for _ in range(4)]
    out, expected = ([[torch.zeros(1, n) for n in sizes] for _ in x] for _ in range(2))
    for layer, row in enumerate(x):
        for lane, weight in enumerate(weights):
            for _ in range(2):
                product(row[lane], weight, onto=expected[layer][lane])
    with recording([]) as calls:
        for lane, weight in enumerate(weights):
            for _ in range(2):
                product(x[0][lane], weight, onto=out[0][lane])
            seam()
    ranges = [[(each.data_ptr(), each.nbytes) for each in (*x[layer], *out[layer])] for layer in range(4)]
    jobs, first = LayerJobs(Scratch()), 0
    for _ in range(2):  # the second time, the memory of the jobs is used again
        jobs.set(calls, np.array(ranges[0]), np.array(ranges[1:]))
    for layer in reversed(range(3)):
        first = jobs.linked(layer, first)
    run_jobs(first)
    for found, wanted in zip(out, expected, strict=True):
        assert all(map(torch.equal, found, wanted))
