"""Low-dimensional keys: the maps that make them, and the file in which learned maps are kept.

A sum of dot products over all heads of a layer becomes one short product: `Σ_h q_h · k_h ≈ (q A)·(k B)`, with `q` all
query heads of a token side by side and `k` all its KV heads. The low-dim keys `k B` are kept as the keys are written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import max_pool1d

from lce.errors import DataError, UsageError
from lce.files import write_whole
from lce.methods.parts import SCORES_AT_ONCE

FORMAT = "lce low-dim maps 1"


@dataclass(frozen=True)
class LowDimMap:
    """One layer's maps: `query [H·D, R]` and `key [G·D, R]`."""

    query: Tensor
    key: Tensor


class LowDimMaps:
    """A model's maps, one pair a layer, all of one `low_dim`."""

    def __init__(self, layers: Sequence[LowDimMap], source: str = "memory") -> None:
        self.layers = tuple(layers)
        self.source = source
        self._cast: dict[tuple[int, torch.dtype, torch.device], LowDimMap] = {}

    def __repr__(self) -> str:
        return f"LowDimMaps({Path(self.source).name!r}, {self.digest})"

    @cached_property
    def digest(self) -> str:
        """Eight letters that tell these maps from others of the same name."""
        numbers = (x.float().numpy().tobytes() for maps in self.layers for x in (maps.query, maps.key))
        return hashlib.sha256(b"".join(numbers)).hexdigest()[:8]

    @property
    def low_dim(self) -> int:
        """R."""
        return self.layers[0].key.shape[1]

    def layer(self, index: int, like: Tensor) -> LowDimMap:
        """One layer's maps in the dtype and on the device of `like`."""
        kind = (index, like.dtype, like.device)
        if kind not in self._cast:
            maps = self.layers[index]
            self._cast[kind] = LowDimMap(maps.query.to(like), maps.key.to(like))
        return self._cast[kind]

    def save(self, path: Path, fingerprint: str) -> None:
        """Write the maps, tied to the model of this fingerprint; the file appears whole or not at all."""
        tensors = {}
        for index, maps in enumerate(self.layers):
            tensors[f"layers.{index}.query"] = maps.query.contiguous()
            tensors[f"layers.{index}.key"] = maps.key.contiguous()
        metadata = {"format": FORMAT, "fingerprint": fingerprint, "layers": json.dumps(len(self.layers))}
        write_whole(path, save(tensors, metadata))

    @classmethod
    def open(cls, path: Path, fingerprint: str) -> Self:
        """The maps of a file. Raises `DataError` for another model's, and for a file that cannot be trusted."""
        remedy = "make it anew with `lce calibrate`"
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise DataError(f"{path} holds no low-dim maps (format {metadata.get('format')!r}); {remedy}")
                if metadata.get("fingerprint") != fingerprint:
                    raise DataError(f"{path} was calibrated on another model's weights; {remedy}")
                names = [(f"layers.{i}.query", f"layers.{i}.key") for i in range(len(file.keys()) // 2)]
                if not names or set(file.keys()) != set(chain(*names)):
                    raise DataError(f"{path} lacks maps of some layers; {remedy}")
                layers = [LowDimMap(file.get_tensor(query), file.get_tensor(key)) for query, key in names]
        except (OSError, SafetensorError) as error:
            raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; {remedy}") from error
        shapes = {(*maps.query.shape, *maps.key.shape) for maps in layers}
        if len(shapes) != 1 or any(maps.query.ndim != 2 or maps.query.shape[1] != maps.key.shape[1] for maps in layers):
            raise DataError(f"{path} has maps of unequal shapes; {remedy}")
        return cls(layers, str(path))


def usable(maps: object, low_dim: int, method: str) -> LowDimMaps:
    """`maps`, if they are what a method with this `low_dim` can use. Raises `UsageError` that says how to get them."""
    if not isinstance(maps, LowDimMaps):
        raise UsageError(
            f"{method}: this model has no calibrated maps; make them by `lce calibrate --model M --text FILE "
            "--out maps.safetensors` and give -o maps=maps.safetensors, or give -o compress=pca or -o compress=none"
        )
    if maps.low_dim != low_dim:
        raise UsageError(
            f"{method}: low_dim is {low_dim}, but the maps were learned with {maps.low_dim}; "
            f"give -o low_dim={maps.low_dim}, or calibrate anew"
        )
    return maps


def principal(k: Tensor, low_dim: int) -> Tensor:
    """The directions `[G·D, R]` in which keys `k [G, N, D]` vary most, R = `min(low_dim, G·D, N - 1)`.

    Used for the keys and, summed over the query heads that share a KV head, for the queries. The keys' mean need not
    be taken away: it shifts all scores of a query alike. Time: O(N · (G·D)² + (G·D)³).
    """
    flat = concat_heads(k).double()
    flat = flat - flat.mean(dim=0)
    _, directions = torch.linalg.eigh(flat.T @ flat)  # of ascending variance
    best: Tensor = directions[:, -min(low_dim, max(1, len(flat) - 1)) :].flip(1)
    return best.to(k.dtype).contiguous()


def concat_heads(x: Tensor) -> Tensor:
    """`[heads, N, D]` to `[N, heads·D]`: all heads of a token in a row."""
    return x.transpose(0, 1).flatten(1)


def block_scores(f: Callable[[slice], Tensor], n_queries: int, row_size: int) -> Tensor:
    """What tokens are worth to a block of queries, `[M]`: `max_c (f(m; c) - max_m' f(m'; c))`.

    `f` gives the scores `[t, M]` of a slice of the queries, `row_size` numbers of work a query; so many queries are
    looked at together that memory stays bounded. Time: O(n_queries · M), and that of `f`.
    """
    at_once = max(1, SCORES_AT_ONCE // row_size)
    best: Tensor | None = None
    for start in range(0, n_queries, at_once):
        scores = f(slice(start, start + at_once)).float()
        here = (scores - scores.amax(dim=-1, keepdim=True)).amax(dim=0)
        best = here if best is None else torch.maximum(best, here)
    assert best is not None, "a block has queries"
    return best


def spread(scores: Tensor, eps: int) -> Tensor:
    """Each score `[M]` replaced by the largest of those at most `eps` away."""
    return max_pool1d(scores[None], 2 * eps + 1, stride=1, padding=eps)[0] if eps else scores


def first_best(scores: Tensor, n: int) -> Tensor:
    """The indices `[n]` of the largest scores `[M]`, ascending; of equal ones the first. Time: O(M)."""
    least = scores.topk(n).values[-1]
    above, equal = scores > least, scores == least
    taken = above | (equal & (equal.cumsum(0) <= n - above.sum()))
    return torch.nonzero_static(taken, size=n).squeeze(1)
