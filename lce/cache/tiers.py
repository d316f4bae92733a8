"""The tiers that hold a long context's keys and values. They form a chain, fastest first.

    recent buffers ──> device pool ──> host pool ──> file ──> nowhere      a tier that a machine lacks is left out:
                       └────────── pages come back ──┘                     without a GPU there is one pool

Complete chunks never change, so a page may be in several tiers at once. A page is dirty while no tier below has it. A
full pool gives up its least recently used pages; dirty pages move down first.

Beside a GPU, pages are moved while the model computes. New pages are copied to the host's pool at once, while it has
free slots, so that most pages are clean when they leave. Another thread fetches pages that a layer is likely to need;
every other use of the tiers waits for that thread first.

The device's pool has keys and values as kernels read them. Tiers below it have packed pages, in the layout's format. A
page is packed on its way down and unpacked on its way up, without loss: a lossy format has rounded the numbers before.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lce.attention import Tiles
from lce.cache.disk import Disk
from lce.cache.layout import CacheLayout
from lce.cache.limits import Limits
from lce.cache.movers import Fetch, Numbers
from lce.cache.pool import Device, Pool
from lce.cache.row_file import RowFile
from lce.cache.tier import Nowhere, Pages, Tier, slices
from lce.errors import CapacityError, LceError
from lce.sizes import size_text


class TierStack:
    """The tiers of one context, from the device's pool down, with all chunks that have left the recent buffers.

    The same numbers come back from any tier. Chunks that are no longer recent move here only if it is `growing`.
    """

    def __init__(
        self, layout: CacheLayout, bottom: Tier, buffer_tokens: int = 0, n_tokens: int = 0, *, growing: bool = True
    ) -> None:
        """Create empty tiers above `bottom`. The device's pool and buffers of `buffer_tokens` tokens share a budget."""
        self.layout = layout
        self.growing = growing
        tier = bottom
        for kind, limit in reversed(Limits(layout).lower.items()):
            if limit and not isinstance(bottom, kind):
                tier = kind.build(layout, tier, n_tokens)
        self.top = Device(layout, tier, buffer_tokens)
        self.pools = [tier for tier in self if isinstance(tier, Pool)]
        self.bottom = self.pools[-1].below  # a file's tier, or `Nowhere`
        self.n_read = Counter[int]()  # for each layer, how many tokens of head groups were read
        self._asked: dict[int, Pages] = {}  # the pages that each layer last requested from the device's pool
        self._coming: tuple[Fetch, Pages, Numbers] | None = None  # the running prefetch: its work, pages and slots

    @classmethod
    def empty(cls, layout: CacheLayout, n_tokens: int, file: RowFile | None) -> "TierStack":
        """Return empty tiers for `n_tokens` tokens, above `file`. Raises `CapacityError` if they do not fit."""
        limits, whole = Limits(layout), layout.whole_chunks(n_tokens)
        if file is None and not limits.overflows:
            held = (limits.budget if layout.on_cpu else layout.budgets.host) or 0
            page_bytes, most = layout.page_bytes if layout.on_cpu else layout.format.page_bytes, limits.resident_tokens
            if limits.lower:
                most = [*limits.lower.values()][-1] // limits.n_pages(layout.chunk_size) * layout.chunk_size
            if whole > most:
                raise CapacityError(
                    f"{n_tokens:,} tokens need {size_text(limits.n_pages(whole) * page_bytes)} for keys and values, "
                    f"and the budget is {size_text(held)}: {most:,} tokens; give --spill-dir, or a larger budget"
                )
        return cls(layout, Nowhere() if file is None else Disk(layout, Nowhere(), file), n_tokens=n_tokens)

    def __iter__(self) -> Iterator[Tier]:
        """Yield the tiers, fastest first."""
        tier: Tier = self.top
        while not isinstance(tier, Nowhere):
            yield tier
            tier = tier.below

    def groups(self, layer: int) -> Numbers:
        """Return a layer's head groups, which are numbered over all layers of the device."""
        first = (layer - self.layout.first_layer) * self.layout.n_groups
        return np.arange(first, first + self.layout.n_groups)

    def add(self, layer: int, first: int, k: Tensor, v: Tensor) -> None:
        """Add or replace a layer's chunks from `first` on, `k v [G, m·L, D]`. Not atomic: call again after an error."""
        self.settle()
        layout, m = self.layout, k.shape[1] // self.layout.chunk_size
        for some in slices(m, max(1, self.top.capacity // layout.n_groups)):
            tokens = slice(some.start * layout.chunk_size, some.stop * layout.chunk_size)
            pages = Pages.grid(self.groups(layer), np.arange(first + some.start, first + some.stop))
            self.top.forget(pages)
            heads = (x[:, tokens].unflatten(1, (-1, layout.chunk_size)) for x in (k, v))  # [G, m, L, D]
            grouped = (x.unflatten(0, (-1, layout.page_heads)).transpose(1, 2) for x in heads)  # [groups, m, P, L, D]
            parts = tuple(x.flatten(0, 1) for x in grouped)
            self.top.write_through(pages, *parts)
            self.top.write(pages, *parts)
            if layer in layout.sliding_layers:
                self.top.release(self.top.index[pages])

    def chunks(self, layer: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return copies of a layer's chunks, `k v [G, (stop - first)·L, D]`. No page leaves the device's pool."""
        self.settle()
        pages = self.top.read(Pages.grid(self.groups(layer), np.arange(first, stop)))
        self.n_read[layer] += (stop - first) * self.layout.chunk_size * self.layout.n_groups
        # [groups·m, P, L, D] -> [groups, m, P, L, D] -> [G, m, L, D] -> [G, m·L, D]
        k, v = (x.unflatten(0, (self.layout.n_groups, -1)).transpose(1, 2).flatten(0, 1).flatten(1, 2) for x in pages)
        return k, v

    def tokens(self, layer: int, index: Numbers) -> tuple[Tensor, Tensor]:
        """Return keys and values `[G, n, D]` of ascending tokens. A chunk of which half is requested is read whole."""
        self.settle()
        size, groups = self.layout.chunk_size, self.groups(layer)
        self.n_read[layer] += len(index) * len(groups)
        present, counts = np.unique(index // size, return_counts=True)
        whole = Pages.grid(groups, present[counts * 2 >= size][: self.top.capacity // len(groups)])
        self._asked[layer] = whole
        self.top.bring(whole)
        rows = self.top.read_rows(Pages.grid(groups, index // size), np.tile(index % size, len(groups)))
        rows = rows.unflatten(0, (len(groups), -1))  # [groups, n, 2, P, D]
        return rows[:, :, 0].transpose(1, 2).flatten(0, 1), rows[:, :, 1].transpose(1, 2).flatten(0, 1)

    def rounds(self, layer: int, wanted: NDArray[np.bool_]) -> Iterator[Tiles]:
        """Yield, in one or more rounds, the pages of a layer that are True in `wanted [groups, chunks]`, as tiles.

        Each `Tiles` is valid until the next. A single round also has the layer's other pages that are in the pool. Of
        several rounds, each has the chunks of a head group that follow those of the rounds before, so results do not
        depend on the pool's size. Missing pages cycle through a quarter of the slots, so that few pages leave.
        """
        self.settle()
        groups, chunks = np.nonzero(wanted)
        own, top, first = self.groups(layer), self.top, 0
        pages = Pages(own[groups], chunks)
        self.n_read[layer] += len(chunks) * self.layout.chunk_size
        self._asked[layer] = pages
        while first < len(chunks):
            missing, n = top.index[pages.at(slice(first, None))] < 0, top.capacity
            if len(chunks) > n:
                n = min(n, int(np.searchsorted(missing.cumsum(), max(1, n // 4), side="right")))
            some = slice(first, first + n)
            slots = top.bring(pages.at(some))
            top.mover.wait(slots)
            if len(slots) == len(chunks):
                index = top.index.on_device(slice(int(own[0]), int(own[-1]) + 1), wanted.shape[1])
            else:
                found = np.full(wanted.shape, -1, np.int64)
                found[groups[some], chunks[some]] = slots
                index = top.mover.upload(torch.from_numpy(found))
            yield self._slot_tiles(index)
            first += n
            if first < len(chunks):
                top.release(slots[missing[:n]])

    def _slot_tiles(self, slot: Tensor) -> Tiles:
        """Return the device's pool as tiles. Head p of the page in slot s is tile `s·P + p`; -1 in `slot`: no page."""
        (k, v), heads = self.top.slots.slabs[0], self.layout.page_heads
        if heads > 1:
            slot = slot[:, None]
            tile = torch.where(slot < 0, -1, slot * heads + torch.arange(heads, device=k.device)[:, None])
            slot = tile.flatten(0, 1)
        return Tiles(k.flatten(0, 1), v.flatten(0, 1), slot)

    def prefetch(self, layer: int) -> None:
        """Begin to fetch the pages of a layer's last request, likely to be the next one's, beside the computation."""
        top = self.top
        if not top.mover.asynchronous or layer not in self._asked:
            return
        self.settle()
        self._coming = top.fetch(self._asked[layer].at(slice(top.capacity // 2)))
        if self._coming is not None:
            self._coming[0].begin()

    def settle(self) -> None:
        """Wait until the work of `prefetch`, if any, has ended. If it failed, the next request raises the error."""
        if self._coming is None:
            return
        fetch, pages, slots = self._coming
        if (error := fetch.finish()) is None:
            self.top.arrived(pages, slots)
            self.top.traffic.early += len(slots)
        self._coming = None
        if not isinstance(error, LceError | None):
            raise error

    def write_down(self) -> None:
        """Copy all pages to the tier `bottom`, a file, except pages that are there already."""
        self.settle()
        for pool in reversed(self.pools):  # the host's pool first, whose pages need not come from the device
            pool.copy_down(self.bottom, self.bottom)

    def shrink(self, buffer_tokens: int) -> None:
        """Replace the pools by smaller, empty pools, beside buffers of `buffer_tokens`. A file must have all pages."""
        self.settle()
        smaller = TierStack(self.layout, self.bottom, buffer_tokens)
        for pool, old in zip(smaller.pools, self.pools, strict=True):
            pool.traffic = old.traffic
        self.top, self.pools = smaller.top, smaller.pools

    def fork(self, buffer_tokens: int = 0) -> "TierStack":
        """Return another context's tiers with the same pages: shared in the file, or copied to the lowest pool."""
        self.settle()
        if self.bottom.writable:
            self.write_down()
        other = TierStack(self.layout, self.bottom.fork(), buffer_tokens, growing=self.growing)
        for pool in self.pools if not self.bottom.writable else ():
            pool.copy_down(other.pools[-1], pool.below)
        return other
