"""Recordings of work on a device as CUDA graphs. A recording that fails, for any reason, costs time and nothing else.

A thread that captures may meet what CUDA forbids in a capture: a module is loaded, page-locked memory is allocated, the
garbage collector frees an event or page-locked memory, or another thread uses the legacy default stream. So captures
are relaxed, on a stream of the tape's own, which does not wait for the default stream; the collector is off meanwhile;
and a tape makes its events and page-locked memory when it is made.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle

import torch
from torch import Tensor

Work = Callable[[], None]
OUTSTANDING = 2  # steps whose numbers nobody has read: the current one, and the one after it

_failed: list[object] = []  # graphs whose capture failed, kept because PyTorch's allocator may still refer to them


class CudaTape:
    """A recorder of work on a device as CUDA graphs, and a reader of `n_numbers` int64 numbers that the work leaves.

    All graphs have one pool for their temporary tensors: no graph may leave a result there for later.
    """

    def __init__(self, device: torch.device, n_numbers: int = 2) -> None:
        self.device = device
        self.stream, self.pool = torch.cuda.Stream(device, priority=-1), torch.cuda.graph_pool_handle()
        slots = [
            (torch.empty(n_numbers, dtype=torch.int64, pin_memory=True), torch.cuda.Event()) for _ in range(OUTSTANDING)
        ]
        self._slots = cycle(slots)

    def warm_up(self, work: Work) -> None:
        """Run `work` once, so that all its kernels are compiled and loaded before `work` is recorded."""
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        try:
            with torch.cuda.stream(self.stream):
                work()
        finally:  # after an error too, because later work reuses the step's memory
            here.wait_stream(self.stream)

    def record(self, work: Work) -> Work:
        """Record `work` without running it; return a function that replays it. Any exception of a capture may come."""
        graph = torch.cuda.CUDAGraph()
        try:
            with _no_collection(), torch.cuda.stream(self.stream):
                graph.capture_begin(self.pool, capture_error_mode="relaxed")
                try:
                    work()
                finally:
                    graph.capture_end()
        except BaseException:
            _failed.append(graph)
            with suppress(Exception):  # a capture that ends with an error leaves the allocator in the graph's pool
                torch._C._cuda_endAllocateToPool(self.stream.device.index, graph.pool())
            raise
        return graph.replay

    def reader(self, numbers: Tensor) -> Callable[[], list[int]]:
        """Return a function that waits for the work launched so far, and then returns the contents of `numbers`.

        It must be called, or given up, before as many further readers as `OUTSTANDING` are made.
        """
        held, done = next(self._slots)
        held.copy_(numbers, non_blocking=True)
        done.record(torch.cuda.current_stream(self.device))

        def read() -> list[int]:
            done.synchronize()
            found: list[int] = held.tolist()
            return found

        return read


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from running."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
