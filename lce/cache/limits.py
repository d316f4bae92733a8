"""What fits where: a layout's budgets as tokens, pages and bytes of each tier."""

from dataclasses import dataclass
from functools import cached_property

from lce.cache.layout import DEVICE, DISK, Budgets, CacheLayout, file_rows
from lce.cache.row_file import CHECK_BLOCK, CHECK_BYTES
from lce.cache.tier import UNBOUNDED, Tier, kinds
from lce.errors import CapacityError
from lce.sizes import enough_text, size_text


@dataclass(frozen=True)
class Limits:
    """The user's limits on keys and values in each tier. On a CPU the smaller budget of device and host counts."""

    layout: CacheLayout

    @property
    def budget(self) -> int | None:
        """The most bytes of keys and values in the device's memory; None: no limit."""
        budgets = self.layout.budgets
        if not self.layout.on_cpu:
            return budgets.device
        return min((x for x in (budgets.device, budgets.host) if x is not None), default=None)

    @property
    def budget_option(self) -> str:
        """The command-line option that sets `budget`."""
        host = self.layout.budgets.host
        by_host = self.layout.on_cpu and host is not None and self.budget == host
        return "--kv-host-budget" if by_host else "--kv-device-budget"

    @cached_property
    def lower(self) -> dict[type[Tier], int]:
        """The tiers below the device, fastest first, each with the most pages that it may hold, or `UNBOUNDED`."""
        if self.layout.on_cpu and self.layout.budgets == Budgets():  # then no page ever leaves the memory
            return {}
        return {kind: limit for kind in kinds() if (limit := kind.limit(self.layout)) is not None}

    @property
    def overflows(self) -> bool:
        """Whether a tier below the device is unbounded, so that a context may exceed the memory budgets."""
        return UNBOUNDED in self.lower.values()

    def n_pages(self, n_tokens: int) -> int:
        """Return how many pages hold the complete chunks of `n_tokens` tokens, over all layers."""
        return n_tokens // self.layout.chunk_size * self.layout.n_layers * self.layout.n_groups

    @property
    def resident_tokens(self) -> int:
        """The largest number of tokens whose keys and values fit in the device's budget, without a lower tier."""
        if self.budget is None:
            return UNBOUNDED
        if self.layout.borders:
            return Limits(self.layout.by_device[0]).resident_tokens
        return self.budget // (self.layout.token_bytes * self.layout.chunk_size) * self.layout.chunk_size

    @property
    def recent_tokens(self) -> int:
        """The capacity in tokens of each layer's buffer, in a context whose keys and values exceed the budget."""
        return self.layout.whole_chunks(self.layout.access.local + self.layout.block) + self.layout.chunk_size

    @property
    def pinned_chunks(self) -> int:
        """The number of chunks with sinks, which never leave the device in layers where the method acts."""
        return -(-self.layout.access.sinks // self.layout.chunk_size)

    @property
    def least_pool_bytes(self) -> int:
        """The bytes of the smallest device pool: all pinned chunks, and one more chunk of one layer."""
        chunks = self.pinned_chunks * len(self.layout.acting_layers) + 1
        return chunks * self.layout.chunk_size * self.layout.token_bytes // self.layout.n_layers

    @property
    def least_budget(self) -> int:
        """The smallest device budget, in bytes, that still works for contexts larger than the budget."""
        return self.recent_tokens * self.layout.token_bytes + self.least_pool_bytes

    def device_slots(self, buffer_tokens: int = 0) -> int:
        """Return how many pages fit beside buffers of at least `buffer_tokens`. Raises `CapacityError` for too few."""
        if self.budget is None:
            return UNBOUNDED
        in_buffers = max(buffer_tokens, self.recent_tokens) * self.layout.token_bytes
        if self.budget < (least := in_buffers + self.least_pool_bytes):
            raise CapacityError(
                f"a budget of {size_text(self.budget)} for keys and values is too small for blocks of "
                f"{self.layout.block} tokens and what every query sees; give {self.budget_option} "
                f"{enough_text(least)} or more, or a smaller --block"
            )
        return (self.budget - in_buffers) // self.layout.page_bytes

    def needs(self, n_tokens: int) -> dict[str, int]:
        """Return the most bytes that `n_tokens` take in each tier. The last memory tier has what exceeds budgets."""
        whole = self.layout.whole_chunks(n_tokens)
        needs = {DEVICE: whole * self.layout.token_bytes} | {kind.name: 0 for kind in self.lower}
        return needs if whole <= self.resident_tokens or not self.lower else self._tiered(n_tokens, needs)

    def _tiered(self, n_tokens: int, needs: dict[str, int]) -> dict[str, int]:
        whole = self.layout.whole_chunks(n_tokens)
        recent, page = self.recent_tokens * self.layout.token_bytes, self.layout.page_bytes
        needs[DEVICE] = max(self.least_budget, recent + ((self.budget or 0) - recent) // page * page)
        last = [*self.lower][-1]
        for kind, limit in self.lower.items():
            if limit == UNBOUNDED:  # no page ever leaves this tier
                needs[kind.name] = kind.bytes_for(self.layout, self.n_pages(self.layout.old(n_tokens)))
                break
            needs[kind.name] = kind.bytes_for(self.layout, max(limit, self.n_pages(whole)) if kind is last else limit)
        return needs

    def state_bytes(self, n_tokens: int) -> int:
        """Return the most bytes that the method's state can take after `n_tokens` tokens, over all layers."""
        states = self.layout.make_state(self.layout).values()
        return len(self.layout.acting_layers) * sum(state.most_bytes(n_tokens, self.layout.block) for state in states)

    def check_bytes(self, n_tokens: int, n_filed: int = 0) -> int:
        """Return the most bytes of memory for the checksums of `n_tokens` tokens and of `n_filed` more of a file."""
        spilled, filed = self.needs(n_tokens).get(DISK, 0), 0
        if n_filed:
            filed = self.layout.n_layers * self.layout.n_groups * file_rows(self.layout, n_filed)
        rows = spilled // self.layout.format.row_bytes if spilled else 0
        return (-(-rows // CHECK_BLOCK) * CHECK_BLOCK + filed) * CHECK_BYTES
