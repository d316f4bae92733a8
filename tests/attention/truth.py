"""Attention written out in float64, one query of one head at a time, and vectors to try it on."""

import math

import torch
from torch import Tensor

from lce.attention import SlotTurns, Turn

HEADS = {"multi-head": (3, 3), "grouped-query": (8, 2), "one for all": (4, 1)}
Attended = tuple[Tensor, Tensor]


def random(*shape: int, seed: int, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def vectors(n_heads: int, n_kv_heads: int, n_queries: int, n_keys: int, dim: int = 16) -> tuple[Tensor, ...]:
    keys = (n_kv_heads, n_keys, dim)
    return random(n_heads, n_queries, dim, seed=1), random(*keys, seed=2), random(*keys, seed=3)


def one_query(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, float]:
    """`q [D]`, `k v [N, D]` to the output `[D]` and the log of the exponentials' sum; 0 and -inf without a key."""
    if len(k) == 0:
        return torch.zeros_like(q, dtype=torch.float64), -math.inf
    scores = (k.double() @ q.double()) / math.sqrt(len(q))
    return scores.softmax(0) @ v.double(), float(scores.logsumexp(0))


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None) -> Attended:
    n_heads, n_queries, _ = q.shape
    rep, past = n_heads // len(k), k.shape[1] - n_queries
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(n_heads, n_queries, dtype=torch.float64)
    for head in range(n_heads):
        for query in range(n_queries):
            last = past + query + 1 if causal else k.shape[1]
            first = 0 if window is None else max(0, last - window)
            keys = slice(first, last)
            out[head, query], lse[head, query] = one_query(q[head, query], k[head // rep, keys], v[head // rep, keys])
    return out, lse


def routed(q: Tensor, turns: Turn, chunk_ids: Tensor, chunks: Attended) -> Attended:
    """Every choice's scores by its own copy of the query, turned for it, and one softmax over the keys of all."""
    n_heads, n_queries = chunk_ids.shape[:2]
    rep, dim = n_heads // len(chunks[0]), q.shape[-1]
    out = torch.zeros(n_heads, n_queries, dim, dtype=torch.float64)
    lse = torch.full((n_heads, n_queries), -math.inf, dtype=torch.float64)
    for head in range(n_heads):
        for query in range(n_queries):
            scores, values = [], []
            for choice, chunk in enumerate(chunk_ids[head, query].tolist()):
                if chunk >= 0:
                    slot = choice if turns.cos.shape[1] > 1 else 0
                    placed = turned(q[head, query], turns.cos[query, slot], turns.sin[query, slot])
                    scores.append(chunks[0][head // rep, chunk].double() @ placed.double() / math.sqrt(dim))
                    values.append(chunks[1][head // rep, chunk].double())
            if scores:
                row = torch.cat(scores)
                out[head, query] = row.softmax(0) @ torch.cat(values)
                lse[head, query] = row.logsumexp(0)
    return out, lse


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x [D]` with each pair (i, i + D/2) rotated as a complex number."""
    half = len(x) // 2
    pairs = torch.complex(x[:half].double(), x[half:].double()) * torch.complex(cos.double(), sin.double())
    return torch.cat((pairs.real, pairs.imag)).to(x.dtype)


def turns_of(n_queries: int, n_slots: int, dtype: torch.dtype = torch.float32) -> Turn:
    angles = random(n_queries, n_slots, 8, seed=6)
    return Turn(angles.cos().to(dtype), angles.sin().to(dtype))


def slots(turns: Turn) -> SlotTurns:
    """Rotations `[T, K, D/2]` as `routed` takes them: a table, and the number of each."""
    shape = turns.cos.shape[:2]
    rows = torch.arange(shape.numel(), device=turns.cos.device).view(shape)
    return SlotTurns(Turn(*(x.flatten(0, 1) for x in turns)), rows)


def assert_same(part: Attended, truth: Attended, tolerance: float = 3e-5) -> None:
    assert (part[0].shape, part[1].shape, part[1].dtype) == (truth[0].shape, truth[1].shape, torch.float32)
    torch.testing.assert_close(part[0].cpu().double(), truth[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(part[1].cpu().double(), truth[1], rtol=0, atol=tolerance)


def routed_vectors(n_heads: int, n_kv_heads: int, n_queries: int, n_chunks: int, size: int) -> tuple[Tensor, ...]:
    shape = (n_kv_heads, n_chunks, size, 16)
    return random(n_heads, n_queries, 16, seed=1), random(*shape, seed=2), random(*shape, seed=3)
