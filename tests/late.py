"""A device whose copies come late, without a GPU: for tests of what waits for them."""

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.cache.disk import Disk
from lce.cache.formats import Parts
from lce.cache.layout import CacheLayout
from lce.cache.movers import Mover, Slabs, Unpack, located
from lce.cache.tiers import TierStack

GARBAGE = 113
ORDERS = ("only what is waited for", "last first", "random")


class Late(Mover):
    """Copies arrive late and in a bad order; a slot holds `GARBAGE` until what was put there has arrived.

    What is copied is read late, too. `asynchronous` is False for the host's memory beside a late device.
    """

    def __init__(self, order: str = ORDERS[0], seed: int = 0, *, asynchronous: bool = True) -> None:
        self.order, self.random, self.asynchronous = order, Random(seed), asynchronous
        self.coming: dict[int, tuple[Parts, int, Parts]] = {}  # by slot, the oldest first: where to, and what

    @torch.inference_mode(mode=False)
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return _spoil(torch.empty(shape, dtype=dtype))

    def put(self, slabs: Slabs, slots: Any, pages: Parts, after: Any = None, unpack: Unpack = lambda x: x) -> None:
        pages = unpack(pages)
        for held, rows, part in located(slabs, slots):
            here = range(part.start, part.stop)
            for page, slot, row in zip(here, slots[part].tolist(), rows.tolist(), strict=True):
                for x in held:
                    _spoil(x[row])
                self.coming.pop(slot, None)
                self.coming[slot] = held, row, tuple(x[page] for x in pages)

    def wait(self, slots: NDArray[np.int64]) -> None:
        waited, order = set(slots.tolist()), list(reversed(self.coming))
        if self.order == "random":
            self.random.shuffle(order)
        for slot in order:
            if not waited & self.coming.keys():
                return
            if slot in waited or self.order != "only what is waited for":
                held, row, page = self.coming.pop(slot)
                for x, new in zip(held, page, strict=True):
                    x[row] = new


def _spoil(x: Tensor) -> Tensor:
    """NaN everywhere, and in whole numbers what nobody puts there."""
    return x.fill_(torch.nan if x.is_floating_point() else GARBAGE)


@dataclass(frozen=True)
class LateDevice(CacheLayout):
    """A layout with tiers as beside a GPU, whose tensors are in plain memory: see `no_gpu`."""

    @property
    def on_cpu(self) -> bool:
        return False


def no_gpu(patch: pytest.MonkeyPatch, order: str = ORDERS[0], slab: int = 1) -> None:
    """Have the movers of a GPU be `Late` from now on, and slabs of `slab` bytes or a page: by default of one page."""
    patch.setattr("lce.cache.pool.Cuda", lambda device: Late(order))
    patch.setattr("lce.cache.pool.Pinned", lambda device: Late(order, asynchronous=False))
    patch.setattr("lce.cache.pool.SLAB", slab)


def disks_of(tiers: TierStack) -> list[Disk]:
    return [tier for tier in tiers if isinstance(tier, Disk)]
