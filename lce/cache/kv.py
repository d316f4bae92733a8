"""The KV cache: one `KVCache` per context, one `LayerCache` per layer.

A pass through the model writes its block of tokens after the committed tokens, and then commits once. An interrupted
pass commits nothing; the next pass overwrites its rows. Ctrl-C may interrupt any function call. So a change is either a
few assignments without a call between them, or can be repeated: `KVCache.settle` completes an interrupted commit.
"""

import functools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lce.cache.disk import Disk
from lce.cache.layer import KVBuffer, LayerCache, Unrounded
from lce.cache.layout import DISK, HOST, CacheLayout, FileLayout, state_of
from lce.cache.limits import Limits
from lce.cache.method_state import Held, RecentRows
from lce.cache.row_file import RowFile
from lce.cache.shared import MemoryFile, share
from lce.cache.tier import Tier, Traffic
from lce.cache.tiers import TierStack
from lce.errors import UsageError
from lce.profiling import timed

UNROUNDED = "unrounded"  # tensors in a file: "unrounded/0" has layer 0's recent tokens, which are not quantised yet


class Eviction(NamedTuple):
    """An eviction: of the text's first `n_tokens` tokens, each KV head has keys and values of only `n_rows` tokens."""

    n_tokens: int = 0
    n_rows: int = 0

    @property
    def n_lost(self) -> int:
        """The number of tokens without a row. A later token's row is the token's index minus this number."""
        return self.n_tokens - self.n_rows


@dataclass(frozen=True)
class Mark:
    """A length to which a cache can go back, with the data that going back takes: see `KVCache.mark`."""

    length: int
    states: Sequence[Mapping[str, Held]]  # for each layer, the marks of the method's states by name
    unrounded: Sequence[Unrounded | None]  # for each layer, the tokens that a lossy format had not rounded, if copied


@dataclass(eq=False)
class KVCache:
    """The keys and values of one context. As long as they fit the memory budget, they are in buffers, without tiers.

    A pass begins with `begin` and ends with `commit`. Each device has a stack of tiers for its own layers: `stacks`, in
    the order of devices, empty while everything is in buffers. Tokens beyond the budgets go to `file` or, if it is
    None, to a spill file in the layout's folder, if the layout has one.

    `length` and sizes count rows; `n_tokens`, `nearest` and `truncate` count tokens. A row has the keys and values of
    one token, the same in all KV heads. The first `evicted.n_rows` rows differ: there each KV head has tokens of its
    own, in ascending order, and `evicted.n_lost` tokens have no row.
    """

    layout: CacheLayout
    layers: list[LayerCache]
    stacks: list[TierStack] = field(default_factory=list)
    file: RowFile | None = None
    evicted: Eviction = field(default_factory=Eviction)
    _pass: Literal["none", "writing", "committing"] = "none"
    _past: dict[str, Traffic] = field(default_factory=dict)  # of tiers that were left

    @classmethod
    def empty(cls, layout: CacheLayout, capacity: int = 0, file: RowFile | None = None) -> "KVCache":
        """Return a cache without tokens, with space for `capacity` tokens."""
        layers = [
            LayerCache(layer, part, KVBuffer(part, 0), None, state_of(part, layer))
            for part in layout.by_device
            for layer in part.layers
        ]
        cache = cls(layout, layers, file=file)
        cache.reserve(capacity)
        return cache

    @property
    def length(self) -> int:
        """The number of committed rows."""
        return self.layers[0].length

    @property
    def n_tokens(self) -> int:
        """The number of committed tokens of the text, with or without a row."""
        return self.length + self.evicted.n_lost

    @property
    def fixed(self) -> int:
        """The number of first tokens that an eviction concerned. The cache cannot go back to fewer tokens."""
        return self.evicted.n_tokens

    @property
    def tiers(self) -> list[Tier]:
        """All tiers: device by device, fastest first on each device; empty while everything is in the buffers."""
        return [tier for stack in self.stacks for tier in stack]

    @property
    def growing(self) -> bool:
        """Whether tokens move from the buffers to the tiers once they are no longer recent."""
        return bool(self.stacks) and self.stacks[0].growing

    @property
    def in_file(self) -> int:
        """The number of tokens, from the first on, that stay in the file from which the context was opened."""
        return self.layers[0].buffer.first if self.stacks and not self.growing else 0

    @timed("cache")
    def reserve(self, n_tokens: int) -> None:
        """Make space for `n_tokens` in all, so that appending allocates nothing up to that length.

        Beyond the budget, old chunks go to tiers from now on. Raises `CapacityError` if no tier has enough space.
        """
        layout = self.layout
        if not self.stacks and n_tokens <= self.layers[-1].buffer.capacity:  # the last one that was made so large
            return
        if not self.stacks and layout.whole_chunks(n_tokens) > Limits(layout).resident_tokens:
            self.stacks = [TierStack.empty(part, n_tokens, self.file) for part in layout.by_device]
        growing, buffer = self.growing, self.layers[0].buffer
        recent = layout.whole_chunks(n_tokens) - buffer.first
        if self.stacks and not growing and Limits(layout).budget is not None and recent > buffer.capacity:
            for stack in self.stacks:
                stack.shrink(recent)
        for layer in self.layers:
            if not growing:
                layer.reserve(n_tokens)
            elif layer.stack is None:
                layer.stack = self.stacks[layout.by_device.index(layer.layout)]
                layer.retire()

    @timed("cache")
    def prefetch(self, layer: int) -> None:
        """Begin to fetch the pages that a layer is likely to need. Does nothing beyond the last layer."""
        if self.stacks and layer < len(self.layers):
            self.layers[layer].tiers.prefetch(layer)

    def begin(self) -> None:
        """Settle an earlier pass that was interrupted, then begin a pass."""
        self.settle()
        if self.stacks and not self.growing and not any(layer.buffer.first for layer in self.layers):
            self._leave_tiers()
        self._pass = "writing"

    def _leave_tiers(self) -> None:
        for layer in self.layers:
            layer.stack = None
        self._past, self.stacks = self.traffic, []

    def has_space(self, n_tokens: int) -> bool:
        """Return whether a recorded step (a CUDA graph) can write token `n_tokens - 1` without allocating memory."""
        if self.stacks or self.layout.kv_dtype != "auto" or n_tokens > self.layers[0].buffer.capacity:
            return False
        return all(state.has_space(n_tokens - 1) for layer in self.layers for state in layer.state.values())

    def make_space(self, n_tokens: int) -> None:
        """Allocate memory, if possible, so that `has_space` is true for every length up to `n_tokens`."""
        self.reserve(n_tokens)
        for layer in self.layers:
            for state in layer.state.values():
                state.make_space(n_tokens - 1)

    def appended(self, n_tokens: int) -> None:
        """Set the layers' uncommitted length to `n_tokens`, after a recorded step (a CUDA graph) wrote tokens."""
        for layer in self.layers:
            layer.stop = n_tokens

    @timed("cache")
    def commit(self) -> None:
        """Commit the tokens of the pass that just ended, in every layer."""
        self._pass = "committing"
        for layer in self.layers:
            layer.commit()
        self._pass = "none"

    def settle(self) -> None:
        """Complete an interrupted commit; drop a pass that was interrupted before its commit."""
        if self._pass == "committing":
            self.commit()
        elif self._pass == "writing":
            for layer in self.layers:
                layer.discard()
            self._pass = "none"

    def nearest(self, n_tokens: int) -> int:
        """Return the largest length, at most `n_tokens`, that `truncate` can go back to.

        Keys, values and summaries can go back to any length; an open chunk to a length in itself, or to the start of a
        chunk; a tensor that every block replaces, to its points (`Staged`), or to 0. Raises `UsageError` for a length
        within evicted tokens.
        """
        self.settle()
        if n_tokens < self.fixed:
            first = f"{self.fixed:,} tokens, of which keys were evicted"
            raise UsageError(f"this context cannot go back into its first {first}; prefill the text again")
        found, before = n_tokens - self.evicted.n_lost, -1
        while found != before:  # until all states agree: one state's answer may be impossible for another
            before = found
            for layer in self.layers:
                for state in layer.state.values():
                    found = state.nearest(found, layer.length)
        return found + self.evicted.n_lost

    def mark(self, n_tokens: int | None = None) -> Mark:
        """Return a mark for `go_back`, after all tokens, or after `n_tokens`, a length that `nearest` returned.

        A mark after all tokens copies tokens that a lossy format has not rounded yet. A mark after `n_tokens` copies
        nothing: rounded tokens stay rounded. A mark is valid until the cache goes back to fewer tokens.
        """
        self.settle()
        copied = n_tokens is None and self.layout.format.rounds
        unrounded = [
            (x.rounded, torch.stack(x.buffer.span(x.rounded, x.length))) if copied else None for x in self.layers
        ]
        n_rows = self.length if n_tokens is None else n_tokens - self.evicted.n_lost
        states = [{name: x.mark(n_rows) for name, x in layer.state.items()} for layer in self.layers]
        return Mark(n_rows, states, unrounded)

    def go_back(self, mark: Mark) -> None:
        """Restore the cache bit for bit as it was at `mark`. Copies at most the recent tokens of each layer."""
        self.settle()
        held = zip(self.layers, mark.states, mark.unrounded, strict=True)
        self.layers = [layer.as_of(mark.length, marks, unrounded) for layer, marks, unrounded in held]

    def truncate(self, n_tokens: int) -> None:
        """Keep only the first `n_tokens` tokens. Raises `UsageError` unless `nearest` allows this length."""
        if not 0 <= n_tokens <= self.n_tokens:
            raise UsageError(f"cannot go back to {n_tokens:,} tokens; expected 0 to {self.n_tokens:,}")
        if (nearest := self.nearest(n_tokens)) < n_tokens:
            why = f"what the method keeps of them is gone; go back to {nearest:,}, and prefill the rest again"
            raise UsageError(f"cannot go back to {n_tokens:,} tokens: {why}")
        self.go_back(self.mark(n_tokens))

    def fork(self) -> "KVCache":
        """Return a copy of this cache for another context. Memory is shared if possible: see `lce.cache.shared`."""
        self.settle()
        share([each for layer in self.layers for each in layer.shareable()])
        for_fork = functools.cache(MemoryFile.for_fork)
        stacks = [stack.fork(0 if self.growing else self.layers[0].buffer.capacity) for stack in self.stacks]
        own = dict(zip(self.stacks, stacks, strict=True))
        layers = [layer.fork(layer.stack and own[layer.stack], for_fork) for layer in self.layers]
        return KVCache(self.layout, layers, stacks, evicted=self.evicted)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save beside rows: the committed states, and the tokens that are not rounded yet."""
        self.settle()
        kept, border = dict[str, Tensor](), FileLayout(self.layout, self.length).row_tokens
        for layer in self.layers:
            for name, state in layer.state.items():
                for tensor, number in (*state.points, state.committed(layer.length)):
                    if tensor is not None:
                        kept[f"layers/{layer.index}/{name}/{number}"] = tensor
            if border < self.length:
                kept[f"{UNROUNDED}/{layer.index}"] = torch.stack(layer.span(border, layer.length))
        return kept

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """The bytes of keys, values and the method's state in each tier; bytes shared with forks count in full."""
        held = Counter(dict.fromkeys((*(part.device_tier for part in self.layout.by_device), HOST, DISK), 0))
        for layer in self.layers:
            held[layer.layout.device_tier] += layer.buffer.n_bytes + sum(x.n_bytes for x in layer.state.values())
        for tier in self.tiers:
            held[tier.name] += 0 if isinstance(tier, Disk) else tier.n_bytes
        return {**held, DISK: sum(file.n_bytes for file in self._files)}

    @property
    def bytes_reserved(self) -> int:
        """The bytes on disk that the cache's files take, with space reserved for later rows."""
        return sum(max(file.n_bytes, file.reserved) for file in self._files)

    @property
    def _files(self) -> set[RowFile]:
        return {tier.file for tier in self.tiers if isinstance(tier, Disk)}

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Hits, misses and bytes moved, for each tier by name; empty if there were no tiers."""
        found = dict(self._past)
        for tier in {id(tier.traffic): tier for tier in self.tiers}.values():  # two disk tiers share one `Traffic`
            before = found.get(tier.name, Traffic())
            found[tier.name] = Traffic(*map(operator.add, astuple(before), astuple(tier.traffic)))
        return found


def expect(cache: KVCache, n_tokens: int) -> None:
    """Prepare for a text that will surely have `n_tokens`: take huge pages for buffers that it fills by half."""
    buffer = cache.layers[0].buffer
    if not buffer.expected:
        buffer.expected = True
        if 2 * n_tokens >= buffer.capacity:
            for layer in cache.layers:
                for rows in layer.buffer.rows:
                    rows.enlarge()


def off_grid(cache: KVCache) -> int:
    """Return how many tokens a cache has beyond the last multiple of its method's grid: the next block is shorter."""
    states = (state for layer in cache.layers for state in layer.state.values())
    return cache.n_tokens % max((state.grid for state in states if isinstance(state, RecentRows)), default=1)
