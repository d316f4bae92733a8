"""Context files of a model that ranks share: the same files as of one rank, so that any number of ranks opens them.

The first rank writes, and asks all ranks for the heads of one stretch of tokens after the other. To open a file, each
rank reads it, and copies its own heads into its cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lce.cache.context_file import restored_states
from lce.cache.kv import UNROUNDED, KVCache
from lce.cache.layer import KVBuffer, LayerCache
from lce.cache.layout import Budgets, CacheLayout, segment_of
from lce.engine.identity import Identity
from lce.engine.saving import ContextData, ContextFiles, Target
from lce.errors import LceError, RankError
from lce.models.ranks import Division, Ranks


@dataclass(frozen=True, eq=False)
class DividedFiles(ContextFiles):
    """The context files of an engine whose heads are divided among ranks. All ranks make each call."""

    own: CacheLayout  # of this rank's heads; `layout` is that of all
    division: Division

    @classmethod
    def of(cls, own: CacheLayout, identity: Identity, division: Division) -> "DividedFiles":
        """Return the files of an engine whose rank has this layout."""
        config, cpu = division.config, torch.device("cpu")
        whole = replace(own, n_heads=config.n_heads, n_kv_heads=config.n_kv_heads, device=cpu, budgets=Budgets())
        return cls(whole, identity, own, division)

    def save(self, target: Target, data: ContextData) -> None:
        """Write a context file on the first rank. If this fails, raise an error on all ranks."""
        heads = _Heads(self.division.ranks, data.cache)
        if heads.ranks.rank:
            heads.answer()
            return
        try:
            super().save(target, replace(data, cache=_Gathered.of(self.layout, heads)))
        except BaseException as error:
            heads.end(error)
            raise
        heads.end()

    def open(self, path: Path) -> ContextData:
        return self.division.ranks.together(lambda: self._opened(path), lambda data: {"file": sorted(data.saves)})

    @torch.inference_mode()
    def _opened(self, path: Path) -> ContextData:
        data = super().open(path)
        cache, heads, whole = KVCache.empty(self.own, data.cache.length), slice(*self.division.kv_heads), data.cache
        for start in range(0, whole.length, segment_of(self.own)):
            stop = min(start + segment_of(self.own), whole.length)
            cache.begin()
            cache.reserve(stop)
            for layer, own in zip(whole.layers, cache.layers, strict=True):
                k, v = (x[heads].to(self.own.device) for x in layer.span(start, stop))
                own.write(k, v)
            cache.commit()
        total, (first, stop), kept = self.division.config.n_kv_heads, self.division.kv_heads, dict[str, Tensor]()
        for name, x in whole.tensors().items():  # the first dimension of a method's state counts query or KV heads
            if not name.startswith(UNROUNDED):
                kept[name] = x[first * len(x) // total : stop * len(x) // total].clone()
        for layer in cache.layers:
            layer.state = restored_states(layer.layout, layer.index, kept)
        cache = replace(whole, layout=cache.layout, layers=cache.layers, stacks=cache.stacks, file=None)
        logits = None if data.logits is None else data.logits.to(self.own.device)
        return replace(data, cache=cache, logits=logits)

    def check_space(self, path: Path, n_tokens: int) -> None:
        check, ranks = super().check_space, self.division.ranks
        ranks.together(lambda: None if ranks.rank else check(path, n_tokens))


class _Request(NamedTuple):
    """What the first rank asks for: rows of a layer from one token to another, else the method's state; or the end."""

    rows: tuple[int, int, int] | None = None
    error: tuple[str, int] | tuple[()] | None = None  # the end: () without an error, or its text and exit code


@dataclass(frozen=True)
class _Heads:
    """The heads of a cache on all ranks. The first rank asks; the others answer until `end` is called."""

    ranks: Ranks
    cache: KVCache

    def rows(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, `[G, n, D]` each, as devices store them."""
        self.ranks.exchange(_Request((layer, start, stop)))
        k, v = torch.cat(self.ranks.exchange(self._rows(layer, start, stop)), dim=1)
        return k, v

    def states(self) -> dict[str, Tensor]:
        """Return what `KVCache.tensors` returns."""
        self.ranks.exchange(_Request())
        found = self.ranks.exchange(self._states())
        heads_at = {name: 1 if name.startswith(UNROUNDED) else 0 for name in found[0]}  # the dimension of heads
        return {name: torch.cat([each[name] for each in found], dim) for name, dim in heads_at.items()}

    def end(self, error: BaseException | None = None) -> None:
        """End the other ranks' `answer`. With an error, they raise `RankError`."""
        code = getattr(error, "exit_code", LceError.exit_code)
        self.ranks.exchange(_Request(error=() if error is None else (f"rank 0: {error}", code)))

    def answer(self) -> None:
        """Answer the first rank until it ends. Raises the first rank's error."""
        while (request := self.ranks.exchange(_Request())[0]).error is None:
            self.ranks.exchange(self._rows(*request.rows) if request.rows else self._states())
        if request.error:
            raise RankError(*request.error)

    def _rows(self, layer: int, start: int, stop: int) -> Tensor:
        return torch.stack(self.cache.layers[layer].stored(start, stop)).cpu()

    def _states(self) -> Mapping[str, Tensor]:
        return {name: x.cpu().clone() for name, x in self.cache.tensors().items()}


@dataclass(eq=False, kw_only=True)
class _GatheredLayer(LayerCache):
    """A layer whose keys and values all ranks have."""

    heads: _Heads

    def stored(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.heads.rows(self.index, start, stop)


@dataclass(eq=False, kw_only=True)
class _Gathered(KVCache):
    """A cache, to be saved, whose keys and values all ranks have."""

    heads: _Heads

    @classmethod
    def of(cls, layout: CacheLayout, heads: _Heads) -> "_Gathered":
        buffer, n = KVBuffer(layout, 0), heads.cache.length
        layers: list[LayerCache] = [
            _GatheredLayer(layer, layout, buffer, None, {}, n, heads=heads) for layer in layout.layers
        ]
        same = vars(heads.cache) | {"layout": layout, "layers": layers, "stacks": [], "file": None}
        return cls(**same, heads=heads)

    def tensors(self) -> dict[str, Tensor]:
        return self.heads.states()
