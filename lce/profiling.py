"""Marks on the functions that take a run's time, and profiles that add up the times of marked calls.

A mark costs one comparison while no profile is taken. The marks are not ranges of `torch.profiler`, which cost ten
times as much and need seconds to start.
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
    """The profile of a run. `seconds` has the time of each of `CATEGORIES`, `calls` the number of marked calls.

    The time of a marked call inside another one counts for the inner category alone. `read_bytes` counts the keys and
    values that attention was given, each chosen chunk once a KV head and call, and the summaries and low-dim keys that
    a selection compared. `attention_flops` is 4 · D for each pair of a query and a key that the query sees, where D is
    the head dimension. The scores of a selection are not counted.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    calls: int = 0
    read_bytes: int = 0
    attention_flops: float = 0.0

    @property
    def total_s(self) -> float:
        """The seconds of the whole run."""
        return sum(self.seconds.values())


class _Clock:
    """The clock of a profile: books the time of one thread for the category that is current."""

    def __init__(self, profile: Profile, n_kv_heads: int, chunk_size: int, wait: Callable[[], None]) -> None:
        self.profile, self.n_kv_heads, self.chunk_size, self.wait = profile, n_kv_heads, chunk_size, wait
        self.thread, self.current, self.since = threading.get_ident(), _COUNTING, 0.0
        self.change(OTHER)

    def change(self, category: str) -> str:
        """Book the time until now, and return the category that was current."""
        self.wait()
        now, before = time.perf_counter(), self.current
        if before in self.profile.seconds:
            self.profile.seconds[before] += now - self.since
        self.current, self.since = category, now
        return before

    @contextmanager
    def section(self, category: str) -> Iterator[None]:
        """Book the time inside `with` for `category`."""
        before = self.change(category)
        try:
            yield
        finally:
            self.change(before)


_clock: _Clock | None = None  # the clock of the profile that is being taken
_COUNTING = "counting"  # a category whose time is not booked
_NOTHING = nullcontext()


def section(category: str) -> AbstractContextManager[None]:
    """Book the time inside `with` for `category`, if this thread is taking a profile."""
    clock = _clock
    return _NOTHING if clock is None or clock.thread != threading.get_ident() else clock.section(category)


Count = Callable[..., None]  # a function of a clock, a marked function's result, and its arguments


def timed(category: str, count: Count | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function: while a profile is taken, book its time for `category`, and count its work by `count`."""

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
    """Profile this thread's work inside `with`; an outer profile pauses. `wait` waits for the devices."""
    global _clock
    profile, outer = Profile(), _clock
    _clock = clock = _Clock(profile, n_kv_heads, chunk_size, wait)
    try:
        yield profile
    finally:
        _clock = outer
        clock.change(OTHER)


def count_dense(
    clock: _Clock, _out: Any, _self: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None,
    turn: object = None,
) -> None:  # fmt: skip
    """Count the reads and operations of a call of `Attention.dense`."""
    n_heads, n_queries, dim = q.shape
    clock.profile.read_bytes += k.nbytes + v.nbytes
    clock.profile.attention_flops += 4.0 * n_heads * dim * n_pairs(n_queries, k.shape[1], causal, window)


def count_routed(clock: _Clock, _out: Any, _self: Any, q: Tensor, turns: Any, chunk_ids: Tensor, *_: Any) -> None:
    """Count the reads and operations of a call of `Attention.routed`, which reads a chunk once a KV head."""
    chosen = chunk_ids.unflatten(0, (clock.n_kv_heads, -1)).flatten(1)  # [G, choices]
    n_different = sum(len(ids[ids >= 0].unique()) for ids in chosen)
    clock.profile.read_bytes += n_different * 2 * clock.chunk_size * q.shape[-1] * q.itemsize
    clock.profile.attention_flops += 4.0 * q.shape[-1] * clock.chunk_size * int((chosen >= 0).sum())


def count_compared(clock: _Clock, out: Tensor, *_: Any) -> None:
    """Count the bytes of the method's state that a call returned."""
    clock.profile.read_bytes += out.nbytes


def n_pairs(n_queries: int, n_keys: int, causal: bool, window: int | None = None) -> int:
    """Return the number of pairs of a query and a key that the query sees. The last query is at the last key.

    Example: 2 queries over 5 keys have 10 pairs; 9 pairs if causal, and 6 with a window of 3.
    """
    if not causal:
        return n_queries * n_keys
    most = n_keys if window is None else window
    return sum(min(seen, most) for seen in range(n_keys - n_queries + 1, n_keys + 1) if seen > 0)
