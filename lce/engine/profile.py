"""Where the time of an engine goes, and what its attention reads and computes.

The functions of `HOOKS` are timed while a profile is taken. A category's time is its own: what a timed call spends in
another timed call counts for that one alone. What no timed call covers is "Python and other".
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor

import lce.attention as attention
from lce.cache import kv, layer, method_state
from lce.engine import runner, sampling
from lce.engine.engine import Engine
from lce.engine.graph import one_by_one
from lce.errors import UsageError, shown
from lce.methods import lowdim
from lce.models import layers

OTHER, TIMERS = "Python and other", "timers"
CATEGORIES = ("products", "attention", "selection", "cache", "norms and rotations", "activations", "sampling", OTHER)

# A category, the owner of a function, its names. A module's function is timed wherever a module of lce has it.
HOOKS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("products", layers, ("linear",)),
    ("attention", attention.Attention, ("dense", "routed")),
    ("attention", attention, ("merge", "combine")),
    ("selection", lowdim.LowDimMap, ("low_keys",)),
    ("cache", kv.KVCache, ("begin", "commit", "reserve", "prefetch")),
    ("cache", layer.LayerCache, ("write", "span", "tokens", "tiles")),
    ("cache", method_state.GrowingRows, ("write", "span")),
    ("cache", method_state.RecentRows, ("write", "span")),
    ("cache", method_state.OpenChunk, ("write", "span")),
    ("norms and rotations", layers, ("rms_norm",)),
    ("norms and rotations", attention, ("rotate",)),
    ("activations", layers, ("silu_mul",)),
    ("sampling", sampling.Sampler, ("pick",)),
    ("sampling", runner, ("check_logits",)),
)
# The same of the engine's method, as far as it has them.
METHOD_HOOKS = (
    ("selection", ("choose", "select", "memorise", "find_basis", "_summarise_complete")),
    ("cache", ("keep",)),
)


@dataclass
class Profile:
    """What a profiled run did. `seconds` has each of `CATEGORIES`; the timers' own time is `timers_s`, in none of them.

    `read_bytes`: keys and values that attention was given, each chosen chunk once a KV head and call, and summaries and
    low-dim keys that were compared. `attention_flops`: four times D for each pair of a query and a key that it sees;
    the scores of a selection do not count.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    timers_s: float = 0.0
    calls: int = 0
    read_bytes: int = 0
    attention_flops: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the run without the timers' own."""
        return sum(self.seconds.values())


def profiled(engine: Engine) -> AbstractContextManager[Profile]:
    """Profile what the code inside `with` does with `engine` in this thread; read the profile after it.

        with lce.profiled(engine) as profile:
            engine.generate("...")

    While it lasts, other engines of this process run the timed functions too, untimed. On a GPU every timed call waits
    for the device, so that times are those of its work, and no decode step is recorded: recorded ones are faster. A
    timed call costs about a microsecond.
    """
    if not isinstance(engine, Engine):
        raise UsageError(f"engine is {shown(engine)}; expected what lce.load returns")
    return _profiled(engine)


@contextmanager
def _profiled(engine: Engine) -> Iterator[Profile]:
    profile = Profile()
    clock = _Clock(profile, engine.layout.devices)
    work = _Work(profile, engine)
    undo: list[tuple[Any, str, Any]] = []  # owner, name, what it had of its own
    try:
        for category, owner, names in HOOKS:
            for name in names:
                original = getattr(owner, name)
                _replace(owner, name, original, clock.timed(original, category, work.counter(owner, name)), undo)
        for category, names in METHOD_HOOKS:
            for name in names:
                if (original := getattr(type(engine.method), name, None)) is not None:
                    _replace(type(engine.method), name, original, clock.timed(original, category), undo)
        with one_by_one():
            clock.start()
            yield profile
    finally:
        clock.stop()
        for owner, name, had in reversed(undo):
            if had is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, had)


_INHERITED = object()


def _replace(owner: Any, name: str, original: Any, other: Any, undo: list[tuple[Any, str, Any]]) -> None:
    """Put `other` in the place of a method of a class, or of a function in every module of lce that has it."""
    if isinstance(owner, type):
        undo.append((owner, name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, other)
        return
    modules = [module for key, module in list(sys.modules.items()) if key.partition(".")[0] == "lce"]
    for module in modules:
        for its_name in [key for key, value in vars(module).items() if value is original]:
            undo.append((module, its_name, original))
            setattr(module, its_name, other)


class _Clock:
    """Books the time since the last change for the category that is current. Only the thread that made it counts."""

    def __init__(self, profile: Profile, devices: Sequence[torch.device]) -> None:
        self.profile = profile
        self.devices = [device for device in devices if device.type == "cuda"]  # whose work is waited for
        self.thread = threading.get_ident()
        self.current, self.outer, self.since = OTHER, list[str](), 0.0
        self.spent = {**profile.seconds, TIMERS: 0.0}

    def start(self) -> None:
        self.profile.calls = 0
        self.spent = dict.fromkeys(self.spent, 0.0)
        self.since = self._now()

    def stop(self) -> None:
        """Fill the profile: what the timers cost is estimated from their number, and taken from what called them."""
        self.spent[self.current] += self._now() - self.since
        profile, cost = self.profile, self.profile.calls * _cost_of_a_call(self)
        taken = min(cost, self.spent[OTHER])
        profile.timers_s = self.spent.pop(TIMERS) + taken
        profile.seconds = {**self.spent, OTHER: self.spent[OTHER] - taken}

    def enter(self, category: str) -> None:
        now = self._now()
        self.spent[self.current] += now - self.since
        self.outer.append(self.current)
        self.current, self.since = category, now

    def leave(self) -> None:
        now = self._now()
        self.spent[self.current] += now - self.since
        self.current, self.since = self.outer.pop(), now

    def _now(self) -> float:
        for device in self.devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def timed(
        self, function: Callable[..., Any], category: str, count: Callable[..., None] | None = None
    ) -> Callable[..., Any]:
        """`function` with its time booked for `category`, and its work counted by `count`."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                return function(*args, **kwargs)
            self.profile.calls += 1
            self.enter(category)
            try:
                out = function(*args, **kwargs)
            finally:
                self.leave()
            if count is not None:
                self.enter(TIMERS)
                try:
                    count(out, *args, **kwargs)
                finally:
                    self.leave()
            return out

        @wraps(function)
        def generate(*args: Any, **kwargs: Any) -> Any:
            items = function(*args, **kwargs)
            while True:
                self.enter(category)
                try:
                    item = next(items)
                except StopIteration:
                    return
                finally:
                    self.leave()
                yield item

        return generate if inspect.isgeneratorfunction(function) else run


def _cost_of_a_call(clock: _Clock, n: int = 2000) -> float:
    """Seconds that the timer of one call takes."""
    empty = _Clock(Profile(), clock.devices)

    def nothing() -> None: ...

    timed = empty.timed(nothing, OTHER)
    seconds = []
    for function in (nothing, timed):
        started = time.perf_counter()
        for _ in range(n):
            function()
        seconds.append(time.perf_counter() - started)
    return max(0.0, seconds[1] - seconds[0]) / n


class _Work:
    """Counts what the attention of an engine reads and computes, from what its calls are given."""

    def __init__(self, profile: Profile, engine: Engine) -> None:
        self.profile = profile
        self.n_kv_heads = engine.model.config.n_kv_heads
        self.tile_tokens = engine.method.reach.chunk_size
        self.itemsize = engine.dtype.itemsize

    def counter(self, owner: Any, name: str) -> Callable[..., None] | None:
        """What counts the calls of a hook; None where there is nothing to count."""
        counters: dict[tuple[Any, str], Callable[..., None]] = {
            (attention.Attention, "dense"): self.dense,
            (attention.Attention, "routed"): self.routed,
            (method_state.GrowingRows, "span"): self.compared,
        }
        return counters.get((owner, name))

    def dense(
        self,
        _out: Any,
        _self: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        window: int | None = None,
        turn: object = None,
    ) -> None:
        n_heads, n_queries, dim = q.shape
        self.profile.read_bytes += k.nbytes + v.nbytes
        self.profile.attention_flops += 4.0 * n_heads * dim * n_pairs(n_queries, k.shape[1], causal, window)

    def routed(
        self, _out: Any, _self: Any, q: Tensor, turns: Any, chunk_ids: Tensor, tiles: Any, memory: object = None
    ) -> None:
        n_heads, dim = len(q), q.shape[-1]
        heads = torch.arange(n_heads, device=q.device) // (n_heads // self.n_kv_heads)
        valid = chunk_ids >= 0
        n_chosen = int(valid.sum())
        if not n_chosen:
            return
        n_chunks = int(chunk_ids.max()) + 1
        seen = torch.zeros(self.n_kv_heads * n_chunks, dtype=torch.bool, device=q.device)
        seen[(heads[:, None, None] * n_chunks + chunk_ids)[valid]] = True
        self.profile.read_bytes += int(seen.sum()) * 2 * self.tile_tokens * dim * self.itemsize
        self.profile.attention_flops += 4.0 * dim * self.tile_tokens * n_chosen

    def compared(self, out: Tensor, _self: Any, start: int, stop: int) -> None:
        self.profile.read_bytes += out.nbytes


def n_pairs(n_queries: int, n_keys: int, causal: bool, window: int | None = None) -> int:
    """Pairs of a query and a key that it sees: the last query sees the last key.

    Example: 2 queries over 5 keys make 10 pairs, causal ones 9, with a window of 3 six.
    """
    if not causal:
        return n_queries * n_keys
    most = n_keys if window is None else window

    def up_to(n: int) -> int:
        """Pairs of queries that see 1, 2, ... n keys, but at most `most`."""
        n, whole = max(n, 0), min(max(n, 0), most)
        return whole * (whole + 1) // 2 + (n - whole) * most

    return up_to(n_keys) - up_to(n_keys - n_queries)
