"""Kernels as their callers call them: by name, on PyTorch's number of threads."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from lce.kernels.runtime import library, threads
from lce.kernels.runtime.shared import Layout

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}  # names in kernels' code

_SHARES = 64  # A slice is at first this share of a kernel's items, because nothing says how long an item takes.


class _Thread(threading.local):
    """Of each Python thread: where its calls of kernels are recorded, and what cuts them into slices."""

    calls: list[Any] | None = None
    runs = True  # whether calls that are recorded run, too
    slices: Slices | None = None


class Slices:
    """Runs kernels in slices of their items, and calls `pause` between two slices once its time has come.

    `pause` returns the seconds until it is to be called again. It may run kernels, and those are not cut. Results have
    the same bits as without slices, because an item's result depends on no other item.
    """

    def __init__(self, pause: Callable[[], float]) -> None:
        self._pause = pause
        self._until = 0.0

    def run(self, address: int, n: int, args: Sequence[int], least: int, memory: int) -> None:
        """Run a kernel, as `threads.run` does. All slices share the arguments: kernels count there what is done."""
        held, job = threads.job_of(threads.own.scratch, address, n, args, least, memory)
        fewest = least * torch.get_num_threads()  # items, so that all threads have some
        first, stop = 0, min(n, max(fewest, n // _SHARES))
        while first < n:
            began = time.perf_counter()
            threads.run_slice(job, first, stop)
            now = time.perf_counter()
            item_s = (now - began) / (stop - first)
            if now >= self._until:
                with sliced(None), recording(None):
                    seconds = self._pause()
                now = time.perf_counter()
                self._until = now + seconds
            size = max(fewest, int((self._until - now) / item_s))
            first, stop = stop, n if stop + 2 * size >= n else stop + size
        del held


_thread = _Thread()


class Kernel:
    """A kernel over n items: each thread calls the compiled body, `body(first, stop, memory, *args)`, for some items.

    `name` is that of the body's module, without `_body`, and function: "products.product". `kind` selects the instance,
    mostly by dtype. The body gets 64-bit integers: a tensor's address, 0 for None, and floats that `number_of` decodes.
    The body does not hold the GIL. The order of a sum does not depend on the number of threads.
    """

    def __init__(self, name: str, kind: Any = None) -> None:
        self.name, self.kind = name, kind

    def __call__(self, n: int, *given: Any, least: int = 1, memory: int = 0) -> None:
        """Run the body on the items `0..n-1`; if several threads share them, each takes at least `least` items.

        Each thread has `memory` bytes of its own, as `threads.run` says.
        """
        args = [x if type(x) is int else _word(x) for x in given]
        if _thread.calls is not None:
            _thread.calls.append((self.address, n, args, least, memory))
            if not _thread.runs:
                return
        run = threads.run if _thread.slices is None else _thread.slices.run
        run(self.address, n, args, least, memory)

    @cached_property
    def address(self) -> int:
        """The address of the kernel's machine code, with which another kernel can `call` this one."""
        return library.address(self.name, self.kind)


def seam() -> None:
    """Tell a recording that the calls since the last seam do not depend on those before them: it gets None."""
    if _thread.calls is not None:
        _thread.calls.append(None)


def sliced(slices: Slices | None) -> AbstractContextManager[Any]:
    """Have this thread's calls of kernels inside `with` cut into slices; None stops that."""
    return _with(slices=slices)


def recording(calls: list[Any] | None, runs: bool = True) -> AbstractContextManager[Any]:
    """Append this thread's calls of kernels inside `with` to `calls`, and only that unless it `runs` them.

    None stops an outer recording.
    """
    return _with(calls=calls, runs=runs)


@contextmanager
def _with(**values: Any) -> Iterator[Any]:
    before = {name: getattr(_thread, name) for name in values}
    vars(_thread).update(values)
    try:
        yield next(iter(values.values()))
    finally:
        vars(_thread).update(before)


class Kernels(dict[Any, Kernel]):
    """The instances of a kernel, made at the first look-up by dtype, or by a layout or a dtype and another dtype."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __missing__(self, kind: torch.dtype | tuple[Layout | torch.dtype, torch.dtype]) -> Kernel:
        parts = kind if isinstance(kind, tuple) else (kind,)
        labels = tuple(DTYPES[part] if isinstance(part, torch.dtype) else part for part in parts)
        label = labels if isinstance(kind, tuple) else labels[0]
        self[kind] = made = Kernel(self.name, label)
        return made


def _word(given: Tensor | float | None) -> int:
    """Return an argument as a kernel gets it; a float is the integer with the bits of the float64."""
    if isinstance(given, int):
        return int(given)
    if given is None:
        return 0
    return given.data_ptr() if isinstance(given, Tensor) else _bits(given)


@cache
def _bits(number: float) -> int:
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)
