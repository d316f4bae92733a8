"""Streams, events and graphs of a pretended GPU.

What is queued in the default stream of a device is done at once. What is queued in another stream is done as late as
CUDA may: when something waits for it. A copy to pinned memory that does not wait arrives when the CPU waits for it.
What is queued while a graph captures is done when it is replayed, on the same memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from tests.pretended.device import Gpus
    from tests.pretended.tensor import Memory

Work = Callable[[], object]
NOT_CAPTURED = "CUDA error: operation not permitted when stream is capturing"


class Stream:
    """Work in order. `issued` counts it; `seen` says how much of other streams is done before what comes next here."""

    gpus: Gpus

    def __init__(self, device: Any = None, *, late: bool = True, **_: Any) -> None:
        self.device = self.gpus.device(device)
        self.late, self.issued = late, 0
        self.queue: deque[tuple[int, Work]] = deque()
        self.seen: dict[Stream, int] = {}
        self.arrivals: list[tuple[int, Tensor, Tensor]] = []  # to memory of the host, and what arrives there
        self.sources: list[tuple[int, Tensor, Tensor]] = []  # pinned memory that copies read, and what it must hold
        self.graph: CUDAGraph | None = None  # that captures this stream
        self.gpus.streams.add(self)

    def submit(self, work: Work) -> None:
        """Do work after all that is queued here."""
        self.issued += 1
        if self.graph is not None:
            self.graph.work.append(work)
        elif self.late:
            self.queue.append((self.issued, work))
        else:
            _do(work)

    def drain(self, upto: int | None = None) -> None:
        """Do what was queued up to a point."""
        while self.queue and (upto is None or self.queue[0][0] <= upto):
            _do(self.queue.popleft()[1])

    def arrive(self, upto: int | None = None) -> None:
        for place, target, numbers in self.arrivals:
            if upto is None or place <= upto:
                _do(partial(target.copy_, numbers))
        self.arrivals = [x for x in self.arrivals if upto is not None and x[0] > upto]

    def host_waits(self, upto: int | None = None) -> None:
        """The CPU has waited for what was queued up to a point."""
        if self.graph is not None:
            raise RuntimeError(NOT_CAPTURED)
        upto = self.issued if upto is None else upto
        self.drain(upto)
        self.arrive(upto)
        for place, source, numbers in self.sources:
            if place <= upto and not torch.equal(source.view(torch.uint8), numbers.view(torch.uint8)):
                self.gpus.faults.append("pinned memory was written to while a copy to the device might still read it")
        self.sources = [x for x in self.sources if x[0] > upto]
        self.gpus.host_saw(self, upto)

    def wait_for(self, other: Stream, upto: int) -> None:
        """What comes next here begins after what was queued there up to a point."""
        if other is self:
            return
        if other.graph is not None and self.graph is None:
            self.graph = other.graph  # it joins the capture
            self.graph.streams.append(self)
        self.submit(lambda: other.drain(upto))
        for stream, place in [*other.seen.items(), (other, upto)]:
            self.seen[stream] = max(place, self.seen.get(stream, 0))

    # As in torch.cuda.Stream

    def wait_stream(self, other: Stream) -> None:
        self.wait_for(other, other.issued)

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            self.wait_for(event.stream, event.place)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or self.gpus.Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpus.count("syncs", "Stream.synchronize")
        self.host_waits()

    def __enter__(self) -> Stream:
        self._entered = self.gpus.on_stream(self)
        self._entered.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._entered.__exit__(*exc)


class Event:
    """A point in a stream."""

    gpus: Gpus

    def __init__(self, **_: Any) -> None:
        self.stream: Stream | None = None
        self.place = 0

    def elapsed_time(self, other: Event) -> float:
        return 1.0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.gpus.current_stream()
        self.place = self.stream.issued

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpus.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self.gpus.count("syncs", "Event.synchronize")
        if self.stream is not None:
            self.stream.host_waits(self.place)


def _do(work: Work) -> None:
    """On tensors of the CPU, some of which were made in inference mode."""
    with _disable_current_modes(), torch.inference_mode():
        work()


class CUDAGraph:
    """Captured work, and the memory that it uses and did not make itself."""

    def __init__(self, gpus: Gpus, **_: Any) -> None:
        self.gpus = gpus
        self.work: list[Callable[[], object]] = []
        self.uses: dict[int, Memory] = {}
        self.streams: list[Stream] = []
        self.captured = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """In the current stream. Only a relaxed capture takes what other threads and the collector do meanwhile."""
        stream = self.gpus.current_stream()
        assert stream.late, "the default stream cannot capture"
        assert not self.work, "a graph captures once"
        stream.graph, self.streams, self.mode = self, [stream], capture_error_mode

    def capture_end(self) -> None:
        for stream in self.streams:
            stream.graph = None
        self.captured = True

    def use(self, memory: Memory) -> None:
        if memory.graph is not self:
            self.uses[id(memory)] = memory

    def replay(self) -> None:
        """In the current stream."""
        assert self.captured, "replay before capture"
        if freed := [memory for memory in self.uses.values() if memory.freed]:
            raise RuntimeError(f"a graph uses {len(freed)} pieces of memory that were freed since it was captured")
        self.gpus.count("launches", "replay")
        stream = self.gpus.current_stream()
        for memory in self.uses.values():
            self.gpus.note_use(memory, stream)
        stream.submit(lambda: [step() for step in self.work])


class Capture:
    """`torch.cuda.graph(graph)`: captures what this thread queues."""

    def __init__(self, gpus: Gpus, graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, **_: Any) -> None:
        self.gpus, self.graph, self.stream = gpus, graph, stream or gpus.Stream()
        self.entered = gpus.on_stream(self.stream)

    def __enter__(self) -> None:
        self.gpus.synchronize()
        self.entered.__enter__()
        self.stream.wait_stream(self.gpus.defaults[self.stream.device.index])
        self.graph.capture_begin()

    def __exit__(self, *exc: Any) -> None:
        self.graph.capture_end()
        self.entered.__exit__(*exc)
