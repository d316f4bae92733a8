"""Low-dimensional keys: the maps that make them, and the choice of tokens by them.

A sum of dot products over all heads of a layer becomes one short product: `Σ_h q_h · k_h ≈ (q A + a)·(k B + b)`, with
`q` all query heads of a token side by side and `k` all its KV heads. The low-dim keys `k B + b` are kept as the keys
are written.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from lce.errors import DataError, UsageError, shown
from lce.files import named
from lce.kernels.cpu.choices import best_tokens
from lce.kernels.cpu.scores import best_below_top, compiled_for, scores_of_few
from lce.kernels.cuda import launching
from lce.methods.parts import SCORES_AT_ONCE, products
from lce.models.config import RopeConfig

TOKENS_AT_ONCE = 4096  # of a product of queries and low-dim keys
FEW_OF_MANY = 8  # from so many dimensions for each wanted one a GPU finds principal directions by iteration


@dataclass(frozen=True)
class LowDimMap:
    """One layer's maps: `query [H·D, R]`, `key [G·D, R]`, and their biases `[R]`.

    The query's bias gives each key a score of its own, `query_bias · (k B)`. The key's bias adds the same to all scores
    of a query: where it takes the keys' mean away, low-dim keys are small and rounded less.
    """

    query: Tensor
    key: Tensor
    query_bias: Tensor
    key_bias: Tensor

    @classmethod
    def unbiased(cls, query: Tensor, key: Tensor) -> Self:
        """Maps whose biases are zero."""
        return cls(query, key, query.new_zeros(query.shape[1]), key.new_zeros(key.shape[1]))

    def low_queries(self, q: Tensor) -> Tensor:
        """Queries `[N, H·D]` in few dimensions, `[N, R]`."""
        return torch.addmm(self.query_bias, q, self.query)

    def low_keys(self, k: Tensor) -> Tensor:
        """Keys `[N, G·D]` in few dimensions, `[N, R]`."""
        return torch.addmm(self.key_bias, k, self.key)  # rounded once: the bias takes most of the product away

    def tensors(self) -> dict[str, Tensor]:
        """The four tensors by name."""
        return {"query": self.query, "key": self.key, "query_bias": self.query_bias, "key_bias": self.key_bias}

    @staticmethod
    def shapes(n_heads: int, n_kv_heads: int, head_dim: int, low_dim: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the four tensors by name."""
        query, key = (n_heads * head_dim, low_dim), (n_kv_heads * head_dim, low_dim)
        return {"query": query, "key": key, "query_bias": (low_dim,), "key_bias": (low_dim,)}


@dataclass(frozen=True)
class LearnedFor:
    """What maps are learned for: a model, and queries at the distance `far` under this RoPE, in texts of one window."""

    fingerprint: str
    low_dim: int
    far: int
    window: int
    rope: RopeConfig

    def command(self, model: object = "M") -> str:
        """The command that learns such maps."""
        kind, factor = self.rope.kind, self.rope.factor
        scaling = f"--rope {kind}" + ("" if kind == "none" else f" --rope-factor {factor}")
        return (
            f"lce calibrate --model {shlex.quote(named(str(model)))} --text FILE --out maps.safetensors "
            f"--low-dim {self.low_dim} --far {self.far} --window {self.window} {scaling}"
        )

    def check(self, found: Mapping[str, Any], source: str, model: object = "M") -> None:
        """Raise an error unless maps that were learned for `found`, an `asdict` of this class, can be used here.

        Raises `DataError` for another model's maps, `UsageError` for those of other options.
        """
        if found.get("fingerprint") != self.fingerprint:
            raise DataError(
                f"{named(source)} was calibrated on another model's weights; learn its own by `{self.command(model)}`"
            )
        here, there = _flat(asdict(self)), _flat(found)
        differ = [name for name in here if there.get(name) != here[name]]
        if differ:
            wrong = ", ".join(f"{name}={_text(there.get(name))}" for name in differ)
            asked = ", ".join(f"{name}={_text(here[name])}" for name in differ)
            raise UsageError(
                f"{named(source)} was learned for {wrong}, and here {asked}; "
                f"ask for what it was learned for, learn others by `{self.command(model)}`, or give -o compress=pca"
            )


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts with RoPE's fields beside the others, `rope.kind` and so on."""
    rope = facts.get("rope")
    plain = {name: value for name, value in facts.items() if name != "rope"}
    return plain | {f"rope.{name}": value for name, value in (rope if isinstance(rope, dict) else {}).items()}


def _text(value: object) -> str:
    return value if isinstance(value, str) and value.isalnum() and len(value) < 20 else shown(value)


class LowDimMaps:
    """A model's maps, one pair a layer, all of one `low_dim`.

    `learned_for` says what a map file was learned for. Maps made in memory may be without, and are used as they are.
    """

    def __init__(
        self, layers: Sequence[LowDimMap], source: str = "memory", learned_for: LearnedFor | None = None
    ) -> None:
        self.layers = tuple(layers)
        if not self.layers:
            raise UsageError("low-dim maps of no layer; expected a LowDimMap for each layer of the model")
        self.source = source
        self.learned_for = learned_for
        self._cast: dict[tuple[int, torch.dtype, torch.device], LowDimMap] = {}

    def __repr__(self) -> str:
        return f"LowDimMaps({Path(self.source).name!r}, {self.digest})"

    @cached_property
    def digest(self) -> str:
        """Eight letters that tell these maps from others of the same name."""
        numbers = (x.float().numpy(force=True).tobytes() for maps in self.layers for x in maps.tensors().values())
        return hashlib.sha256(b"".join(numbers)).hexdigest()[:8]

    @property
    def low_dim(self) -> int:
        """R."""
        return self.layers[0].key.shape[1]

    def layer(self, index: int, like: Tensor) -> LowDimMap:
        """One layer's maps in the dtype and on the device of `like`."""
        kind = (index, like.dtype, like.device)
        if kind not in self._cast:
            self._cast[kind] = LowDimMap(**{name: x.to(like) for name, x in self.layers[index].tensors().items()})
        return self._cast[kind]

    def check_shapes(self, n_layers: int, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        """Raise `UsageError` unless these are maps of a model with such layers, `n_layers` of them or more."""
        wanted = LowDimMap.shapes(n_heads, n_kv_heads, head_dim, self.low_dim)
        fit = all({name: tuple(x.shape) for name, x in maps.tensors().items()} == wanted for maps in self.layers)
        if not fit or len(self.layers) < n_layers:
            sizes = ", ".join(f"{name} {list(shape)}" for name, shape in wanted.items())
            raise UsageError(f"{self!r} does not fit this model: expected maps of {n_layers} layers, each {sizes}")


def missing(method: str, command: str) -> UsageError:
    """The error for a method without maps; `command` learns them."""
    return UsageError(
        f"{method}: this model has no calibrated maps; make them by `{command}` and give -o maps=maps.safetensors, "
        "or give -o compress=pca or -o compress=none"
    )


def usable(maps: object, low_dim: int, far: int, window: int, method: str) -> LowDimMaps:
    """`maps`, if they are what a method with these knobs can use. Raises `UsageError` that says how to get them."""
    if not isinstance(maps, LowDimMaps):
        raise missing(method, f"lce calibrate --model M --text FILE --out maps.safetensors --far {far}")
    if maps.low_dim != low_dim:
        raise UsageError(
            f"{method}: low_dim is {low_dim}, but {maps!r} has {maps.low_dim}; give -o low_dim={maps.low_dim}"
        )
    if maps.learned_for is not None:
        replace(maps.learned_for, far=far, window=window).check(asdict(maps.learned_for), maps.source)
    return maps


def principal(k: Tensor, low_dim: int) -> Tensor:
    """The directions `[G·D, R]` in which keys `k [G, N, D]` vary most, R = `min(low_dim, G·D, N - 1)`.

    Used for the keys and, summed over the query heads that share a KV head, for the queries. The keys' mean need not
    be taken away: it shifts all scores of a query alike. Time: O(N · (G·D)² + (G·D)³).

    On GPUs few directions of many are found by iteration, O(N · (G·D)² + (G·D)² · R): all of them would take a second
    or more a layer.
    """
    flat = concat_heads(k).double()
    flat = flat - flat.mean(dim=0)
    n, scatter = min(low_dim, max(1, len(flat) - 1)), flat.T @ flat
    if k.is_cuda and len(scatter) >= FEW_OF_MANY * n:
        directions = leading(scatter, n)
    else:
        directions = torch.linalg.eigh(scatter)[1][:, -n:]  # of ascending variance
    return directions.flip(1).to(k.dtype).contiguous()


def leading(x: Tensor, n: int) -> Tensor:
    """The eigenvectors `[F, n]` of the n largest eigenvalues of `x [F, F]`, symmetric and float64, ascending.

    By subspace iteration (Rutishauser, 1970) with twice as many vectors. Those of eigenvalues that are nearly equal
    may be mixed. Time: O(F² · n).
    """
    vectors = torch.randn(len(x), 2 * n, dtype=x.dtype, generator=torch.Generator().manual_seed(0)).to(x.device)
    x = x / x.diagonal().sum().clamp(min=torch.finfo(x.dtype).tiny)
    for _ in range(3):
        vectors = torch.linalg.qr(x @ (x @ (x @ vectors)))[0]
    best: Tensor = vectors @ torch.linalg.eigh(vectors.T @ x @ vectors)[1][:, -n:]
    return best


def concat_heads(x: Tensor) -> Tensor:
    """`[heads, N, D]` to `[N, heads·D]`: all heads of a token in a row."""
    return x.transpose(0, 1).flatten(1)


def slice_rows(n_queries: int, row_size: int) -> int:
    """How many of the queries `block_scores` looks at together."""
    return max(1, min(n_queries, SCORES_AT_ONCE // row_size))


def block_scores(f: Callable[[slice], Tensor], n_queries: int, row_size: int) -> Tensor:
    """What tokens are worth to a block of queries, `[M]`: `max_c (f(m; c) - max_m' f(m'; c))`.

    `f` gives the scores `[t, M]` of a slice of the queries, `row_size` numbers of work a query; so many queries are
    looked at together that memory stays bounded. Time: O(n_queries · M), and that of `f`.
    """
    at_once = slice_rows(n_queries, row_size)
    best: Tensor | None = None
    for start in range(0, n_queries, at_once):
        scores = f(slice(start, start + at_once))
        if compiled_for(scores) and scores.T.is_contiguous():
            here = best_below_top(scores.T)
        else:
            scores = scores.float()
            here = (scores - scores.amax(dim=-1, keepdim=True)).amax(dim=0)
        best = here if best is None else torch.maximum(best, here)
    assert best is not None, "a block has queries"
    return best


def scores_by_token(q: Tensor, k: Tensor, into: Tensor | None = None) -> Tensor:
    """Dot products of `q [t, R]` and `k [M, R]`, a view `[t, M]` of scores that lie by token.

    The product is made for some thousand tokens at a time: on CPUs a long one runs at a quarter of the speed. For one
    query scores are float32, and the keys are read at the speed of memory. `into [t·M]`, or longer, is overwritten:
    memory that is new to a process is slow.
    """
    if len(q) == 1 and launching.runs_on(k):
        from lce.kernels.cuda import choices

        return choices.scores_of_few(q[None], k[None])[0]
    if not compiled_for(k):
        return products(q[None], k.T[None])[0]
    if len(q) == 1:
        return scores_of_few(q[None], k[None])[0]
    into = torch.empty(len(k) * len(q), dtype=q.dtype) if into is None else into
    scores = into[: len(k) * len(q)].view(len(k), len(q))
    for some, out in zip(k.split(TOKENS_AT_ONCE), scores.split(TOKENS_AT_ONCE), strict=True):
        torch.mm(some, q.T, out=out)
    return scores.T


def spread(scores: Tensor, eps: int) -> Tensor:
    """Each score `[M]` replaced by the largest of those at most `eps` away."""
    return max_pool1d(scores[None], 2 * eps + 1, stride=1, padding=eps)[0] if eps else scores


def first_best(scores: Tensor, n: int, eps: int = 0) -> Tensor:
    """The indices `[n]` of the largest scores `[M]`, ascending; of equal ones the first. Time: O(M · eps).

    A token's score is the largest of those at most `eps` away.
    """
    if compiled_for(scores):
        return best_tokens(scores.float().contiguous(), n, eps)
    scores = spread(scores, eps)
    least = scores.topk(n).values[-1]
    above, equal = scores > least, scores == least
    taken = above | (equal & (equal.cumsum(0) <= n - above.sum()))
    return torch.nonzero_static(taken, size=n).squeeze(1)
