"""`CacheLayout`: the model, method, budgets and devices that a cache is made for, and the sizes that follow.

`lce.cache.limits` says what fits into the budgets.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lce.attention import ROW, row_bytes
from lce.cache.formats import FORMATS, KVFormat
from lce.cache.method_state import FileTensor, MethodState
from lce.cache.row_file import CHECK_BYTES
from lce.errors import UsageError, shown

DEVICE, HOST, DISK = "device", "host", "disk"  # the names of the tiers for users


@dataclass(frozen=True)
class Budgets:
    """Limits on bytes of keys and values in device and host memory (None: no limit), and the spill files' folder."""

    device: int | None = None
    host: int | None = None
    spill_dir: Path | None = None


@dataclass(frozen=True)
class AccessPattern:
    """How a method accesses the cache, in chunks of `chunk_size` tokens.

    Every query attends the first `sinks` tokens and the `local` tokens before its block, which stay on the device. With
    `per_head`, heads choose chunks independently, so the chunks of each KV head move on their own. With `turned`, keys
    are cached unrotated, and turned to their positions when they are attended.
    """

    chunk_size: int = 256
    sinks: int = 0
    local: int = 0
    per_head: bool = False
    turned: bool = False


@dataclass(frozen=True)
class CacheLayout:
    """What a KV cache is made for, and the sizes of tokens, chunks and pages.

    A page is the unit that moves between tiers: one complete chunk's keys and values, of one KV head if heads choose
    independently, else of all KV heads. `make_state` creates the method's state of a layer, and `could_keep` says
    whether tensors of a file can be that state. Texts are read in blocks of at most `block` tokens.

    In `sliding_layers` no method acts: these layers have no method state, and only tokens within `AccessPattern.local`
    are read, so that chunks in lower tiers stay there.
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
    make_state: Callable[["CacheLayout"], Mapping[str, MethodState]] = field(default=lambda layout: {}, compare=False)
    could_keep: Callable[[int, Mapping[str, FileTensor], "CacheLayout", int], bool] = field(
        default=lambda layer, kept, layout, n_tokens: True, compare=False
    )
    read_size: int = 8192  # how many tokens are read at a time when all tokens of a context are read
    kv_dtype: str = "auto"  # the name of the format of stored keys and values: see `lce.cache.formats`
    borders: tuple[tuple[int, torch.device], ...] = ()
    first_layer: int = 0
    device_tier: str = DEVICE
    sliding_layers: frozenset[int] = frozenset()  # numbered over all layers of the model

    @cached_property
    def by_device(self) -> tuple["CacheLayout", ...]:
        """One layout per device, for the device's layers, in order; only this layout if there is one device.

        The device with the most layers has the whole device budget. Other devices have the same budget per layer, so
        that all devices are full at the same length of text. The host budget is divided among the layers.
        """
        return _parts(self) if self.borders else (self,)

    @property
    def layers(self) -> range:
        """The layers of this layout, numbered over all layers of the model."""
        return range(self.first_layer, self.first_layer + self.n_layers)

    @property
    def acting_layers(self) -> tuple[int, ...]:
        """The layers of this layout in which the method acts."""
        return tuple(layer for layer in self.layers if layer not in self.sliding_layers)

    @property
    def chunk_size(self) -> int:
        """The number of tokens in a chunk, L."""
        return self.access.chunk_size

    @property
    def on_cpu(self) -> bool:
        """Whether the model runs on the CPU, where device and host are one memory."""
        return self.device.type == "cpu"

    @property
    def key_bytes(self) -> int:
        """The bytes of one token's keys in one layer, of all KV heads, in the model's dtype."""
        return self.n_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's keys and values over all layers, on the device."""
        return 2 * self.n_layers * self.n_kv_heads * self.format.stored_dim * self.format.stored_dtype.itemsize

    def whole_chunks(self, n_tokens: int) -> int:
        """Return `n_tokens` rounded up to whole chunks."""
        return -(-n_tokens // self.chunk_size) * self.chunk_size

    def old(self, n_tokens: int) -> int:
        """Return how many of the first `n_tokens` tokens are in chunks that local attention no longer reaches."""
        return max(n_tokens - self.access.local, 0) // self.chunk_size * self.chunk_size

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
        kind = FORMATS[self.kv_dtype]
        vector = (row_bytes(self.head_dim), ROW) if kind.on_device else (self.head_dim, self.dtype)
        return kind(self.page_heads, self.chunk_size, *vector)

    @property
    def page_bytes(self) -> int:
        """The bytes of one page on the device, where pages are not packed."""
        return self.chunk_size * self.token_bytes // (self.n_layers * self.n_groups)


def _parts(layout: CacheLayout) -> tuple[CacheLayout, ...]:
    whole = replace(layout)  # a copy, because a reference to `layout`, which caches the parts, would be a cycle
    firsts = [0, *(layer for layer, _ in layout.borders)]
    counts = [stop - first for first, stop in zip(firsts, [*firsts[1:], layout.n_layers], strict=True)]
    parts, budgets = [], layout.budgets
    for first, count, device in zip(firsts, counts, all_devices(layout), strict=True):
        own = None if budgets.device is None else budgets.device * count // max(counts)
        host = None if budgets.host is None else budgets.host * count // layout.n_layers
        part = replace(layout, n_layers=count, device=device, first_layer=first, device_tier=str(device), borders=())
        kept = Budgets(own, host, budgets.spill_dir)
        # a method may compare the number of all layers with the number in its file of learned maps
        parts.append(replace(part, budgets=kept, make_state=lambda _: whole.make_state(whole)))
    return tuple(parts)


def kv_dtype_of(option: object) -> str:
    """Return the format's name for the option `kv_dtype`: a name, a dtype, or None for "auto". Raises `UsageError`."""
    name = "auto" if option is None else str(option).removeprefix("torch.")
    if name not in FORMATS or not isinstance(option, str | torch.dtype | None):
        raise UsageError(f"unknown kv_dtype {shown(option)}; expected {', '.join(FORMATS)}")
    return name


def device_layout(layout: CacheLayout, layer: int) -> CacheLayout:
    """Return the layout for the device that has a layer."""
    return next(part for part in layout.by_device if layer < part.first_layer + part.n_layers)


def state_of(layout: CacheLayout, layer: int) -> Mapping[str, MethodState]:
    """Return a layer's empty method state."""
    return {} if layer in layout.sliding_layers else layout.make_state(layout)


def all_devices(layout: CacheLayout) -> tuple[torch.device, ...]:
    """Return the devices, in the order of their layers."""
    return layout.device, *(device for _, device in layout.borders)


def devices_text(layout: CacheLayout) -> str:
    """Return the devices as users write them: `cuda:0,cuda:1`."""
    return ",".join(map(str, all_devices(layout)))


def query_bytes(layout: CacheLayout) -> int:
    """Return the bytes of one token's queries in one layer, of all query heads."""
    return layout.n_heads * layout.head_dim * layout.dtype.itemsize


def segment_of(layout: CacheLayout) -> int:
    """Return the number of tokens that a long read takes at a time: about `read_size`, in whole chunks."""
    return max(1, layout.read_size // layout.chunk_size) * layout.chunk_size


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
        self.group_rows: int = file_rows(cache, self.row_tokens)
        self.n_rows = cache.n_layers * cache.n_groups * self.group_rows
        self.rows_start = (16 + 8 * cache.n_layers) * 4096
        self.checks_start = self.rows_start + self.n_rows * cache.format.row_bytes
        self.small_start = self.checks_start + self.n_rows * CHECK_BYTES


def file_rows(layout: CacheLayout, n_tokens: int | NDArray[np.int64]) -> Any:
    """Return how many rows of a file the first `n_tokens` tokens (a number or an array) of a head group take."""
    return n_tokens + n_tokens // layout.chunk_size * layout.format.extra_rows
