"""Movers, which copy pages into a pool's slots: by plain copies, or on CUDA streams, one for each direction.

A slot is the space for one page. A pool's memory is a list of slabs. A slab is `Parts`: tensors whose first dimension
counts slots. All slabs except the last have the same number of slots.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce import gpu
from lce.cache.formats import Parts
from lce.system import lasting_executor, usable_cores

Numbers = NDArray[np.int64]
Slabs = Sequence[Parts]
GATHERERS = min(8, usable_cores())  # threads that gather pages: one thread is slower than a GPU's bus
FETCHER = "lce-fetch"  # the name of the thread that does the work of a `Fetch`
PIECE = 4 << 20  # the least bytes that a thread gathers
Unpack = Callable[[Parts], Parts]  # converts packed pages to the tensors that slots hold


def same(pages: Parts) -> Parts:
    """Return `pages` unchanged; the `Unpack` for pages that slots hold in the same form."""
    return pages


class Mover:
    """A mover to ordinary memory, and the base class of all movers. Here `put` returns after the copy."""

    asynchronous = False  # whether `put` may return before the copy has ended
    memory: Mapping[str, Any] = {}  # the arguments of `torch.empty` for the kind of memory

    @torch.inference_mode(mode=False)  # so that code outside inference mode can write to the tensor, too
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor for slots `[n_slots, …]` or for pages to read."""
        return torch.empty(shape, dtype=dtype, **self.memory)

    def now(self) -> object:
        """Return a mark of the work queued for the device so far, to pass as `after` to `put` in another thread."""
        return None

    def put(self, slabs: Slabs, slots: Numbers, pages: Parts, after: object = None, unpack: Unpack = same) -> None:
        """Begin to copy pages `[n, …]` into slots, once the work that `after` marks is done (None: all queued work)."""
        pages = unpack(pages)
        for held, rows, part in located(slabs, slots):
            index = torch.from_numpy(rows)
            for x, new in zip(held, pages, strict=True):
                x.index_copy_(0, index, new[part].to(x.device))

    def wait(self, slots: Numbers) -> None:
        """Make later reads of `slots` wait until all pages that were put into `slots` have arrived."""

    def pick(self, slabs: Slabs, slots: Numbers) -> Parts:
        """Return copies `[n, …]` of the pages in slots; call `wait` first. Fastest if a slab's slots are adjacent."""
        pages = tuple(self.empty((len(slots), *x.shape[1:]), x.dtype) for x in slabs[0])
        self.gather(slabs, slots, pages)
        return pages

    def beside(self) -> AbstractContextManager[object]:
        """Return a context in which a GPU's work for `put` is queued beside the computation."""
        return nullcontext()

    def lend(self, slabs: Slabs, slots: Numbers) -> Parts | None:
        """Begin to copy the pages in slots to the GPU; call `wait` first. None: the GPU cannot read them."""
        return None

    def gather(self, slabs: Slabs, slots: Numbers, pages: Parts) -> None:
        """Copy the pages in slots to `pages`, tensors `[n, …]`. Bytes: one copy."""
        for held, rows, part in located(slabs, slots):
            index = self.upload(torch.from_numpy(rows))
            for x, page in zip(held, pages, strict=True):
                torch.index_select(x, 0, index, out=page[part])

    def upload(self, x: Tensor) -> Tensor:
        """Copy a host tensor to the kind of memory that slots are in. Only later device work waits for the copy."""
        return x


class Streamed(Mover):
    """A mover that copies on its own CUDA stream; an event for each slot says when its page has arrived."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = {"device": device} if self.asynchronous else {"pin_memory": True}
        self.stream = torch.cuda.Stream(device)
        self._arrivals: dict[int, torch.cuda.Event] = {}

    def wait(self, slots: Numbers) -> None:
        waited, arrivals = slots.tolist() if self._arrivals else [], self._arrivals
        for event in {id(event): event for slot in waited if (event := arrivals.get(slot))}.values():
            if self.asynchronous:
                torch.cuda.current_stream(self.device).wait_event(event)
            else:
                event.synchronize()
        for slot in waited:  # after all waits, because an interruption may come between two of them
            arrivals.pop(slot, None)

    def _note(self, slots: Numbers, stream: torch.cuda.Stream | None = None) -> None:
        self._arrivals.update(dict.fromkeys(slots.tolist(), (stream or self.stream).record_event()))


class Cuda(Streamed):
    """A mover to a GPU's memory, while the model computes on another stream."""

    asynchronous = True

    def now(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()

    def beside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def put(self, slabs: Slabs, slots: Numbers, pages: Parts, after: object = None, unpack: Unpack = same) -> None:
        # PyTorch records that the stream uses the memory: what is freed during a copy is not reused before its end.
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
            self._note(slots)

    def upload(self, x: Tensor) -> Tensor:
        if not (x.is_contiguous() and x.is_pinned()):
            x = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)
        return x.to(self.device, non_blocking=True)


class Pinned(Streamed):
    """A mover to page-locked host memory, which a GPU reads and writes. `wait` makes the CPU wait for its pages."""

    def put(self, slabs: Slabs, slots: Numbers, pages: Parts, after: object = None, unpack: Unpack = same) -> None:
        """Put pages into slots: from the CPU at once, from the GPU in one copy for each run of adjacent slots."""
        self.wait(slots)  # the GPU may still write these slots, or read them
        if not pages[0].is_cuda:
            super().put(slabs, slots, pages, unpack=unpack)
            return
        assert after is None, "pages leave the GPU in the thread that computes"
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for page in pages:
            page.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            pages = tuple(page.contiguous() for page in pages)
            for held, rows, part in located(slabs, slots):
                for run in runs(np.diff(rows) != 1, len(rows)):
                    first, n = int(rows[run.start]), run.stop - run.start
                    for x, new in zip(held, pages, strict=True):
                        x[first : first + n].copy_(new[part][run], non_blocking=True)
            self._note(slots)

    def lend(self, slabs: Slabs, slots: Numbers) -> Parts | None:
        (first,), stream = slabs[0], torch.cuda.current_stream(self.device)
        if not gpu.launching.installed() or first[0].nbytes % 8:
            return None
        places = [x.data_ptr() + rows * x[0].nbytes for (x,), rows, _ in located(slabs, slots)]
        pages = torch.empty((len(slots), *first.shape[1:]), dtype=first.dtype, device=self.device)
        table = torch.from_numpy(np.concatenate(places)).pin_memory()
        gpu.pages.gather_pages(pages, table.to(self.device, non_blocking=True))
        self._note(slots, stream)  # whoever fills these slots waits until they were read
        return (pages,)

    def gather(self, slabs: Slabs, slots: Numbers, pages: Parts) -> None:
        gather, n_threads = super().gather, min(GATHERERS, max(1, sum(page.nbytes for page in pages) // PIECE))
        cuts = [slice(a, b) for a, b in pairwise(len(slots) * i // n_threads for i in range(n_threads + 1))]
        threads = lasting_executor(GATHERERS, "lce-gather")
        list(threads.map(lambda cut: gather(slabs, slots[cut], tuple(page[cut] for page in pages)), cuts))


class Fetch:
    """Work for another thread, or for a caller who needs it first. If interrupted, the caller calls `finish` again."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work  # None: done
        self._error: Exception | None = None
        self._lock = Lock()

    def begin(self) -> None:
        """Hand the work to the process' one fetching thread."""
        lasting_executor(1, FETCHER).submit(self.finish)

    def finish(self) -> Exception | None:
        """Wait until the thread has done the work, or do it here. Return the error that it raised. May be repeated."""
        with self._lock:
            if self._work is not None:
                try:
                    self._work()
                except Exception as error:
                    self._error = error
                self._work = None
        return self._error


def located(slabs: Slabs, slots: Numbers) -> Iterator[tuple[Parts, Numbers, slice]]:
    """Yield (slab, numbers in it, slice of slots): of slots 1, 3, 5 in slabs of 4: (0, [1, 3], 0:2), (1, [1], 2:3)."""
    slab, rows = np.divmod(slots, max(len(slabs[0][0]) if slabs else 1, 1))
    for run in runs(np.diff(slab) != 0, len(slots)):
        yield slabs[slab[run.start]], rows[run], run


def runs(cuts: NDArray[np.bool_], n: int) -> Iterator[slice]:
    """Yield slices of `0..n-1`: after each index i where `cuts[i]` is True, a new slice begins."""
    bounds = [0, *(np.flatnonzero(cuts) + 1).tolist(), n] if n else []
    yield from map(slice, bounds, bounds[1:])
