"""Low-dimensional keys: the linear maps that compute them, and scores of tokens by low-dim keys.

A sum of dot products over all heads of a layer becomes one dot product of R numbers:
`Σ_h q_h · k_h ≈ (q A + a)·(k B + b)`, where the vector `q` concatenates a token's query heads, and `k` concatenates a
token's KV heads. The low-dim keys `k B + b` are computed when the keys are written to the cache.
"""

import functools
import hashlib
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from lce.attention import SCORES_AT_ONCE, affine, best_below_top, principal_directions
from lce.attention import best_tokens as best_tokens
from lce.attention import spread as spread
from lce.cache.layer import LayerCache
from lce.cache.method_state import Staged
from lce.errors import DataError, UsageError, shown
from lce.files import named
from lce.models.config import RopeConfig

BASIS = "principal components"  # the name of the state that holds a layer's, computed from a text
LOW_DIM_KEYS = "low-dim keys"  # the name of the state of tokens' keys


@dataclass(frozen=True)
class LowDimMap:
    """The linear maps of one layer to R dimensions: matrices `query [H·D, R]` and `key [G·D, R]`, and biases `[R]`.

    `query_bias` adds `query_bias · (k @ key)` to the score of a key k. `key_bias` adds the same number to all scores of
    a query, so the order of the scores stays. With `key_bias` the low-dim keys can have the mean 0: small numbers lose
    less in rounding.
    """

    query: Tensor
    key: Tensor
    query_bias: Tensor
    key_bias: Tensor

    @classmethod
    def unbiased(cls, query: Tensor, key: Tensor) -> Self:
        """Return maps of these matrices, with biases of zero."""
        return cls(query, key, query.new_zeros(query.shape[1]), key.new_zeros(key.shape[1]))

    def low_queries(self, q: Tensor) -> Tensor:
        """Map queries `[N, H·D]` to low-dim queries `[N, R]`."""
        return affine(q, self.query, self.query_bias)

    def low_keys(self, k: Tensor) -> Tensor:
        """Map keys `[N, G·D]` to low-dim keys `[N, R]`."""
        return affine(k, self.key, self.key_bias)  # rounds once: the bias cancels most of the product

    def tensors(self) -> dict[str, Tensor]:
        """Return the two matrices and the two biases by name."""
        return dict(vars(self))

    @staticmethod
    def shapes(n_heads: int, n_kv_heads: int, head_dim: int, low_dim: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the two matrices and the two biases by name."""
        query, key = (n_heads * head_dim, low_dim), (n_kv_heads * head_dim, low_dim)
        return {"query": query, "key": key, "query_bias": (low_dim,), "key_bias": (low_dim,)}


@dataclass(frozen=True)
class LearnedFor:
    """The setting that maps were learned for: a model's fingerprint, `low_dim`, `far`, the window and RoPE."""

    fingerprint: str
    low_dim: int
    far: int
    window: int
    rope: RopeConfig

    def command(self, model: object = "M") -> str:
        """Return the `lce calibrate` command that learns maps for this setting."""
        kind, factor = self.rope.kind, self.rope.factor
        scaling = f"--rope {kind}" + ("" if kind == "none" else f" --rope-factor {factor}")
        return (
            f"lce calibrate --model {shlex.quote(named(str(model)))} --text FILE --out maps.safetensors "
            f"--low-dim {self.low_dim} --far {self.far} --window {self.window} {scaling}"
        )

    def check(self, found: "LearnedFor", source: str, model: object = "M") -> None:
        """Raise `DataError` if maps learned for `found` are another model's, `UsageError` if other options differ."""
        if found.fingerprint != self.fingerprint:
            raise DataError(
                f"{named(source)} was calibrated on another model's weights; learn its own by `{self.command(model)}`"
            )
        here, there = self._options(), found._options()
        if differ := [name for name in here if there[name] != here[name]]:
            wrong, asked = (", ".join(f"{name}={facts[name]}" for name in differ) for facts in (there, here))
            raise UsageError(
                f"{named(source)} was learned for {wrong}, and here {asked}; "
                f"ask for what it was learned for, learn others by `{self.command(model)}`, or give -o compress=pca"
            )

    def _options(self) -> dict[str, str]:
        """Return all fields but the fingerprint as text, by name; RoPE's fields have names such as `rope.kind`."""
        facts = {"low_dim": self.low_dim, "far": self.far, "window": self.window}
        facts |= {f"rope.{name}": value for name, value in vars(self.rope).items()}
        return {name: shown(value).strip("'") for name, value in facts.items()}


class LowDimMaps:
    """The linear maps of a model to low-dim queries and keys: a `LowDimMap` of each layer, all with the same R.

    `layers` is a sequence, or a mapping from the index of each layer in which methods act.
    `source` is the path of the file that the maps were read from. `learned_for` is the setting that the file states.
    Maps that were computed in memory have None, and are used with any setting.
    """

    def __init__(
        self,
        layers: Sequence[LowDimMap] | Mapping[int, LowDimMap],
        source: str = "memory",
        learned_for: LearnedFor | None = None,
    ) -> None:
        self.layers = dict(layers) if isinstance(layers, Mapping) else dict(enumerate(layers))
        self.source, self.learned_for = source, learned_for
        if not self.layers:
            raise UsageError("low-dim maps of no layer; expected a LowDimMap for each layer of the model")
        self._cast: dict[tuple[int, torch.dtype, torch.device], LowDimMap] = {}

    def __repr__(self) -> str:
        return f"LowDimMaps({Path(self.source).name!r}, {self.digest})"

    @functools.cached_property
    def digest(self) -> str:
        """Eight hexadecimal digits of a hash over all numbers in the maps."""
        numbers = [x for maps in self.layers.values() for x in maps.tensors().values()]
        return hashlib.sha256(b"".join(x.float().numpy(force=True).tobytes() for x in numbers)).hexdigest()[:8]

    @property
    def low_dim(self) -> int:
        """The number R of dimensions of low-dim keys."""
        return next(iter(self.layers.values())).key.shape[1]

    def layer(self, index: int, like: Tensor) -> LowDimMap:
        """Return a layer's maps in the dtype and on the device of `like`."""
        kind = (index, like.dtype, like.device)
        if kind not in self._cast:
            tensors = {name: x.to(like) for name, x in self.layers[index].tensors().items()}
            for name in ("query", "key"):  # with rows side by side, as products read them
                tensors[name] = tensors[name].T.contiguous().T
            self._cast[kind] = LowDimMap(**tensors)
        return self._cast[kind]

    def check_shapes(self, layers: Collection[int], n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        """Raise `UsageError` unless the maps fit these layers of a model of these sizes."""
        wanted = LowDimMap.shapes(n_heads, n_kv_heads, head_dim, self.low_dim)
        shapes = [{name: tuple(x.shape) for name, x in maps.tensors().items()} for maps in self.layers.values()]
        if any(each != wanted for each in shapes) or not {*layers} <= self.layers.keys():
            sizes = ", ".join(f"{name} {list(shape)}" for name, shape in wanted.items())
            raise UsageError(f"{self!r} does not fit this model: expected maps of {len(layers)} layers, each {sizes}")


def layer_maps(maps: object, cache: LayerCache, like: Tensor) -> LowDimMap | None:
    """Return a layer's maps: the learned `maps`, or else its principal components; None: these are not computed yet.

    The query map of principal components is applied to the sum of the queries that share a KV head.
    """
    if isinstance(maps, LowDimMaps):
        return maps.layer(cache.index, like)
    basis = cache.kept(Staged, BASIS).latest
    return None if basis is None else LowDimMap.unbiased(basis, basis)


def missing(method: str, command: str, otherwise: str) -> UsageError:
    """Return the error for a method without maps; `command` learns maps, and `otherwise` are options without maps."""
    return UsageError(
        f"{method}: this model has no calibrated maps; make them by `{command}` and give -o maps=maps.safetensors, "
        f"or give {otherwise}"
    )


def principal(k: Tensor, low_dim: int) -> Tensor:
    """Return the first R principal components `[G·D, R]` of keys `k [G, N, D]`, R = `min(low_dim, G·D, N - 1)`.

    The same matrix maps keys, and queries that are summed over the query heads of each KV head, to R dimensions.
    Time: O(N · (G·D)² + (G·D)³).
    """
    flat = concat_heads(k).double()
    flat = flat - flat.mean(dim=0)
    directions = principal_directions(flat.T @ flat, min(low_dim, max(1, len(flat) - 1)))
    return directions.flip(1).to(k.dtype).contiguous()


def concat_heads(x: Tensor) -> Tensor:
    """Concatenate the heads of each token: `[heads, N, D]` to `[N, heads·D]`."""
    return x.transpose(0, 1).flatten(1)


def slice_rows(n_queries: int, row_size: int) -> int:
    """Return the number of queries that `block_scores` scores at a time."""
    return max(1, min(n_queries, SCORES_AT_ONCE // row_size))


def block_scores(f: Callable[[slice], Tensor], n_queries: int, row_size: int) -> Tensor:
    """Return scores `[n]` of tokens m for a block of queries c: `max_c (f(m; c) - max_m' f(m'; c))`.

    `f` returns the scores `[t, n]` for a slice of t queries, and needs memory for `row_size` numbers per query. Queries
    are scored in slices to bound this memory. Time: O(n_queries · n), and the time of `f`.
    """
    at_once = slice_rows(n_queries, row_size)
    slices = (slice(start, start + at_once) for start in range(0, n_queries, at_once))
    return functools.reduce(torch.maximum, (best_below_top(f(some)) for some in slices))
