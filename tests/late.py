"""A device whose copies come late, without a GPU: for tests of what waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.layout import CacheLayout
from lce.cache.movers import Mover, fitting
from lce.cache.packing import Parts
from lce.cache.tiers import Disk, TierStack

ORDERS = ("only what is waited for", "last first", "random")


class Late(Mover):
    """Copies arrive late and in a bad order; a slot holds NaN until what was put there has arrived."""

    asynchronous = True

    def __init__(self, order: str = ORDERS[0], seed: int = 0) -> None:
        self.order = order
        self.random = Random(seed)
        self.coming: dict[int, tuple[Parts, Parts]] = {}  # by slot, the oldest first: where to, and what

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)

    def put(self, held: Parts, slots: NDArray[np.int64], pages: Parts) -> None:
        pages = fitting(pages, held)
        for page, slot in enumerate(slots.tolist()):
            for x in held:
                x[slot] = torch.nan
            self.coming.pop(slot, None)
            self.coming[slot] = held, tuple(x[page] for x in pages)

    def wait(self, slots: NDArray[np.int64]) -> None:
        waited = set(slots.tolist())
        order = list(reversed(self.coming))
        if self.order == "random":
            self.random.shuffle(order)
        for slot in order:
            if not waited & self.coming.keys():
                return
            if slot in waited or self.order != "only what is waited for":
                for x, new in zip(*self.coming.pop(slot), strict=True):
                    x[slot] = new


@dataclass(frozen=True)
class LateDevice(CacheLayout):
    """A layout with tiers as beside a GPU, whose tensors are in plain memory: see `no_gpu`."""

    @property
    def on_cpu(self) -> bool:
        return False


def no_gpu(patch: pytest.MonkeyPatch, order: str = ORDERS[0]) -> None:
    """Have the movers of a GPU be `Late` and plain ones from now on."""
    patch.setattr("lce.cache.tiers.Cuda", lambda device: Late(order))
    patch.setattr("lce.cache.tiers.Pinned", Mover)


def disks_of(tiers: TierStack) -> list[Disk]:
    """The files below a stack's pools."""
    return [tier for tier in tiers if isinstance(tier, Disk)]
