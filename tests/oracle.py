"""The slow, obvious truth: attention straight from the definitions, in float64, sharing no code with lce.

Each method is a function from a whole sequence's `q [H, N, D]`, `k v [G, N, D]` to two explicit tables, for every head:
which keys a query attends (`mask [H, N, N]`), and at which distance (`distance [H, N, N]`). `attention` then takes one
softmax over each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """What a definition may depend on besides the vectors."""

    window: int
    theta: float = 10000.0
    sliding_window: int | None = None


def frequencies(dim: int, theta: float) -> Tensor:
    return torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)


def as_complex(x: Tensor) -> Tensor:
    """RoPE turns the pair (x_i, x_{i + D/2}) as one complex number."""
    half = x.shape[-1] // 2
    return torch.complex(x[..., :half].double(), x[..., half:].double())


def turned(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """`x [..., N, D]` rotated at `position [N]`, as complex numbers."""
    angle = position.double()[:, None] * frequencies(x.shape[-1], theta)
    return as_complex(x) * torch.polar(torch.ones_like(angle), angle)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """The real dot product of two complex vectors."""
    return (a * b.conj()).real.sum(-1)


def attention(q: Tensor, k: Tensor, v: Tensor, tables: Tables, setting: Setting) -> Tensor:
    """`[H, N, D]`: each row's softmax over the keys it attends, each key turned away by its distance."""
    mask, distance = tables
    n_heads, n, dim = q.shape
    rep = n_heads // k.shape[0]
    freq = frequencies(dim, setting.theta)
    out = torch.zeros(n_heads, n, dim, dtype=torch.float64)
    for h in range(n_heads):
        queries, keys = as_complex(q[h]), as_complex(k[h // rep])
        product = queries[:, None] * keys[None].conj()  # [N, N, D/2]
        turn = distance[h].double()[..., None] * freq
        scores = (product * torch.polar(torch.ones_like(turn), turn)).real.sum(-1) / math.sqrt(dim)
        scores[~mask[h]] = -math.inf
        out[h] = scores.softmax(-1) @ v[h // rep].double()
    return out


def full(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Tables:
    """Causal, distance i - j; only the checkpoint's sliding window cuts it."""
    n_heads, n = q.shape[:2]
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    mask = j <= i
    if setting.sliding_window is not None:
        mask = mask & (i - j < setting.sliding_window)
    return mask.expand(n_heads, n, n), (i - j).expand(n_heads, n, n)


def longheads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setting: Setting,
    chunk_size: int | None = None,
    chunks: int | None = None,
    share: str = "head",
    rank: str = "top",
    keep_first: bool = True,
    fix_head: bool = False,
) -> Tables:
    """LongHeads, query by query and head by head."""
    size = chunk_size or (256 if setting.window >= 4096 else setting.window // 32)
    budget = chunks or setting.window // size
    n_heads, n = q.shape[:2]
    scores = longheads_scores(q, k, v, size, setting.theta)
    rep = n_heads // k.shape[0]

    def choose(h: int, i: int) -> list[int]:
        own = i // size
        if own < budget:
            return list(range(own))
        heads = {
            "head": [0] if fix_head else [h],
            "group": [g for g in range(n_heads) if g // rep == h // rep],
            "layer": list(range(n_heads)),
        }[share]
        total = sum(scores[g, i] for g in heads)
        fixed = [0, own - 1] if keep_first else [own - 1]
        free = [c for c in range(own) if c not in fixed]
        free.sort(key=lambda c: float(total[c]), reverse=rank == "top")
        return sorted(fixed + free[: budget - 1 - len(fixed)])

    return placed(n_heads, n, size, choose)


def placed(n_heads: int, n: int, size: int, choose: Callable[[int, int], list[int]]) -> Tables:
    """The chosen chunks side by side from position 0, the query's own chunk behind them."""
    mask = torch.zeros(n_heads, n, n, dtype=torch.bool)
    distance = torch.zeros(n_heads, n, n, dtype=torch.int64)
    for h in range(n_heads):
        for i in range(n):
            row = [*choose(h, i), i // size]
            at = (len(row) - 1) * size + i % size
            for slot, chunk in enumerate(row):
                for offset in range(size):
                    j = chunk * size + offset
                    if j <= i:
                        mask[h, i, j] = True
                        distance[h, i, j] = at - (slot * size + offset)
    return mask, distance


def longheads_scores(q: Tensor, k: Tensor, v: Tensor, size: int, theta: float) -> Tensor:
    """`[H, N, M]`: the unrotated query against each complete chunk's representation (Eq. 1-3)."""
    n_heads, n, dim = q.shape
    rep = n_heads // k.shape[0]
    scores = torch.zeros(n_heads, n, n // size, dtype=torch.float64)
    offsets = torch.arange(size)
    for h in range(n_heads):
        for c in range(n // size):
            span = slice(c * size, (c + 1) * size)
            queries, keys = turned(q[h, span], offsets, theta), turned(k[h // rep, span], offsets, theta)
            inner = dot(queries[:, None], keys[None]) / math.sqrt(dim)
            out = inner.softmax(-1) @ v[h // rep, span].double()
            summary_query = as_complex(out.mean(0))
            weights = (dot(summary_query[None], keys) / math.sqrt(dim)).softmax(-1)
            representation = (weights[:, None] * keys).sum(0)
            scores[h, :, c] = dot(as_complex(q[h]), representation[None])
    return scores


DEFINITIONS: dict[str, Callable[..., Tables]] = {"full": full, "longheads": longheads}
