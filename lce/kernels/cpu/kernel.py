"""Kernels as their wrappers call them: by name, with integers as arguments, on PyTorch's number of threads."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

import torch

from lce.kernels.code.shared import Layout
from lce.kernels.cpu import library, threads

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}  # names in kernels' code

_thread = threading.local()  # `calls`: where this thread's calls of kernels are recorded, if they are


class Kernel:
    """A kernel over n items: each thread calls the compiled body, `body(first, stop, memory, *args)`, for some items.

    `name` is that of a function of `lce.kernels.code` with its module, "products.product"; `kind` selects the instance,
    mostly by dtype. Arguments are 64-bit integers: numbers, addresses, and floats encoded by `argument_of`. The body
    does not hold the GIL. The order of a sum does not depend on the number of threads.
    """

    def __init__(self, name: str, kind: Any = None) -> None:
        self.name, self.kind = name, kind

    def __call__(self, n: int, *args: int, least: int = 1, memory: int = 0, tail: Sequence[int] = ()) -> None:
        """Run the body on the items `0..n-1`; if several threads share them, each takes at least `least` items.

        Each thread has `memory` bytes of its own; a `tail` is one more argument, an address: as `threads.run` says.
        """
        calls: list[threads.Call] | None = getattr(_thread, "calls", None)
        if calls is not None:
            calls.append((self.address, n, args, least, memory, tail))
        threads.run(self.address, n, args, least, memory, tail)

    @cached_property
    def address(self) -> int:
        """The address of the kernel's machine code, with which another kernel can `call` this one."""
        return library.address(self.name, self.kind)


@contextmanager
def recording(calls: list[threads.Call] | None) -> Iterator[list[threads.Call]]:
    """Append this thread's calls of kernels inside `with` to `calls`; None stops an outer recording."""
    before, _thread.calls = getattr(_thread, "calls", None), calls
    try:
        yield calls if calls is not None else []
    finally:
        _thread.calls = before


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


@cache
def argument_of(number: float) -> int:
    """Encode a float as a kernel's argument: the integer with the bits of the float64."""
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)
