"""How a cache is laid out: what it holds of each token, and how much of it may be where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from lce.cache.movers import Cuda, Mover, Pinned
from lce.cache.pool import PageShape, Pool
from lce.cache.rows import RowFile, SpillFile
from lce.cache.tiers import Archive
from lce.errors import CapacityError

# Some chunks: where each is, `[G, chunks]`, -1 for those of other rounds, and what it is in, `k v [P, M, L, D]`: number
# n is chunk n % M of head n // M. None: chunk c of KV head g is number g·M + c.
Round = tuple[Tensor | None, Tensor, Tensor]

SEGMENT = 8192  # tokens that are read in one go by what reads everything


@dataclass(frozen=True)
class CacheShape:
    """What a cache holds for each token of each layer."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    chunk_size: int
    dtype: torch.dtype
    device: torch.device
    segment: int = SEGMENT

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def cut(self) -> int:
        """Tokens between two cuts of what is read in one go: whole chunks, about `segment`."""
        return max(1, self.segment // self.chunk_size) * self.chunk_size

    def in_chunks(self, n_tokens: int) -> int:
        """`n_tokens` rounded up to whole chunks."""
        return -(-n_tokens // self.chunk_size) * self.chunk_size


@dataclass(frozen=True)
class Budgets:
    """What a user allows: bytes of keys and values in each kind of memory, None for no bound; a folder for the rest."""

    device: int | None = None
    host: int | None = None
    spill_dir: Path | None = None


class Reach(Protocol):
    """What tiers must know of a method: see `lce.methods.base.Method`."""

    @property
    def pinned(self) -> tuple[int, int]: ...

    @property
    def apart(self) -> bool: ...


@dataclass(frozen=True)
class Tiering:
    """How much of a cache may be where.

    `device` and `host` bound the keys and values in the two kinds of memory, in bytes; None is no bound. Where the
    model runs on the CPU they are one memory, and the smaller of them counts. What does not fit goes to a file in
    `spill_dir`. `sinks` first tokens and `local` recent ones stay on the device, for every query sees them; `block` is
    how many tokens come at once. With `apart`, heads choose apart, and keys of one KV head move without the others'.
    """

    device: int | None = None
    host: int | None = None
    spill_dir: Path | None = None
    sinks: int = 0
    local: int = 0
    block: int = 1
    apart: bool = False

    @classmethod
    def of(cls, budgets: Budgets, method: Reach, block: int) -> Self:
        """The tiers of a context that is read by `method` in blocks of `block` tokens."""
        sinks, local = method.pinned
        return cls(budgets.device, budgets.host, budgets.spill_dir, sinks, local, block, method.apart)

    def budget(self, shape: CacheShape) -> int | None:
        """Bytes of keys and values in the memory that the model computes in."""
        if shape.device.type != "cpu":
            return self.device
        return min((x for x in (self.device, self.host) if x is not None), default=None)

    def has_rest(self, shape: CacheShape) -> bool:
        """Whether what memory may not hold has somewhere to go."""
        return self.spill_dir is not None or (shape.device.type != "cpu" and self.host is None)

    def resident_tokens(self, shape: CacheShape) -> int | None:
        """How many tokens need no lower tier."""
        budget = self.budget(shape)
        return None if budget is None else budget // (shape.token_bytes * shape.chunk_size) * shape.chunk_size

    def recent_tokens(self, shape: CacheShape) -> int:
        """Tokens in the buffers of a context that is larger than its budget."""
        return shape.in_chunks(self.local + self.block) + shape.chunk_size

    def pages(self, shape: CacheShape) -> PageShape:
        """The pages that move between tiers."""
        heads = 1 if self.apart else shape.n_kv_heads
        return PageShape(
            shape.n_layers, shape.n_kv_heads // heads, heads, shape.chunk_size, shape.head_dim, shape.dtype
        )

    def n_pinned(self, shape: CacheShape) -> int:
        """Chunks of sinks."""
        return -(-self.sinks // shape.chunk_size)

    def least_pool(self, shape: CacheShape) -> int:
        """Bytes of the smallest pool: the sinks, and a chunk of one layer at a time."""
        chunks = self.n_pinned(shape) * shape.n_layers + 1
        return chunks * shape.chunk_size * shape.token_bytes // shape.n_layers

    def least(self, shape: CacheShape) -> int:
        """The smallest budget, in bytes, that a context larger than it can be read with."""
        return self.recent_tokens(shape) * shape.token_bytes + self.least_pool(shape)

    def archived_tokens(self, shape: CacheShape, n_tokens: int) -> int:
        """The most tokens of a context of `n_tokens` that leave the recent buffers: complete chunks."""
        return max(0, n_tokens - self.local) // shape.chunk_size * shape.chunk_size

    def needs(self, shape: CacheShape, n_tokens: int) -> dict[str, int]:
        """Bytes of keys and values that a context of `n_tokens` comes to hold in each tier; at most, in those below.

        What no tier may hold is said of the last one in memory, which then needs more than its budget.
        """
        on_cpu = shape.device.type == "cpu"
        whole, fits = shape.in_chunks(n_tokens) * shape.token_bytes, self.resident_tokens(shape)
        needs = {"device": whole, **({} if on_cpu else {"host": 0}), **({} if self.spill_dir is None else {"disk": 0})}
        if fits is None or shape.in_chunks(n_tokens) <= fits or (on_cpu and self.spill_dir is None):
            return needs
        recent, page = self.recent_tokens(shape) * shape.token_bytes, self.pages(shape).n_bytes
        archived = self.archived_tokens(shape, n_tokens) * shape.token_bytes
        needs["device"] = max(self.least(shape), recent + ((self.budget(shape) or 0) - recent) // page * page)
        if not on_cpu and self.host is None:  # grows by half, and nothing ever leaves it
            return {**needs, "host": (archived // page * 3 // 2 + 16) * page}
        if not on_cpu and self.host is not None:
            needs["host"] = max(self.host // page * page, whole if self.spill_dir is None else 0)
        return needs if self.spill_dir is None else {**needs, "disk": archived}

    def pools(self, shape: CacheShape, recent: int = 0) -> list[Pool]:
        """Empty tiers in memory, fastest first, beside buffers of `recent` tokens, or of those that are usual."""
        pages, budget = self.pages(shape), self.budget(shape)
        on_cpu = shape.device.type == "cpu"
        limit = None
        if budget is not None:
            in_buffers = max(recent, self.recent_tokens(shape)) * shape.token_bytes
            if budget < (least := in_buffers + self.least_pool(shape)):
                raise CapacityError(
                    f"a budget of {budget} bytes for keys and values is too small for blocks of {self.block} tokens "
                    f"and what every query sees; expected {least} or more, or a smaller --block"
                )
            limit = (budget - in_buffers) // pages.n_bytes
        mover = Mover() if on_cpu else Cuda(shape.device)
        first = Pool("memory" if on_cpu else "device", pages, mover, limit)
        below = None if self.host is None else self.host // pages.n_bytes
        if on_cpu or below == 0:
            return [first]
        return [first, Pool("host", pages, Pinned(), below)]

    def archive(self, shape: CacheShape, n_tokens: int, file: RowFile | None = None) -> Archive:
        """An empty archive for a context of `n_tokens`, over `file` or a spill file whose place is reserved here.

        Raises `CapacityError` where it cannot hold them.
        """
        below = None if shape.device.type == "cpu" else self.host
        if file is None and not self.has_rest(shape):
            held = (self.budget(shape) if below is None else below) or 0
            if (needed := shape.in_chunks(n_tokens) * shape.token_bytes) > held:
                raise CapacityError(
                    f"{n_tokens} tokens need {needed} bytes of keys and values, and the budget is {held}: "
                    f"{held // shape.token_bytes} tokens; give --spill-dir, or a larger budget"
                )
        if file is None and self.spill_dir is not None:
            file = spill = SpillFile(self.spill_dir, self.pages(shape).row_shape, shape.dtype)
            spill.reserve(self.needs(shape, n_tokens)["disk"] // spill.row_bytes)
        return Archive(self.pages(shape), self.pools(shape), file, self.n_pinned(shape))
