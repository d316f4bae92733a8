"""Threads that come late: what the caller does meanwhile, how many threads work afterwards, and when workers sleep.

A pool asks the C library for the time, and has it wait and wake, by addresses in the pool's memory. Here these are
functions of a `Stage`: time passes when a kernel says so, and a worker that is woken stays asleep if it is held. So
nothing depends on how fast the machine is, or on what else it does.
"""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from lce.kernels.product.products import product
from lce.kernels.runtime import threads, words
from lce.kernels.runtime.kernel import Kernel
from lce.kernels.runtime.threads_body import add, load, pause, store
from tests.command import until

MS = 1_000_000  # nanoseconds
SPIN, LONG_SPIN, STREAK = 50_000, MS, 64  # how long a worker looks for items, and after how many jobs longer
LOOK = 3 * MS  # the time of jobs that are looked at together
N = 64  # the most items of a job
WALL, CPU, ARRIVED, OWNERS, PIECES, STATE = 0, 1, 2, 3, 3 + N, 3 + 2 * N  # 64-bit integers that a job and a test share


def act(first, stop, memory, at, wall, cpu, n_partners):
    """Run each item: let time pass for the caller, wait until `n_partners` items are run, and note who runs it."""
    for item in range(first, stop):
        add(at + 8 * WALL, wall)
        add(at + 8 * CPU, cpu)
        goal = (add(at + 8 * ARRIVED, 1) // n_partners + 1) * n_partners
        for _ in range(500_000_000):  # so that a test that fails ends
            if load(at + 8 * ARRIVED) >= goal:
                break
            pause()
        store(at + 8 * (OWNERS + item), memory)
        store(at + 8 * (PIECES + item), stop - first)


kernel = Kernel(act)
Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Stage:
    """A pool of its own, whose clocks stand still and whose workers sleep and wake as a test says.

    The workers' clock goes on by `step` at each look, so that they sleep at the second one; with 0 it stands still.
    """

    def __init__(self, n_threads: int, step: int) -> None:
        self.pool, self.step, self.workers_time, self.looks = threads.Pool(), step, 1000 * MS, 0
        self.state = (ctypes.c_int64 * STATE)(1000 * MS, 1000 * MS)
        self.n_workers = n_threads - 1
        self.held: set[int] = set()  # the workers that stay asleep when they are woken
        self.woken: list[int] = []  # the workers that the last job woke
        self._changed, self._asleep, self._wake_ups = threading.Condition(), set[int](), [0] * n_threads
        functions = {words.CLOCK: self._clock, words.WAIT: self._wait, words.POST: self._post}
        self._functions = {word: Function(function) for word, function in functions.items()}
        self._before = {word: self.word(word).value for word in functions}
        for word, function in self._functions.items():
            self.word(word).value = ctypes.cast(function, ctypes.c_void_p).value or 0

    def word(self, offset: int, thread: int = 0) -> ctypes.c_int64:
        """A word of the pool, which are the caller's too, or of a worker by its number."""
        worker = words.WORKERS + (thread - 1) * words.WORKER_BYTES
        return ctypes.c_int64.from_address(self.pool.address + offset + (worker if thread else 0))

    def _thread_of(self, semaphore: int) -> int:
        return [self.word(words.SEMAPHORE, i).value for i in range(self.n_workers + 1)].index(semaphore)

    def _clock(self, which: int, into: int) -> int:
        now = self.state[CPU if which == time.CLOCK_THREAD_CPUTIME_ID else WALL]
        if into != self.pool.address + words.TIME:
            self.workers_time += self.step
            now = self.workers_time
            self.looks += 1
        (ctypes.c_int64 * 2).from_address(into)[:] = divmod(now, 1000 * MS)
        return 0

    def _wait(self, semaphore: int, _: int) -> int:
        thread = self._thread_of(semaphore)
        with self._changed:
            while not self._wake_ups[thread]:
                self._asleep.add(thread)
                self._changed.wait()
            self._wake_ups[thread] -= 1
        return 0

    def _post(self, semaphore: int, _: int) -> int:
        thread = self._thread_of(semaphore)
        if thread:
            self.woken.append(thread)
        if thread not in self.held:
            self._wake(thread)
        return 0

    def _wake(self, thread: int) -> None:
        with self._changed:
            self._wake_ups[thread] += 1
            self._asleep.discard(thread)
            self._changed.notify_all()

    def job(self, n: int = 0, wall: int = 0, cpu: int | None = None, least: int = 1, n_partners: int = 1) -> int:
        """Run a job of n items, by default one for each thread; return how many threads ran items.

        An item takes `wall` nanoseconds, in which the caller computes for `cpu` of them.
        """
        n, self.woken, self.state[ARRIVED] = n or self.n_workers + 1, [], 0
        at = ctypes.addressof(self.state)
        kernel(n, at, wall, wall if cpu is None else cpu, n_partners, least=least, memory=8)
        return len({*self.state[OWNERS : OWNERS + n]})

    def late(self, *workers: int, **how: int) -> int:
        """Run a job while the workers with these numbers are late."""
        with self.holding(*workers):
            return self.job(**how)

    @contextmanager
    def holding(self, *workers: int) -> Iterator[None]:
        """Have workers asleep stay so if a job wakes them; they wake up behind it."""
        self.sleep()
        self.held, self.woken = {*workers}, []
        yield
        self.held = set()
        for worker in {*workers}.intersection(self.woken):
            self._wake(worker)
        self.sleep()

    def sleep(self) -> None:
        """Wait until all workers sleep, so that only a wake-up makes them look for items."""
        until(lambda: {*range(1, self.n_workers + 1)} <= self._asleep)

    def is_shared(self) -> bool:
        """Whether a job that takes no time wakes a worker."""
        self.sleep()
        self.job()
        self.sleep()
        return bool(self.woken)

    def looks_on(self, after: int) -> bool:
        """Whether the only worker still looks for items when its clock has gone on by so many nanoseconds."""
        self._see_looks()  # it has noted when it began
        self.workers_time += after
        self._see_looks()
        return not self._asleep

    def _see_looks(self) -> None:
        seen = self.looks  # the second look sees the time, and the third is behind it
        until(lambda: self.looks >= seen + 3 or self._asleep)

    def end(self) -> None:
        """Give the workers, which stay until the process ends, the C library's functions."""
        for word, value in self._before.items():
            self.word(word).value = value
        for worker in range(1, self.n_workers + 1):
            self._wake(worker)
        seen = -1
        while seen != self.looks:  # then no worker is in a function of this object
            seen = self.looks
            time.sleep(0.02)
        _ENDED.append(self)


_ENDED: list[Stage] = []  # their functions stay, as the workers do


@contextmanager
def staged(n_threads: int, step: int = LONG_SPIN) -> Iterator[Stage]:
    stage = Stage(n_threads, step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "_pool", stage.pool)
        torch.set_num_threads(n_threads)
        try:
            yield stage
        finally:
            stage.end()


@pytest.fixture
def two() -> Iterator[Stage]:
    """The caller and a worker, which sleeps."""
    with staged(2) as stage:
        stage.job()
        stage.sleep()
        yield stage


def bad(stage: Stage) -> None:
    """A job as long as a look, in which the only worker is late: half of what two threads could do."""
    assert stage.late(1, wall=LOOK // 2) == 1


def good(stage: Stage) -> None:
    """A job as long as a look, in which both threads run an item."""
    assert stage.job(wall=LOOK // 2, n_partners=2) == 2


def pass_time(stage: Stage, ns: int) -> None:
    stage.state[WALL] += ns


def test_nobody_waits_for_a_late_thread(two: Stage) -> None:
    """The caller runs all items. The worker wakes up behind the job, finds none, and shares the next one."""
    assert (two.late(1, n=N), two.woken) == (1, [1])
    assert two.job(n_partners=2) == 2


@pytest.mark.parametrize("least", [1, 3])
def test_pieces_get_smaller(two: Stage, least: int) -> None:
    """So a thread that comes late finds items, and the threads end together."""
    two.late(1, n=N, least=least)
    pieces, item = [], 0
    while item < N:
        pieces.append(two.state[PIECES + item])
        item += pieces[-1]
    assert pieces[0] == N // 4
    assert pieces == sorted(pieces, reverse=True)
    assert least <= pieces[-1] < 2 * least


def test_fewer_threads_work_after_two_bad_looks_each_time_for_longer(two: Stage) -> None:
    for hold in (10, 20, 40, 80, 160, 160):
        bad(two)
        assert two.is_shared(), "a thread may be late once"
        bad(two)
        assert not two.is_shared()
        pass_time(two, hold * MS - 1)
        assert not two.is_shared()
        pass_time(two, 1)
        assert two.is_shared()


def test_a_good_look_forgives(two: Stage) -> None:
    for _ in range(3):
        bad(two)
        good(two)
    bad(two)
    bad(two)
    pass_time(two, 10 * MS)
    for _ in range(2):
        bad(two)
    pass_time(two, 10 * MS)
    assert not two.is_shared(), "the second time is 20 ms"
    pass_time(two, 10 * MS)
    good(two)
    for _ in range(2):
        bad(two)
    pass_time(two, 10 * MS - 1)
    assert not two.is_shared()
    pass_time(two, 1)
    assert two.is_shared(), "after a good look it is 10 ms again"


def test_short_jobs_are_looked_at_together(two: Stage) -> None:
    """Jobs that follow each other within half a millisecond are one look, and others are none."""
    for gap, is_shared in ((MS // 2 + 1, True), (MS // 2, False)):
        for _ in range(40):
            two.late(1, wall=MS // 8)
            pass_time(two, gap)
        assert two.is_shared() == is_shared


@pytest.mark.parametrize(("share", "is_shared"), [(69, False), (70, True)])
def test_a_caller_that_the_system_keeps_from_running_needs_the_cores(two: Stage, share: int, is_shared: bool) -> None:
    """Both threads run an item, and the caller computes for a share of the time. Less than 70 percent are too few."""
    for _ in range(2):
        two.job(wall=LOOK // 2, cpu=LOOK // 200 * share, n_partners=2)
        two.sleep()
    assert two.is_shared() == is_shared


def test_as_many_threads_work_on_as_were_of_use() -> None:
    with staged(4) as stage:
        stage.job()
        for _ in range(2):
            assert stage.late(2, 3, wall=LOOK // 4, n_partners=2) == 2
        assert (stage.job(n_partners=2), stage.woken) == (2, [1])
        stage.sleep()
        pass_time(stage, 10 * MS)
        assert stage.job(n_partners=4) == 4


def test_a_pool_that_does_not_adapt_has_all_threads_work(two: Stage) -> None:
    bad(two)
    bad(two)
    threads.adapt(False)
    for _ in range(4):
        assert two.is_shared(), "at once, and whatever comes"
        bad(two)
    threads.adapt(True)
    bad(two)
    bad(two)
    assert not two.is_shared()


@pytest.mark.parametrize(("n_jobs", "spin"), [(1, SPIN), (STREAK - 1, SPIN), (STREAK, LONG_SPIN), (80, LONG_SPIN)])
def test_a_worker_looks_for_items_longer_where_jobs_follow_each_other(n_jobs: int, spin: int) -> None:
    with staged(2, step=0) as stage:
        for _ in range(n_jobs):
            assert stage.job(n_partners=2) == 2
        assert stage.looks_on(after=spin - 1)
        assert not stage.looks_on(after=1)
        stage.workers_time += LONG_SPIN - spin
        assert stage.job(n_partners=2) == 2
        assert stage.looks_on(after=SPIN - 1)
        assert not stage.looks_on(after=1), "a millisecond ends the series"


@pytest.mark.slow
def test_a_worker_may_sleep_between_jobs_that_follow_each_other() -> None:
    with staged(2, step=0) as stage:
        for _ in range(STREAK - 1):
            assert stage.job(n_partners=2) == 2
            assert not stage.looks_on(after=SPIN)
            stage.workers_time += LONG_SPIN - SPIN - 1
        assert stage.job(n_partners=2) == 2
        assert stage.looks_on(after=LONG_SPIN - 1)
        assert not stage.looks_on(after=1)


def test_no_worker_looks_longer_while_fewer_threads_work() -> None:
    """It would take time from the programs that the cores are busy with."""
    with staged(2, step=0) as stage:
        for _ in range(STREAK):
            stage.job(n_partners=2)
        for _ in range(2):
            stage.job(wall=LOOK // 2, cpu=0, n_partners=2)
        assert stage.looks_on(after=SPIN - 1)
        assert not stage.looks_on(after=1)


def test_bits_do_not_depend_on_how_many_threads_work() -> None:
    x, weight = torch.randn(3, 300), torch.randn(1000, 300)
    expected = product(x, weight)  # by one thread
    with staged(4) as stage:
        assert torch.equal(product(x, weight), expected)
        for late in ([3], [2, 3], [1, 2, 3]):
            with stage.holding(*late):
                assert torch.equal(product(x, weight), expected)
            assert stage.woken == [1, 2, 3]
        for _ in range(2):
            stage.late(2, 3, wall=LOOK // 4, n_partners=2)
        stage.woken = []
        assert torch.equal(product(x, weight), expected)
        assert stage.woken == [1]
