"""Ranks: processes that share a model's matrices and compute each token together (Megatron-LM, Shoeybi et al., 2019).

A rank has whole KV heads with their query heads, some hidden units of each MLP, and some rows of the embedding and of
the head. The products of `o` and `down` are then sums over ranks: `SummedMatrix` in `lce.models.products` adds them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from lce.errors import LceError, RankError, UsageError, shown
from lce.models.config import ModelConfig
from lce.weights.packed import ROW_BLOCK

LIMIT_S = 600  # the seconds that a rank waits for the others
Span = tuple[int, int]  # the first row or column of a run, and the one after the last
T = TypeVar("T")
Facts = dict[str, Any]  # what ranks must have in common, by names for messages


@dataclass(frozen=True)
class Ranks:
    """The processes that share a model: `count` of them, of which this one is number `rank`.

    All ranks make the same calls of `sum` and `exchange`, in the same order: a call waits for the other ranks. Both
    raise `RankError` if another rank has ended, or does not answer within the time limit of the `group`.
    """

    rank: int = 0
    count: int = 1
    group: Any = None  # of torch.distributed; None: its default group, or this process alone

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors. May overwrite `x`."""
        if self.count > 1:
            x = x.contiguous()
            self._wait(lambda: torch.distributed.all_reduce(x, group=self.group))
        return x

    def exchange(self, value: T) -> list[T]:
        """Return the values of all ranks, which pickle can copy, in the order of ranks."""
        found: list[Any] = [value] * self.count
        if self.count > 1:
            self._wait(lambda: torch.distributed.all_gather_object(found, value, group=self.group))
        return found

    def together(self, work: Callable[[], T], facts_of: Callable[[T], Facts] = lambda found: {}) -> T:
        """Return `work()`, which must not wait for other ranks. If it fails on one rank, all ranks raise an error.

        All ranks also raise `UsageError` if `facts_of(work())` differs between ranks. This is one small exchange.
        """
        if self.count == 1:
            return work()
        error: Exception | None = None
        facts: Facts = {}
        try:
            found = work()
            facts = facts_of(found)
        except Exception as own:
            error = own
        failed = None if error is None else (str(error), getattr(error, "exit_code", LceError.exit_code))
        try:
            ends = self.exchange((failed, facts))
            if error is not None:
                error.told = True  # type: ignore[attr-defined]  # rank 0 knows it, and commands print it there alone
                raise error
        finally:
            del error  # its traceback refers to this frame: `del` breaks the cycle
        for rank, (failure, _) in enumerate(ends):
            if failure is not None:
                raise RankError(f"rank {rank}: {failure[0]}", failure[1])
        if differing := "; ".join(islice(_differences([each for _, each in ends]), 3)):
            raise UsageError(f"{differing}; expected the same on all ranks: give each rank the same")
        return found

    def span(self, total: int, unit: int = 1) -> Span:
        """Return this rank's run of `total` rows or columns, in multiples of `unit`: first ranks have one unit more."""
        each, more = divmod(-(-total // unit), self.count)
        first = self.rank * each + min(self.rank, more)
        return first * unit, min((first + each + (self.rank < more)) * unit, total)

    def _wait(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except (RuntimeError, ValueError) as error:  # ValueError: the group was destroyed
            raise RankError("another rank has ended or does not answer; what it said first tells why") from error


def _differences(facts: Sequence[Facts]) -> Iterator[str]:
    """Yield a text for each fact that is another on rank 0 than on other ranks: the values, and these ranks."""
    for name in {name: None for each in facts for name in each}:
        texts = [repr(each.get(name)) for each in facts]
        ranks = [rank for rank, text in enumerate(texts) if text != texts[0]]
        if ranks:
            own, other = (shown(facts[rank].get(name), 60) for rank in (0, ranks[0]))
            yield f"{name} is {own} on rank 0 and {other} on rank {', '.join(map(str, ranks))}"


ALONE = Ranks()


@dataclass(frozen=True)
class Division:
    """The division of a model among several ranks, and what this rank has. `config` is of the whole model.

    Hidden units are divided in multiples of `unit`, and rows of the vocabulary in blocks of `ROW_BLOCK`.
    """

    config: ModelConfig
    ranks: Ranks
    unit: int = ROW_BLOCK

    @property
    def kv_heads(self) -> Span:
        """This rank's KV heads. Example: 3 ranks have 2, 1 and 1 of 4."""
        return self.ranks.span(self.config.n_kv_heads)

    @cached_property
    def own(self) -> ModelConfig:
        """The config of a model that has only what this rank has."""
        (first, stop), inner = self.kv_heads, self.spans["inner"][0]
        group = self.config.n_heads // self.config.n_kv_heads
        n, n_inner = stop - first, inner[1] - inner[0]
        return replace(self.config, n_heads=n * group, n_kv_heads=n, intermediate_size=n_inner)

    @cached_property
    def spans(self) -> Mapping[str, Sequence[Span]]:
        """This rank's runs of rows or columns of each divided size, such as `inner`, of a family's weight tables."""
        config, dim, (first, stop) = self.config, self.config.head_dim, self.kv_heads
        group = config.n_heads // config.n_kv_heads * dim
        query, key = (first * group, stop * group), (first * dim, stop * dim)
        n_query, n_key, n_inner = config.n_heads * dim, config.n_kv_heads * dim, config.intermediate_size
        inner = self.ranks.span(n_inner, self.unit)
        return {
            "query": [query],
            "key": [key],
            "qkv": [query, _moved(key, n_query), _moved(key, n_query + n_key)],
            "inner": [inner],
            "gate_up": [inner, _moved(inner, n_inner)],
            "vocab": [self.ranks.span(config.vocab_size, ROW_BLOCK)],
        }

    def check(self) -> None:
        """Raise `UsageError` if there are more ranks than parts."""
        n_heads, n_units = self.config.n_kv_heads, self.config.intermediate_size
        for most, why in (
            (n_heads, f"the model has {n_heads} key/value heads, and each rank needs one of its own"),
            (-(-n_units // self.unit), f"the MLP has {n_units} units, which are divided in multiples of {self.unit}"),
        ):
            if self.ranks.count > most:
                raise UsageError(f"{self.ranks.count} ranks; expected {most} or fewer: {why}")


def _moved(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by
