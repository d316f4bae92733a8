"""How pages get into a pool's slots: by a plain copy, into pinned memory, or on a CUDA stream of their own.

Slots and pages are `Parts`, tensors with an entry for each page. Packed pages that come into slots of plain ones are
unpacked where the slots are, so that half the bytes are moved.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.packing import Parts, unpack


class Mover:
    """Plain memory: `put` returns when the pages are there. The base of all movers."""

    asynchronous = False  # whether `put` may return before the pages are there, so that fetching early pays

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised part of slots, `[n_slots, …]`."""
        return torch.empty(shape, dtype=dtype)

    def put(self, held: Parts, slots: NDArray[np.int64], pages: Parts) -> None:
        """Begin to copy pages `[n, …]` into these slots of `held`."""
        index = torch.from_numpy(slots)
        for x, new in zip(held, fitting(pages, held), strict=True):
            x.index_copy_(0, index, new.to(x.device))

    def wait(self, slots: NDArray[np.int64]) -> None:
        """Make later computation see what was put into these slots."""

    def pick(self, x: Tensor, slots: NDArray[np.int64]) -> Tensor:
        """Copies of a part of some slots that were waited for, `[n, …]`."""
        return x.index_select(0, torch.from_numpy(slots).to(x.device))


class Pinned(Mover):
    """Page-locked memory: a GPU copies from it without the CPU."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pick(self, x: Tensor, slots: NDArray[np.int64]) -> Tensor:
        out = torch.empty(len(slots), *x.shape[1:], dtype=x.dtype, pin_memory=True)
        return torch.index_select(x, 0, torch.from_numpy(slots), out=out)


class Cuda(Mover):
    """A GPU's memory, filled on a stream of its own while the model computes on another."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._arrivals: dict[int, torch.cuda.Event] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def put(self, held: Parts, slots: NDArray[np.int64], pages: Parts) -> None:
        """Ordered after what still reads the slots; call `wait` before reading them. Bytes: one copy of the pages."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # it may still read the slots, or write pages
        with torch.cuda.stream(self.stream):
            index = torch.from_numpy(slots).to(self.device, non_blocking=True)
            for page in pages:
                page.record_stream(self.stream) if page.is_cuda else None
            moved = tuple(page.contiguous().to(self.device, non_blocking=True) for page in pages)
            for x, new in zip(held, fitting(moved, held), strict=True):
                x.index_copy_(0, index, new)
            arrival = torch.cuda.Event()
            arrival.record(self.stream)
        self._arrivals.update(dict.fromkeys(slots.tolist(), arrival))

    def wait(self, slots: NDArray[np.int64]) -> None:
        current = torch.cuda.current_stream(self.device)
        arrivals = {slot: event for slot in slots.tolist() if (event := self._arrivals.get(slot))}
        for event in {id(event): event for event in arrivals.values()}.values():
            current.wait_event(event)
        for slot in arrivals:  # after all were waited for: an interruption may come between
            self._arrivals.pop(slot, None)


def fitting(pages: Parts, held: Parts) -> Parts:
    """Pages as these slots hold them: unpacked, if only the pages are packed."""
    return unpack(pages, held[0].dtype) if len(pages) > len(held) else pages
