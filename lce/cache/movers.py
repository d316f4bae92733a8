"""How pages get into a pool's slots: by a plain copy, into pinned memory, or on a CUDA stream of their own."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Mover:
    """Plain memory: `put` returns when the pages are there. The base of all movers."""

    asynchronous = False  # whether `put` may return before the pages are there, so that fetching early pays

    def slots(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Uninitialised keys and values of slots."""
        return torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)

    def put(self, k: Tensor, v: Tensor, slots: NDArray[np.int64], new_k: Tensor, new_v: Tensor) -> None:
        """Begin to copy pages `[n, P, L, D]` into these slots of `k v [n_slots, P, L, D]`."""
        index = torch.from_numpy(slots)
        k.index_copy_(0, index, new_k.to(k.device))
        v.index_copy_(0, index, new_v.to(v.device))

    def wait(self, slots: NDArray[np.int64]) -> None:
        """Make later computation see what was put into these slots."""

    def pick(self, x: Tensor, slots: NDArray[np.int64]) -> Tensor:
        """Copies of some slots, `[n, P, L, D]`, that were waited for."""
        return x.index_select(0, torch.from_numpy(slots).to(x.device))


class Pinned(Mover):
    """Page-locked memory: a GPU copies from it without the CPU."""

    def slots(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return torch.empty(shape, dtype=dtype, pin_memory=True), torch.empty(shape, dtype=dtype, pin_memory=True)

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

    def slots(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return torch.empty(shape, dtype=dtype, device=self.device), torch.empty(shape, dtype=dtype, device=self.device)

    def put(self, k: Tensor, v: Tensor, slots: NDArray[np.int64], new_k: Tensor, new_v: Tensor) -> None:
        """Ordered after what still reads the slots; call `wait` before reading them. Bytes: one copy of the pages."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # it may still read the slots, or write `new`
        with torch.cuda.stream(self.stream):
            index = torch.from_numpy(slots).to(self.device, non_blocking=True)
            for x, new in ((k, new_k), (v, new_v)):
                new.record_stream(self.stream) if new.is_cuda else None
                x.index_copy_(0, index, new.contiguous().to(self.device, non_blocking=True))
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
