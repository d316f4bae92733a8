"""The sizes of a KV cache in bytes, as the cache itself, memory plans, reservations and files need them.

`CacheLayout` combines a model's sizes, a method's access pattern, the budgets and the device, and counts all bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lce.cache.formats import FORMATS, KVFormat
from lce.cache.method_state import FileTensor, MethodState
from lce.cache.row_file import CHECK_BLOCK, CHECK_BYTES
from lce.cache.tier import DEVICE, DISK, UNBOUNDED, Tier, kinds
from lce.errors import CapacityError
from lce.sizes import enough_text, size_text

READ_SIZE = 8192  # how many tokens are read at a time when all tokens of a context are read


@dataclass(frozen=True)
class Budgets:
    """Limits on bytes of keys and values in device and host memory (None: no limit), and the spill files' folder."""

    device: int | None = None
    host: int | None = None
    spill_dir: Path | None = None


@dataclass(frozen=True)
class AccessPattern:
    """How a method accesses the cache.

    A chunk has `chunk_size` tokens. Every query attends the first `sinks` tokens and the `local` tokens before its
    block: these tokens stay on the device. With `per_head`, heads choose chunks independently, so the chunks of each KV
    head move between tiers on their own.
    """

    chunk_size: int = 256
    sinks: int = 0
    local: int = 0
    per_head: bool = False


@dataclass(frozen=True)
class CacheLayout:
    """The sizes of a KV cache, from a token to a file, and the limit of each tier.

    A page is the unit that moves between tiers: one complete chunk's keys and values, of one KV head if heads choose
    independently, else of all KV heads. `make_state` creates the method's state of a layer, and `could_keep` says
    whether tensors of a file can be that state. Texts are read in blocks of at most `block` tokens.

    In `sliding_layers` no method acts: these layers have no method state, and only tokens within `AccessPattern.local`
    are read, so that chunks in lower tiers stay there.

    Where the model runs on the CPU, device and host are one memory, and the smaller budget counts.

    Tiers below the device, and files, have pages in the `format` that `kv_dtype` names. A lossy format rounds complete
    chunks once they are `old` (local attention no longer sees them), in the device's memory, too.

    A model's layers may be on several GPUs. `borders` has a pair for each GPU but the first: the number of its first
    layer, and the device. `by_device` has a layout for the layers of each device, which begin at `first_layer` of the
    model. Users see the device's memory as the tier `device_tier`. Files hold all layers, whatever the devices.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    access: AccessPattern = AccessPattern()
    budgets: Budgets = Budgets()
    block: int = 1
    make_state: Callable[[CacheLayout], Mapping[str, MethodState]] = field(default=lambda layout: {}, compare=False)
    could_keep: Callable[[int, Mapping[str, FileTensor], CacheLayout, int], bool] = field(
        default=lambda layer, kept, layout, n_tokens: True, compare=False
    )
    read_size: int = READ_SIZE
    kv_dtype: str = "auto"  # the name of the format of stored keys and values: see `lce.cache.formats`
    borders: tuple[tuple[int, torch.device], ...] = ()
    first_layer: int = 0
    device_tier: str = DEVICE
    sliding_layers: frozenset[int] = frozenset()  # numbered over all layers of the model

    @cached_property
    def by_device(self) -> tuple[CacheLayout, ...]:
        """One layout per device, for the device's layers, in order; only this layout if there is one device.

        The device with the most layers has the whole device budget. Other devices have the same budget per layer, so
        that all devices are full at the same length of text. The host budget is divided among the layers.
        """
        if not self.borders:
            return (self,)
        whole = replace(self)  # a copy, because a reference to `self`, which caches the parts, would be a cycle
        firsts = [0, *(layer for layer, _ in self.borders)]
        counts = [stop - first for first, stop in zip(firsts, [*firsts[1:], self.n_layers], strict=True)]
        parts, budgets = [], self.budgets
        for first, count, device in zip(firsts, counts, self.devices, strict=True):
            own = None if budgets.device is None else budgets.device * count // max(counts)
            host = None if budgets.host is None else budgets.host * count // self.n_layers
            part = replace(self, n_layers=count, device=device, first_layer=first, device_tier=str(device), borders=())
            kept = Budgets(own, host, budgets.spill_dir)
            # a method may compare the number of all layers with the number in its file of learned maps
            parts.append(replace(part, budgets=kept, make_state=lambda _: whole.make_state(whole)))
        return tuple(parts)

    def part_of(self, layer: int) -> CacheLayout:
        """Return the layout for the device that has this layer."""
        return next(part for part in self.by_device if layer < part.first_layer + part.n_layers)

    @property
    def layers(self) -> range:
        """The layers of this layout, numbered over all layers of the model."""
        return range(self.first_layer, self.first_layer + self.n_layers)

    @cached_property
    def acting_layers(self) -> tuple[int, ...]:
        """The layers of this layout in which the method acts."""
        return tuple(layer for layer in self.layers if layer not in self.sliding_layers)

    def state_of(self, layer: int) -> Mapping[str, MethodState]:
        """Return a layer's empty method state."""
        return {} if layer in self.sliding_layers else self.make_state(self)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices, in the order of their layers."""
        return self.device, *(device for _, device in self.borders)

    @property
    def devices_text(self) -> str:
        """The devices as users write them: `cuda:0,cuda:1`."""
        return ",".join(map(str, self.devices))

    @property
    def chunk_size(self) -> int:
        """The number of tokens in a chunk, L."""
        return self.access.chunk_size

    @property
    def segment(self) -> int:
        """The number of tokens that a long read takes at a time: about `read_size`, in whole chunks."""
        return max(1, self.read_size // self.chunk_size) * self.chunk_size

    @property
    def key_bytes(self) -> int:
        """The bytes of one token's keys in one layer, of all KV heads, in the model's dtype."""
        return self.n_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """The bytes of one vector, a token's key or value in one KV head, as the device stores it."""
        return self.format.stored_dim * self.format.stored_dtype.itemsize

    @property
    def query_bytes(self) -> int:
        """The bytes of one token's queries in one layer, of all query heads."""
        return self.n_heads * self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's keys and values over all layers, on the device."""
        return 2 * self.n_layers * self.n_kv_heads * self.stored_bytes

    def whole_chunks(self, n_tokens: int) -> int:
        """Return `n_tokens` rounded up to whole chunks."""
        return -(-n_tokens // self.chunk_size) * self.chunk_size

    def old(self, n_tokens: int) -> int:
        """Return how many of the first `n_tokens` tokens are in chunks that local attention no longer reaches."""
        return max(n_tokens - self.access.local, 0) // self.chunk_size * self.chunk_size

    def state_bytes(self, n_tokens: int) -> int:
        """Return the most bytes that the method's state can take after `n_tokens` tokens, over all layers."""
        states = self.make_state(self).values()
        return len(self.acting_layers) * sum(state.most_bytes(n_tokens, self.block) for state in states)

    # Pages, the units that move between tiers

    @property
    def page_heads(self) -> int:
        """The number of KV heads in a page, P."""
        return 1 if self.access.per_head else self.n_kv_heads

    @property
    def n_groups(self) -> int:
        """The number of head groups in a layer. A head group is the KV heads that share a page."""
        return self.n_kv_heads // self.page_heads

    @cached_property
    def format(self) -> KVFormat:
        """The format of packed pages, in tiers below the device and in files."""
        return FORMATS[self.kv_dtype](self.page_heads, self.chunk_size, self.head_dim, self.dtype)

    @property
    def page_bytes(self) -> int:
        """The bytes of one page on the device, where pages are not packed."""
        return self.chunk_size * self.token_bytes // (self.n_layers * self.n_groups)

    def n_pages(self, n_tokens: int) -> int:
        """Return how many pages hold the complete chunks of `n_tokens` tokens, over all layers."""
        return n_tokens // self.chunk_size * self.n_layers * self.n_groups

    def file_rows(self, n_tokens: int | NDArray[np.int64]) -> Any:
        """Return how many rows of a file the first `n_tokens` tokens (a number or an array) of a head group take."""
        return n_tokens + n_tokens // self.chunk_size * self.format.extra_rows

    @property
    def pinned_chunks(self) -> int:
        """The number of chunks with sinks, which never leave the device in layers where the method acts."""
        return -(-self.access.sinks // self.chunk_size)

    # Budgets, the user's limits on bytes in each tier

    @property
    def on_cpu(self) -> bool:
        """Whether the model runs on the CPU, where device and host are one memory."""
        return self.device.type == "cpu"

    @property
    def budget(self) -> int | None:
        """The most bytes of keys and values in the device's memory; None: no limit."""
        if not self.on_cpu:
            return self.budgets.device
        return min((x for x in (self.budgets.device, self.budgets.host) if x is not None), default=None)

    @property
    def budget_option(self) -> str:
        """The command-line option that sets `budget`."""
        by_host = self.on_cpu and self.budgets.host is not None and self.budget == self.budgets.host
        return "--kv-host-budget" if by_host else "--kv-device-budget"

    @cached_property
    def lower(self) -> dict[type[Tier], int]:
        """The tiers below the device, fastest first, each with the most pages that it may hold, or `UNBOUNDED`."""
        return {kind: limit for kind in kinds() if (limit := kind.limit(self)) is not None}

    @property
    def overflows(self) -> bool:
        """Whether a tier below the device is unbounded, so that a context may exceed the memory budgets."""
        return UNBOUNDED in self.lower.values()

    @property
    def resident_tokens(self) -> int:
        """The largest number of tokens whose keys and values fit in the device's budget, without a lower tier."""
        if self.budget is None:
            return UNBOUNDED
        if self.borders:
            return self.by_device[0].resident_tokens
        return self.budget // (self.token_bytes * self.chunk_size) * self.chunk_size

    @property
    def recent_tokens(self) -> int:
        """The capacity in tokens of each layer's buffer, in a context whose keys and values exceed the budget."""
        return self.whole_chunks(self.access.local + self.block) + self.chunk_size

    @property
    def least_pool_bytes(self) -> int:
        """The bytes of the smallest device pool: all pinned chunks, and one more chunk of one layer."""
        chunks = self.pinned_chunks * len(self.acting_layers) + 1
        return chunks * self.chunk_size * self.token_bytes // self.n_layers

    @property
    def least_budget(self) -> int:
        """The smallest device budget, in bytes, that still works for contexts larger than the budget."""
        return self.recent_tokens * self.token_bytes + self.least_pool_bytes

    def device_slots(self, buffer_tokens: int = 0) -> int:
        """Return how many pages fit in the device's budget beside buffers of at least `buffer_tokens` tokens.

        Raises `CapacityError` if so few pages fit that the model cannot run.
        """
        if self.budget is None:
            return UNBOUNDED
        in_buffers = max(buffer_tokens, self.recent_tokens) * self.token_bytes
        if self.budget < (least := in_buffers + self.least_pool_bytes):
            raise CapacityError(
                f"a budget of {size_text(self.budget)} for keys and values is too small for blocks of {self.block} "
                f"tokens and what every query sees; give {self.budget_option} {enough_text(least)} or more, or a "
                "smaller --block"
            )
        return (self.budget - in_buffers) // self.page_bytes

    def needs(self, n_tokens: int) -> dict[str, int]:
        """Return the most bytes of keys and values that a context of `n_tokens` holds in each tier.

        Bytes that exceed all budgets are added to the last tier in memory, whose budget is then exceeded.
        """
        whole = self.whole_chunks(n_tokens)
        needs = {DEVICE: whole * self.token_bytes} | {kind.name: 0 for kind in self.lower}
        if whole <= self.resident_tokens or not self.lower:
            return needs
        recent, page = self.recent_tokens * self.token_bytes, self.page_bytes
        needs[DEVICE] = max(self.least_budget, recent + ((self.budget or 0) - recent) // page * page)
        last = [*self.lower][-1]
        for kind, limit in self.lower.items():
            if limit == UNBOUNDED:  # no page ever leaves this tier
                needs[kind.name] = kind.bytes_for(self, self.n_pages(self.old(n_tokens)))
                break
            needs[kind.name] = kind.bytes_for(self, max(limit, self.n_pages(whole)) if kind is last else limit)
        return needs

    def check_bytes(self, n_tokens: int, n_filed: int = 0) -> int:
        """Return the most bytes of memory for checksums of `n_tokens`, and of `n_filed` tokens in a context file."""
        spilled = self.needs(n_tokens).get(DISK, 0) // self.format.row_bytes
        filed: int = self.n_layers * self.n_groups * self.file_rows(n_filed)
        return (-(-spilled // CHECK_BLOCK) * CHECK_BLOCK + filed) * CHECK_BYTES

    def file(self, n_tokens: int) -> FileLayout:
        """Return the byte offsets of a context file of `n_tokens` tokens."""
        return FileLayout(self, n_tokens)


class FileLayout:
    """The byte offsets in a context file of `n_tokens` tokens: header, rows, checksums of rows, small tensors.

    The first `row_tokens` tokens have rows: all tokens or, if the format is lossy, only the tokens of old chunks. Later
    tokens are then in small tensors. A head group has `group_rows` rows, extra rows of pages included, and the file has
    `n_rows`. Rows begin at byte `rows_start`, checksums at `checks_start`, small tensors at `small_start`. The space
    for the header is ample.
    """

    def __init__(self, cache: CacheLayout, n_tokens: int) -> None:
        self.cache = cache
        self.n_tokens = n_tokens
        self.row_tokens = cache.old(n_tokens) if cache.format.rounds else n_tokens
        self.group_rows: int = cache.file_rows(self.row_tokens)
        self.n_rows = cache.n_layers * cache.n_groups * self.group_rows
        self.rows_start = (16 + 8 * cache.n_layers) * 4096
        self.checks_start = self.rows_start + self.n_rows * cache.format.row_bytes
        self.small_start = self.checks_start + self.n_rows * CHECK_BYTES
