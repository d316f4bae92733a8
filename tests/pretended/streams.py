"""Streams and events of a pretended GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.pretended.device import Gpus


class Stream:
    """Work in order. Here it is done at once."""

    def __init__(self, gpus: Gpus, device: torch.device) -> None:
        self.gpus = gpus
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.gpus)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpus.waits_for(self.device, "Stream.synchronize")

    def query(self) -> bool:
        return True


class Event:
    """A point in a stream."""

    def __init__(self, gpus: Gpus, **_: Any) -> None:
        self.gpus = gpus
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.gpus.current_stream()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpus.current_stream()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.gpus.waits_for(self.gpus.device(), "Event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        return 1.0
