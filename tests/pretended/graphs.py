"""CUDA graphs of a pretended GPU: what is queued while one captures is done when it is replayed, on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.pretended.device import Gpus
    from tests.pretended.streams import Stream
    from tests.pretended.tensor import Memory


class CUDAGraph:
    """Captured work, and the memory that it uses and did not make itself."""

    def __init__(self, gpus: Gpus, **_: Any) -> None:
        self.gpus = gpus
        self.work: list[Callable[[], object]] = []
        self.uses: dict[int, Memory] = {}
        self.streams: list[Stream] = []
        self.captured = False

    def use(self, memory: Memory) -> None:
        if memory.graph is not self:
            self.uses[id(memory)] = memory

    def begin(self, stream: Stream) -> None:
        assert not self.work, "a graph captures once"
        stream.graph = self
        self.streams = [stream]

    def end(self) -> None:
        for stream in self.streams:
            stream.graph = None
        self.captured = True

    def replay(self) -> None:
        """In the current stream."""
        assert self.captured, "replay before capture"
        freed = [memory for memory in self.uses.values() if memory.freed]
        if freed:
            raise RuntimeError(f"a graph uses {len(freed)} pieces of memory that were freed since it was captured")
        self.gpus.count("launches", "replay")
        stream = self.gpus.current_stream()
        for memory in self.uses.values():
            self.gpus.note_use(memory, stream)

        def work() -> None:
            for step in self.work:
                step()

        stream.submit(work)


class Capture:
    """`torch.cuda.graph(graph)`: captures what this thread queues."""

    def __init__(self, gpus: Gpus, graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, **_: Any) -> None:
        self.gpus = gpus
        self.graph = graph
        self.stream = stream or gpus.Stream()
        self.entered = gpus.on_stream(self.stream)

    def __enter__(self) -> None:
        self.gpus.synchronize()
        self.entered.__enter__()
        self.stream.wait_stream(self.gpus.default_stream(self.stream.device))
        self.graph.begin(self.stream)

    def __exit__(self, *exc: Any) -> None:
        self.graph.end()
        self.entered.__exit__(*exc)
