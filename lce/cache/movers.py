"""How pages get into a pool's slots: by a plain copy, or on CUDA streams of their own, one for each direction.

A pool's memory is slabs. A slab is `Parts`: tensors with an entry for each slot. All slabs but the last have the same
number of slots. Stored pages that come into a device's slots are unpacked there: fewer bytes move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.formats import Parts, Shapes

Numbers = NDArray[np.int64]
Slabs = Sequence[Parts]
Unpack = Callable[[Parts], Parts]  # makes of arriving pages what slots hold


class Mover:
    """Plain memory: `put` returns when the pages are there. The base of all movers."""

    asynchronous = False  # whether `put` may return before the pages are there, so that fetching early pays

    @torch.inference_mode(mode=False)  # else nothing outside inference mode could write to them
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised part of slots, `[n_slots, …]`, or pages that are read."""
        return torch.empty(shape, dtype=dtype)

    @torch.inference_mode(mode=False)
    def slab(self, shapes: Shapes, n_slots: int) -> Parts:
        """Return uninitialised parts `[n_slots, *shape]` in one allocation.

        The parts of larger numbers are aligned first.
        """
        sizes = [n_slots * torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes]
        memory, start = self.empty((sum(sizes),), torch.uint8), 0
        parts: dict[int, Tensor] = {}
        for i in sorted(range(len(shapes)), key=lambda i: -shapes[i][1].itemsize):
            shape, dtype = shapes[i]
            parts[i] = memory[start : start + sizes[i]].view(dtype).view(n_slots, *shape)
            start += sizes[i]
        return tuple(parts[i] for i in range(len(shapes)))

    def now(self) -> object:
        """Return what is queued for the device so far, for `put` in another thread to come after."""
        return None

    def put(
        self, slabs: Slabs, slots: Numbers, pages: Parts, after: object = None, unpack: Unpack = lambda pages: pages
    ) -> None:
        """Begin to copy pages `[n, …]` into these slots; `after` what was queued then, else what is queued now."""
        pages = unpack(pages)
        for held, rows, part in located(slabs, slots):
            index = torch.from_numpy(rows)
            for x, new in zip(held, pages, strict=True):
                x.index_copy_(0, index, new[part].to(x.device))

    def wait(self, slots: Numbers) -> None:
        """Make whatever reads these slots later see what was put into them."""

    def pick(self, slabs: Slabs, slots: Numbers) -> Parts:
        """Return copies `[n, …]` of slots that were waited for. Fastest where slots of one slab stand together."""
        pages = tuple(self.empty((len(slots), *x.shape[1:]), x.dtype) for x in slabs[0])
        for held, rows, part in located(slabs, slots):
            index = self.upload(torch.from_numpy(rows))
            for x, page in zip(held, pages, strict=True):
                torch.index_select(x, 0, index, out=page[part])
        return pages

    def upload(self, x: Tensor) -> Tensor:
        """Return a tensor of the host's memory, where the slots are. Only later computation waits for the copy."""
        return x


class Streamed(Mover):
    """Memory that is filled on a CUDA stream of its own; an event says when pages have arrived in a slot."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._arrivals: dict[int, torch.cuda.Event] = {}

    def _to_wait_for(self, slots: Numbers) -> list[torch.cuda.Event]:
        """Return what these slots wait for, each event once."""
        arrivals = self._arrivals
        found = (event for slot in slots.tolist() if (event := arrivals.get(slot))) if arrivals else ()
        return list({id(event): event for event in found}.values())

    def _waited_for(self, slots: Numbers) -> None:
        """Forget what these slots waited for. Call this when all were waited for: an interruption may come between."""
        for slot in slots.tolist() if self._arrivals else ():
            self._arrivals.pop(slot, None)


class Cuda(Streamed):
    """A GPU's memory, filled while the model computes on another stream."""

    asynchronous = True

    @torch.inference_mode(mode=False)
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def put(
        self, slabs: Slabs, slots: Numbers, pages: Parts, after: object = None, unpack: Unpack = lambda pages: pages
    ) -> None:
        """Begin to copy pages, after what still reads the slots; call `wait` before reading them. Bytes: one copy.

        The slots' memory is recorded on the stream: if it is freed while pages are on their way, it is not used again
        before they have arrived.
        """
        (held,) = slabs
        assert after is None or isinstance(after, torch.cuda.Event)
        self.stream.wait_event(self.now() if after is None else after)
        for x in (*held, *(page for page in pages if page.is_cuda)):
            x.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            index = self.upload(torch.from_numpy(slots))
            moved = tuple(page if page.is_cuda else self.upload(page) for page in pages)
            for x, new in zip(held, unpack(moved), strict=True):
                x.index_copy_(0, index, new)
            arrival = torch.cuda.Event()
            arrival.record(self.stream)
        self._arrivals.update(dict.fromkeys(slots.tolist(), arrival))

    def wait(self, slots: Numbers) -> None:
        current = torch.cuda.current_stream(self.device)
        for event in self._to_wait_for(slots):
            current.wait_event(event)
        self._waited_for(slots)

    def upload(self, x: Tensor) -> Tensor:
        return pinned(x).to(self.device, non_blocking=True)


class Pinned(Streamed):
    """Page-locked memory of the host: a GPU copies from it, and to it, without the CPU.

    Pages of the GPU come on a stream of their own; `wait` makes the CPU wait for them. PyTorch does not hand out freed
    memory again before copies from it and to it have ended.
    """

    @torch.inference_mode(mode=False)
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def put(
        self, slabs: Slabs, slots: Numbers, pages: Parts, after: object = None, unpack: Unpack = lambda pages: pages
    ) -> None:
        """Put pages into slots. Pages of the CPU are there at once.

        Those of the GPU come in one copy for each run of neighbouring slots.
        """
        if not pages[0].is_cuda:
            self.wait(slots)  # what is still on its way would overwrite them
            super().put(slabs, slots, pages, unpack=unpack)
            return
        assert after is None, "pages leave the GPU in the thread that computes"
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for page in pages:
            page.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            pages = tuple(page.contiguous() for page in pages)
            for held, rows, part in neighbours(slabs, slots):
                for x, new in zip(held, pages, strict=True):
                    x[rows].copy_(new[part], non_blocking=True)
            arrival = torch.cuda.Event()
            arrival.record(self.stream)
        self._arrivals.update(dict.fromkeys(slots.tolist(), arrival))

    def wait(self, slots: Numbers) -> None:
        for event in self._to_wait_for(slots):
            event.synchronize()
        self._waited_for(slots)


def pinned(x: Tensor) -> Tensor:
    """Return a tensor of the host in page-locked memory, contiguous; itself if it is."""
    if x.is_contiguous() and x.is_pinned():
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)


def located(slabs: Slabs, slots: Numbers) -> Iterator[tuple[Parts, Numbers, slice]]:
    """Yield slots in runs of one slab each: the slab, the slots in it, and which of all slots these are.

    Example: slabs of 4 slots, slots 1, 3, 5, 2: slab 0 with 1, 3; slab 1 with 1; slab 0 with 2.
    """
    size = len(slabs[0][0]) if slabs else 1
    slab, rows = np.divmod(slots, max(size, 1))
    for run in _runs(np.flatnonzero(np.diff(slab)) + 1, len(slots)):
        yield slabs[slab[run.start]], rows[run], run


def neighbours(slabs: Slabs, slots: Numbers) -> Iterator[tuple[Parts, slice, slice]]:
    """Yield slots in runs of neighbours in one slab: the slab, the slots in it, and which of all slots these are."""
    for held, rows, part in located(slabs, slots):
        for run in _runs(np.flatnonzero(np.diff(rows) != 1) + 1, len(rows)):
            first, n = int(rows[run.start]), run.stop - run.start
            yield held, slice(first, first + n), slice(part.start + run.start, part.start + run.stop)


def _runs(cuts: Numbers, n: int) -> Iterator[slice]:
    """`0..n-1`, cut before each of `cuts`."""
    bounds = [0, *cuts.tolist(), n] if n else []
    for start, stop in pairwise(bounds):
        yield slice(start, stop)
