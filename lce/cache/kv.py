"""The KV cache: one `KVCache` a context, one `LayerCache` a layer.

A pass writes its block behind what is committed and then commits once. An interrupted pass commits nothing; the next
pass overwrites what it wrote. Ctrl-C may come at any call, so a change is assignments without a call between them, or
can be made again: `KVCache.settle` does what an interrupted pass left undone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import Enum

import torch
from torch import Tensor

from lce.cache.layer import KVBuffer, LayerCache, Opened, Residency, Tiered, Unrounded, Whole
from lce.cache.layout import DEVICE, DISK, HOST, CacheLayout
from lce.cache.method_state import Held
from lce.cache.row_file import RowFile
from lce.cache.shared import Holder, MemoryFile, share
from lce.cache.tiers import Disk, Tier, TierStack, Traffic
from lce.errors import UsageError
from lce.profiling import timed

UNROUNDED = "unrounded"  # tokens of a layer that have no row in a file: "unrounded/0"


@dataclass(frozen=True)
class Mark:
    """A length of a cache, and what the method's states need to be those of that length again: see `KVCache.mark`.

    `unrounded` are the tokens of each layer that were not rounded yet; None where they are not known.
    """

    length: int
    states: Sequence[Mapping[str, Held]]  # by layer, then by name
    unrounded: Sequence[Unrounded | None]


class Pass(Enum):
    """What a cache is in the middle of."""

    NONE = 0
    WRITING = 1
    COMMITTING = 2


class KVCache:
    """The keys and values of one context. While all of them fit their budget there are no tiers, and nothing is done
    for any.

    A pass begins with `begin` and ends with `commit`. After an interruption, `settle` drops the block, or completes its
    commit: all layers have it, or none.

    Each device that has some of the layers has tiers of its own: `residencies`, all of one kind.
    """

    def __init__(
        self, layout: CacheLayout, layers: Sequence[LayerCache], residencies: Sequence[Residency],
        file: RowFile | None = None,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.layers = list(layers)
        self.residencies = list(residencies)
        self.file = file  # takes what memory may not hold; None: a spill file, where the layout has a folder for one
        self._pass = Pass.NONE

    @classmethod
    def empty(cls, layout: CacheLayout, capacity: int = 0, file: RowFile | None = None) -> KVCache:
        """Return a cache without tokens, with space for `capacity`."""
        layers = [
            LayerCache(part.first_layer + number, part, KVBuffer(part, 0), Whole(), part.make_state(part))
            for part in layout.by_device
            for number in range(part.n_layers)
        ]
        cache = cls(layout, layers, [Whole() for _ in layout.by_device], file)
        cache.reserve(capacity)
        return cache

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.layers[0].length

    @property
    def residency(self) -> Residency:
        """The residency of the first device's layers. All others are of its kind."""
        return self.residencies[0]

    @property
    def tiers(self) -> list[Tier]:
        """The tiers, fastest first, those of each device; empty while everything is in the buffers."""
        return [tier for stack in self.stacks for tier in stack]

    @property
    def stacks(self) -> list[TierStack]:
        """The tiers of each device; empty while everything is in the buffers."""
        return [residency.tiers for residency in self.residencies if not isinstance(residency, Whole)]

    @property
    def by_device(self) -> Iterator[tuple[CacheLayout, Residency, list[LayerCache]]]:
        """What each device has: its layout, its residency and its layers."""
        for part, residency in zip(self.layout.by_device, self.residencies, strict=True):
            yield part, residency, self.layers[part.first_layer : part.first_layer + part.n_layers]

    @property
    def in_file(self) -> int:
        """Tokens at the beginning that stay in the file from which the context was opened."""
        return self.layers[0].buffer.first if isinstance(self.residency, Opened) else 0

    @timed("cache")
    def reserve(self, n_tokens: int) -> None:
        """Make space for `n_tokens` in all, so that appending up to there allocates nothing.

        Beyond the budget, old chunks go to the tiers from now on. Raises `CapacityError` where they cannot.
        """
        layout = self.layout
        if isinstance(self.residency, Whole) and layout.whole_chunks(n_tokens) > layout.resident_tokens:
            self.residencies = [Tiered(TierStack.empty(part, n_tokens, self.file)) for part in layout.by_device]
        for _, residency, layers in self.by_device:
            if isinstance(residency, Opened):
                recent = layout.whole_chunks(n_tokens) - layers[0].buffer.first
                if layout.budget is not None and recent > layers[0].buffer.capacity:
                    residency.tiers.shrink(recent)
            for layer in layers:
                if not isinstance(residency, Tiered):
                    layer.reserve(n_tokens)
                elif isinstance(layer.residency, Whole):
                    layer.move_to(residency)

    @timed("cache")
    def prefetch(self, layer: int) -> None:
        """Begin to fetch what this layer is likely to ask for. Does nothing for a layer behind the last."""
        if not isinstance(self.residency, Whole) and layer < len(self.layers):
            self.layers[layer].tiers.prefetch(self.layers[layer].number)

    def begin(self) -> None:
        """Begin a pass, after what an interrupted one left undone."""
        self.settle()
        self._pass = Pass.WRITING

    def has_space(self, n_tokens: int) -> bool:
        """Return whether there is memory for the last of `n_tokens`, at an index that the device knows."""
        layout = self.layout
        if not isinstance(self.residency, Whole) or layout.format.rounds or n_tokens > self.layers[0].buffer.capacity:
            return False
        return all(state.has_space(n_tokens - 1) for layer in self.layers for state in layer.state.values())

    def make_space(self, n_tokens: int) -> None:
        """Make `has_space` true for the tokens behind the committed ones, up to `n_tokens`, as far as it can be."""
        self.reserve(n_tokens)
        for layer in self.layers:
            for state in layer.state.values():
                state.make_space(n_tokens - 1)

    @property
    def memory(self) -> Iterator[Tensor | None]:
        """Every tensor that a decode step reads and writes; they stay the same ones until memory grows."""
        for layer in self.layers:
            yield layer.buffer.k
            yield layer.buffer.v
            for state in layer.state.values():
                yield state.memory

    def appended(self, n_tokens: int) -> None:
        """Have `n_tokens` tokens in every layer: the pass wrote them at an index that the device knew."""
        for layer in self.layers:
            layer.stop = n_tokens

    @timed("cache")
    def commit(self) -> None:
        """Keep what the pass that just ended wrote, in every layer."""
        self._pass = Pass.COMMITTING
        for layer in self.layers:
            layer.commit()
        self._pass = Pass.NONE

    def discard(self) -> None:
        """Forget what was written since the last commit, in every layer."""
        for layer in self.layers:
            layer.discard()
        self._pass = Pass.NONE

    def settle(self) -> None:
        """Complete a commit that was interrupted; forget a pass that was interrupted before it."""
        if self._pass is Pass.COMMITTING:
            self.commit()
        elif self._pass is Pass.WRITING:
            self.discard()

    def nearest(self, n_tokens: int) -> int:
        """Return how many tokens `truncate` can go back to, at most `n_tokens`.

        Keys, values, summaries and token rows go back to any token; pending queries to tokens of the open chunk and to
        any chunk's border; a tensor that every block replaces goes back to the beginning alone.
        """
        self.settle()
        found, before = n_tokens, n_tokens + 1
        while found != before:  # one state's answer may be too far for another one
            before = found
            for layer in self.layers:
                for state in layer.state.values():
                    found = state.nearest(found, layer.length)
        return found

    def mark(self, n_tokens: int | None = None) -> Mark:
        """Return what `go_back` needs: for the tokens so far, or for the first `n_tokens`, which `nearest` allows.

        Nothing is copied: what is committed is never written again. If the format rounds, tokens that are not rounded
        yet are copied, if the mark is of all tokens; else what is rounded stays so.
        Valid until the cache goes back to before it.
        """
        self.settle()
        unrounded = [layer.unrounded() if n_tokens is None else None for layer in self.layers]
        n_tokens = self.length if n_tokens is None else n_tokens
        states = [{name: x.mark(n_tokens) for name, x in layer.state.items()} for layer in self.layers]
        return Mark(n_tokens, states, unrounded)

    def go_back(self, mark: Mark) -> None:
        """Be as when `mark` was taken, bit by bit; all at once. Bytes: a buffer of recent tokens, at need."""
        self.settle()
        held = zip(self.layers, mark.states, mark.unrounded, strict=True)
        self.layers = [layer.as_of(mark.length, marks, unrounded) for layer, marks, unrounded in held]

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens alone, as if no more had been read; but what was rounded stays so.

        Raises `UsageError` where what the method keeps cannot go back to there: `nearest` says where it can.
        """
        if not 0 <= n_tokens <= self.length:
            raise UsageError(f"cannot go back to {n_tokens:,} tokens; expected 0 to {self.length:,}")
        if (nearest := self.nearest(n_tokens)) < n_tokens:
            raise UsageError(
                f"cannot go back to {n_tokens:,} tokens: what the method keeps of them is gone; "
                f"go back to {nearest:,}, and prefill the rest again"
            )
        self.go_back(self.mark(n_tokens))

    def fork(self) -> KVCache:
        """Return a cache of another context with the same committed tokens.

        On a CPU the two share the memory of what is in the buffers, which the first fork moves: one copy, a layer at a
        time. Where it cannot be shared, it is copied: see `lce.cache.shared`.
        """
        self.settle()
        share([each for layer in self.layers for each in layer.shareable()])
        holders: dict[MemoryFile, Holder] = {}

        def holder_of(file: MemoryFile) -> Holder:
            if file not in holders:
                holders[file] = Holder(file)
            return holders[file]

        forked: list[LayerCache] = []
        residencies: list[Residency] = []
        for _, residency, layers in self.by_device:
            other: Residency = Whole()
            if isinstance(residency, Tiered):
                other = Tiered(residency.tiers.fork())
            elif isinstance(residency, Opened):
                other = Opened(residency.tiers.fork(layers[0].buffer.capacity))
            forked += [layer.fork(other, holder_of) for layer in layers]
            residencies.append(other)
        return KVCache(self.layout, forked, residencies)

    def tensors(self) -> dict[str, Tensor]:
        """Return what the method keeps in every layer, as it was committed, by name.

        If the format rounds, also the tokens that have no row in a file: `unrounded/LAYER`, `[2, G, n, D]`.
        """
        self.settle()
        kept = {
            f"layers/{layer.index}/{name}/{part}": x
            for layer in self.layers
            for name, state in layer.state.items()
            for part, x in state.tensors(layer.length).items()
        }
        border = self.layout.file(self.length).row_tokens
        if border < self.length:
            for layer in self.layers:
                kept[f"{UNROUNDED}/{layer.index}"] = torch.stack(layer.span(border, layer.length))
        return kept

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes held now, shared or not: keys and values, and what the method keeps."""
        held = {part.device_tier: 0 for part in self.layout.by_device} | {HOST: 0, DISK: 0}
        for layer in self.layers:
            own = layer.buffer.n_bytes + sum(state.n_bytes for state in layer.state.values())
            held[layer.layout.device_tier] += own
        files = set()  # the devices' tiers may share one
        for name, tier in self._named_tiers():
            if not (isinstance(tier, Disk) and tier.file in files):
                held[name] += tier.n_bytes
            if isinstance(tier, Disk):
                files.add(tier.file)
        return held

    @property
    def own_bytes(self) -> int:
        """Bytes of memory that this context adds to the process.

        Memory that contexts share counts in equal parts for all that use it: the sum over all contexts of a process is
        what they take together.
        """
        held = self.bytes_by_tier
        buffers = [x for layer in self.layers for x in layer.row_buffers]
        files = {x.file for x in buffers if x.file is not None}
        shared = sum(file.n_bytes // len(file.holders) for file in files)
        return sum(held.values()) - held[DISK] - sum(x.n_bytes - x.own_bytes for x in buffers) + shared

    @property
    def bytes_reserved(self) -> int:
        """Bytes of disk taken, those reserved for later rows included."""
        return sum(file.bytes_taken for file in {tier.file for tier in self.tiers if isinstance(tier, Disk)})

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What went through each tier; empty while there is none."""
        found: dict[str, Traffic] = {}
        for name, tier in self._named_tiers():
            found[name] = _together(found[name], tier.traffic) if name in found else tier.traffic
        return found

    def _named_tiers(self) -> Iterator[tuple[str, Tier]]:
        """Yield the tiers as users read them."""
        for part, stack in zip(self.layout.by_device, self.stacks, strict=False):  # no stacks: all in the buffers
            for tier in stack:
                yield (part.device_tier if tier.name == DEVICE else tier.name), tier


def _together(one: Traffic, other: Traffic) -> Traffic:
    return Traffic(*map(operator.add, astuple(one), astuple(other)))
