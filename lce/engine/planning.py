"""Plans memory: computes the bytes that a context needs in each tier, and refuses a context that does not fit.

A plan counts keys and values, the method's own state, and, of a model that is not loaded yet, the weights and the
activations of a block. The activations do not grow with the text. What a method's choices take is not counted.

Two contexts may each fit in free memory and yet not fit together, because memory is taken only as a context grows. So
the process' `Allowance` promises (reserves) each context's bytes, and other contexts' plans count these bytes as taken.
A promise ends when the context is closed or freed, or when the call that made the promise fails.
"""

import os
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from lce import system
from lce.cache.kv import KVCache
from lce.cache.layout import DEVICE, DISK, HOST, CacheLayout
from lce.cache.limits import Limits
from lce.errors import CapacityError
from lce.methods.choices import Choice
from lce.models.config import RopeConfig
from lce.sizes import enough_text, size_text

UNBOUNDED_TOKENS = 1 << 40  # if a context of this many tokens fits, the longest length counts as unbounded


@dataclass(frozen=True)
class Need:
    """The bytes that a tier must hold for a context. The `budget`, if any, bounds `keys_and_values`.

    `besides` counts the method's state and the checksums of rows, `activations` what a block's layer computes with.
    `available` is None if the machine does not say.
    """

    keys_and_values: int
    besides: int = 0
    weights: int = 0
    budget: int | None = None
    available: int | None = None
    activations: int = 0

    @property
    def needed(self) -> int:
        """All bytes that the tier must hold."""
        return self.keys_and_values + self.besides + self.weights + self.activations

    @property
    def in_budget(self) -> bool:
        """Whether the keys and values are within the budget, if any."""
        return self.budget is None or self.keys_and_values <= self.budget

    @property
    def fits(self) -> bool:
        """Whether the keys and values are within the budget, and all bytes are available."""
        return self.in_budget and (self.available is None or self.needed <= self.available)


@dataclass(frozen=True)
class Plan:
    """The memory that a context of `tokens` tokens needs.

    `kv_dtype` is how keys and values are stored: "int8" (host and disk), "int8-device" (all), or `dtype`. `device`
    joins several devices as "cuda:0,cuda:1". `tiers` has the needs by tier: "device" (several devices by their own
    names), "host" and "disk". `longest` is the length of the longest context that fits; None: unbounded. `refusal` says
    why the context does not fit, and a remedy; None if it fits. `layers` has the first and the last layer on each of
    several devices. `readable` is how many tokens the method can read of this model, whatever the memory; None: any
    number. `warning` says if `tokens` exceeds `readable`. `auto` is what the method "auto" would be for `tokens`.
    `rope` is the RoPE scaling, with the factor that `tokens` need where none was named.
    """

    tokens: int
    method: str
    dtype: str
    kv_dtype: str
    device: str
    tiers: Mapping[str, Need]
    longest: int | None
    refusal: str | None
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    readable: int | None = None
    warning: str | None = None
    auto: Choice | None = None
    rope: RopeConfig = field(default_factory=RopeConfig)

    @property
    def fits(self) -> bool:
        """Whether the context fits."""
        return self.refusal is None


@dataclass(frozen=True)
class Planner:
    """A calculator of the memory for contexts of one cache layout. `free_bytes` has the bytes available in each tier.

    The keys and values of the first `n_filed` tokens are in a context file; pools of `pool_bytes` hold the pages read
    from the file. `weights` has the bytes of weights that are not loaded yet. `weights` and `pool_bytes` are by device.
    """

    layout: CacheLayout
    free_bytes: Mapping[str, int | None]
    weights: Mapping[str, int] = field(default_factory=dict)
    n_filed: int = 0
    pool_bytes: Mapping[str, int] = field(default_factory=dict)
    token_bytes: int = 0  # the activations of a token in a block

    def bytes_needed(self, n_tokens: int) -> dict[str, int]:
        """Return the bytes that `n_tokens` tokens need, by the names of memories and disks that `kinds_of` gives."""
        kinds = kinds_of(self.layout)
        return {kinds[tier]: need.needed for tier, need in self.needs(n_tokens).items()}

    def bytes_used(self, cache: KVCache) -> dict[str, int]:
        """Return the bytes that a cache has taken from the free bytes, by the names that `kinds_of` gives.

        On a CPU, memory counts as free until it is written, so the cached tokens count. On a GPU, allocations count.
        """
        kinds, used = kinds_of(self.layout), self.bytes_needed(cache.length)
        if not self.layout.on_cpu:
            for tier, n_bytes in cache.bytes_by_tier.items():
                if tier in kinds:
                    used[kinds[tier]] = max(used.get(kinds[tier], 0), n_bytes)
        return used | ({kinds[DISK]: cache.bytes_reserved} if DISK in kinds else {})

    def needs(self, n_tokens: int) -> dict[str, Need]:
        """Return what `n_tokens` tokens need in each tier, by the tier's name, devices first."""
        found: dict[str, Need] = {}
        n_new = max(0, n_tokens - self.n_filed)
        for part in self.layout.by_device:
            besides = Counter({DEVICE: Limits(part).state_bytes(n_tokens)})
            besides[DEVICE if part.on_cpu else HOST] += Limits(part).check_bytes(n_new, self.n_filed)
            budgets = {DEVICE: Limits(part).budget, HOST: self.layout.budgets.host}
            for tier, n_bytes in Limits(part).needs(n_new).items():
                name = part.device_tier if tier == DEVICE else tier
                before = found.get(name, Need(0))  # the sum so far: several devices share the tiers host and disk
                found[name] = Need(
                    before.keys_and_values + n_bytes + self.pool_bytes.get(name, 0),
                    before.besides + besides[tier],
                    self.weights.get(name, 0),
                    budgets.get(tier),
                    self.free_bytes[name],
                    self.token_bytes * min(n_tokens, part.block) if tier == DEVICE else 0,
                )
        return dict(sorted(found.items(), key=lambda each: each[0] in (HOST, DISK)))

    def longest(self) -> int | None:
        """Return the length of the longest context that fits; None: unbounded."""
        lengths = range(1, UNBOUNDED_TOKENS + 1)
        found = bisect_left(lengths, True, key=lambda n: not all(need.fits for need in self.needs(n).values()))
        return None if found == len(lengths) else found

    def check(self, n_tokens: int) -> None:
        """Raise `CapacityError` if a context of `n_tokens` tokens does not fit."""
        if (refusal := self.refusal(n_tokens)) is not None:
            raise CapacityError(refusal)

    def refusal(self, n_tokens: int) -> str | None:
        """Return why `n_tokens` tokens do not fit, the longest length that fits, and a remedy; None if they fit."""
        lacking = {tier: need for tier, need in self.needs(n_tokens).items() if not need.fits}
        return self._reason(n_tokens, lacking) if lacking else None

    def _reason(self, n_tokens: int, lacking: Mapping[str, Need]) -> str:
        devices = [tier for tier in lacking if tier not in (HOST, DISK)]
        tier = max(devices, key=lambda each: lacking[each].keys_and_values) if devices else next(iter(lacking))
        need = lacking[tier]
        part = next((part for part in self.layout.by_device if part.device_tier == tier), None)
        longest, text = self.longest(), f"{n_tokens:,} token{'s' if n_tokens > 1 else ''}"
        most = f"the longest that fits is {longest:,} tokens; ask for fewer, or" if longest else "no text fits;"
        device, spill_dir = "memory" if self.layout.on_cpu else "device memory", self.layout.budgets.spill_dir
        where = {DEVICE: device, HOST: "host memory", DISK: f"disk for {spill_dir}"}.get(tier, f"memory on {tier}")
        if need.in_budget:
            return (
                f"{text} need {size_text(need.needed)} of {where}, and {size_text(need.available or 0)} is available; "
                f"{most} {self._remedy(tier)}"
            )
        if part is not None and need.keys_and_values == Limits(part).least_budget:
            # The option sets the budget of the device with the most layers: see `CacheLayout.by_device`.
            most_layers = max(each.n_layers for each in self.layout.by_device)
            whole = -(-need.keys_and_values * most_layers // part.n_layers)
            least = f"{Limits(self.layout).budget_option} {enough_text(whole)}"
            return (
                f"{text} cannot be read in blocks of {self.layout.block} with {size_text(need.budget or 0)} for keys "
                f"and values; give {least} or more, or a smaller --block; {most.partition(';')[0]}"
            )
        return (
            f"{text} need {size_text(need.keys_and_values)} of {where} for keys and values, and the budget is "
            f"{size_text(need.budget or 0)}; {most} give --spill-dir or a larger budget"
        )

    def _remedy(self, tier: str) -> str:
        budgets = self.layout.budgets
        if tier == DISK:
            return "free some space, or name another --spill-dir"
        if tier not in (HOST, DISK) and not self.layout.on_cpu:
            return f"give a {'' if budgets.device is None else 'smaller '}--kv-device-budget"
        bounded = budgets.host is not None or (self.layout.on_cpu and budgets.device is not None)
        spill = "" if budgets.spill_dir else " and a --spill-dir"
        return f"give a {'smaller ' if bounded else ''}--kv-host-budget{spill}"


def kinds_of(layout: CacheLayout) -> dict[str, str]:
    """Return the name of the memory or disk that holds each tier. A memory or disk has one name in all layouts."""
    places = _places(layout).items()
    return {tier: system.disk_name(x) if isinstance(x, Path) else system.memory_name(x) for tier, x in places}


def available(layout: CacheLayout, taken: Mapping[str, int]) -> dict[str, int | None]:
    """Return each tier's free bytes minus the `taken` bytes of the tier's memory or disk; None if unknown."""
    kinds, found = kinds_of(layout), dict[str, int | None]()
    for tier, place in _places(layout).items():
        free = system.free_disk(place) if isinstance(place, Path) else system.free_memory(place)
        found[tier] = None if free is None else max(0, free - taken.get(kinds[tier], 0))
    return found


def _places(layout: CacheLayout) -> dict[str, torch.device | Path]:
    """Return the place of each tier: a device, or a folder on a disk."""
    places: dict[str, torch.device | Path] = {part.device_tier: part.device for part in layout.by_device}
    return places | {tier.name: tier.location(layout) for tier in Limits(layout).lower}


class Allowance:
    """The memory that a process has promised to (reserved for) its contexts. Any thread may use this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promises: WeakKeyDictionary[KVCache, tuple[Planner, int]] = WeakKeyDictionary()  # (planner, tokens)
        # A process may be forked while the lock is held.
        os.register_at_fork(after_in_child=lambda: setattr(self, "_lock", threading.Lock()))

    def planner(
        self, layout: CacheLayout, weights: Mapping[str, int] = {}, into_file: bool = False, own: KVCache | None = None
    ) -> Planner:
        """Return a planner for a new context and for `weights`, bytes by device, that are not loaded yet.

        A context that is prefilled `into_file` reserves disk space itself. Bytes promised to cache `own` count as free.
        """
        if into_file:
            layout = replace(layout, budgets=replace(layout.budgets, spill_dir=Path()))
        free = available(layout, self._unused(own))
        return Planner(layout, free | ({DISK: None} if into_file else {}), weights)

    def promise(self, cache: KVCache, n_tokens: int) -> None:
        """Reserve the memory of `n_tokens` tokens for a cache. Raises `CapacityError` if the tokens do not fit."""
        if n_tokens <= self.promised(cache):
            return
        with self._lock:
            planner = self._growing(cache)
            planner.check(n_tokens)
            self._promises[cache] = planner, n_tokens

    def check_alone(self, layout: CacheLayout, n_tokens: int) -> None:
        """Raise `CapacityError` if `n_tokens` tokens would not fit even if all other contexts were freed."""
        planner = Planner(layout, available(layout, {}))
        if planner.refusal(n_tokens) is None:
            return
        kinds, held = kinds_of(layout), Counter[str]()
        with self._lock:
            for other, n_promised in list(self._promises.values()):
                held.update(other.bytes_needed(n_promised))
        free = {tier: None if n is None else n + held[kinds[tier]] for tier, n in planner.free_bytes.items()}
        replace(planner, free_bytes=free).check(n_tokens)

    def _growing(self, cache: KVCache) -> Planner:
        """Return a planner for an existing context. Memory that the context uses or was promised counts as available.

        If the context was opened from a file, old tokens stay in the file. New tokens and pools of pages need memory.
        """
        held = self._promises.get(cache)
        promised = {} if held is None else held[0].bytes_needed(held[1])
        planner = self.planner(cache.layout, into_file=cache.file is not None, own=cache)
        pools = {
            part.device_tier: stack.top.n_bytes if Limits(part).budget is None else Limits(part).least_pool_bytes
            for part, stack in zip(cache.layout.by_device, cache.stacks, strict=False)
            if not stack.growing
        }
        planner = replace(planner, n_filed=cache.in_file, pool_bytes=pools)
        kinds, used = kinds_of(planner.layout), planner.bytes_used(cache)
        free = {
            tier: None if n is None else max(n + used.get(kinds[tier], 0), promised.get(kinds[tier], 0))
            for tier, n in planner.free_bytes.items()
        }
        return replace(planner, free_bytes=free)

    def promised(self, cache: KVCache) -> int:
        """Return the number of tokens that were promised to a cache; 0 without a promise."""
        return self._promises[cache][1] if cache in self._promises else 0

    def give_back(self, cache: KVCache, n_tokens: int) -> None:
        """Reduce the memory promised to a cache to that of `n_tokens` tokens."""
        with self._lock:
            if n_tokens < self.promised(cache):
                self._promises[cache] = self._promises[cache][0], n_tokens

    def _unused(self, own: KVCache | None) -> Counter[str]:
        """Return the bytes that are promised to caches other than `own` and not used yet, by memory or disk."""
        total: Counter[str] = Counter()
        for cache, (planner, n_tokens) in list(self._promises.items()):
            layout = planner.layout
            if layout.on_cpu and layout.budgets.spill_dir is None and n_tokens <= cache.length:
                continue  # all is used, as of most kept contexts: memory of a CPU is used when it is written
            if cache is not own:
                promised, used = planner.bytes_needed(n_tokens), planner.bytes_used(cache)
                total.update({kind: max(0, n_bytes - used.get(kind, 0)) for kind, n_bytes in promised.items()})
        return total


ALLOWANCE = Allowance()
