"""A profiler: the decorator `timed` marks functions, and a `Profile` adds up the times of calls of marked functions.

While no profile is taken, a marked call costs one more comparison. The marks are not ranges of `torch.profiler`, which
would cost ten times as much and need seconds to start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

OTHER = "Python and other"
CATEGORIES = ("products", "attention", "selection", "cache", "norms", "activations", "sampling", OTHER)


@dataclass
class Profile:
    """The profile of some work. `seconds` has the time of each category; `calls` counts calls of `timed` functions.

    The time of a `timed` call inside another one counts for the inner call's category alone. `read_bytes` counts
    the keys and values given to attention, each chosen chunk once per KV head and call, and the summaries and low-dim
    keys that a selection scores. `attention_flops` is 4 · D for each pair of a query and a key that the query sees,
    where D is the head dimension. The products that score chunks or tokens in a selection are not counted.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    calls: int = 0
    read_bytes: int = 0
    attention_flops: float = 0.0

    @property
    def total_s(self) -> float:
        """The seconds of all categories together."""
        return sum(self.seconds.values())


class _Clock:
    """A stopwatch for one profile and one thread, which adds the elapsed time to the current category."""

    def __init__(self, profile: Profile, n_kv_heads: int, chunk_size: int, wait: Callable[[], None]) -> None:
        self.profile, self.n_kv_heads, self.chunk_size, self.wait = profile, n_kv_heads, chunk_size, wait
        self.thread, self.current, self.since = threading.get_ident(), _COUNTING, 0.0
        self.change(OTHER)

    def change(self, category: str) -> str:
        """Add the time since the last change to the current category, switch to `category`, and return the old one."""
        self.wait()
        now, before = time.perf_counter(), self.current
        if before in self.profile.seconds:
            self.profile.seconds[before] += now - self.since
        self.current, self.since = category, now
        return before

    @contextmanager
    def section(self, category: str) -> Iterator[None]:
        before = self.change(category)
        try:
            yield
        finally:
            self.change(before)


_clock: _Clock | None = None  # the clock of the profile that is being taken, if any
_COUNTING = "counting"  # the category of the profile's own counting, whose time is dropped
_NOTHING = nullcontext()


Count = Callable[..., None]  # takes the clock, a marked function's result, and that function's arguments


def section(category: str, count: Callable[..., None] | None = None, *work: Any) -> AbstractContextManager[None]:
    """Add the time inside `with` to `category` of the profile, if this thread is taking one.

    If there is a `count`, the section is a call, of which `count(clock, *work)` adds the work.
    """
    clock = _clock
    if clock is None or clock.thread != threading.get_ident():
        return _NOTHING
    if count is not None:
        clock.profile.calls += 1
        with clock.section(_COUNTING):
            count(clock, *work)
    return clock.section(category)


def timed(category: str, count: Count | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator. During a profile, a call's time is added to `category`, and `count` adds the call's work."""

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            clock = _clock
            if clock is None or clock.thread != threading.get_ident():
                return function(*args, **kwargs)
            clock.profile.calls += 1
            with clock.section(category):
                out = function(*args, **kwargs)
            if count is not None:
                with clock.section(_COUNTING):
                    count(clock, out, *args, **kwargs)
            return out

        return run

    return mark


@contextmanager
def profiling(n_kv_heads: int, chunk_size: int, wait: Callable[[], None]) -> Iterator[Profile]:
    """Profile this thread's work inside `with`; an outer profile pauses. `wait` waits until all devices are idle."""
    global _clock
    profile, outer = Profile(), _clock
    _clock = clock = _Clock(profile, n_kv_heads, chunk_size, wait)
    try:
        yield profile
    finally:
        _clock = outer
        clock.change(OTHER)


def count_dense(clock: _Clock, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, unseen: int) -> None:
    """Add the bytes read and the FLOPs of a call of `Attention.dense` to the profile."""
    (n_heads, n_queries, dim), n_keys = q.shape, k.shape[1] - unseen
    clock.profile.read_bytes += (k.nbytes + v.nbytes) * n_keys // max(1, k.shape[1])
    clock.profile.attention_flops += 4.0 * n_heads * dim * n_pairs(n_queries, n_keys, causal, window)


def count_routed(clock: _Clock, q: Tensor, chunk_ids: Tensor) -> None:
    """Add the bytes read and the FLOPs of a call of `Attention.routed`, which reads a chosen chunk once per KV head."""
    chosen = chunk_ids.unflatten(0, (clock.n_kv_heads, -1)).flatten(1)  # [G, chosen chunks]
    n_different = sum(len(ids[ids >= 0].unique()) for ids in chosen)
    clock.profile.read_bytes += n_different * 2 * clock.chunk_size * q.shape[-1] * q.itemsize
    clock.profile.attention_flops += 4.0 * q.shape[-1] * clock.chunk_size * int((chosen >= 0).sum())


def count_compared(clock: _Clock, out: Tensor, *_: Any) -> None:
    """Add the bytes of the method's state that a call returned, such as summaries, to the bytes read."""
    clock.profile.read_bytes += out.nbytes


def n_pairs(n_queries: int, n_keys: int, causal: bool, window: int | None = None) -> int:
    """Return how many keys the queries see in all: 10 for 2 queries and 5 keys, 9 if causal, 6 in a window of 3."""
    if not causal:
        return n_queries * n_keys
    return sum(
        min(seen, n_keys if window is None else window)
        for seen in range(n_keys - n_queries + 1, n_keys + 1)
        if seen > 0
    )
