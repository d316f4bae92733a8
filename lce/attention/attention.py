"""Attention as a merge of parts: the one door to the kernels.

A method composes three functions. `dense`: all queries of a head see the same keys. `routed`: every query of every
head has its own list of chunks. `merge`: the parts become one softmax over all of their keys, by their log-sum-exps.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lce.attention.backends import Backend, Flash, Part, Reference, Torch, combine
from lce.cache.tiering import Round
from lce.errors import UsageError, nearest

BACKENDS: dict[str, type[Backend]] = {"flash": Flash, "torch": Torch, "reference": Reference}


@dataclass(frozen=True)
class Attention:
    """The three functions over one backend."""

    backend: Backend

    @classmethod
    def choose(cls, name: str = "auto") -> Attention:
        """`auto` is flash where the flash-attn package and CUDA are, else torch. Raises `UsageError`."""
        installed = importlib.util.find_spec("flash_attn") is not None
        if name == "auto":
            name = "flash" if installed and torch.cuda.is_available() else "torch"
        if name not in BACKENDS:
            raise UsageError(f"unknown attention backend {name!r}; {nearest(name, ['auto', *BACKENDS])}")
        if name == "flash" and not installed:
            raise UsageError("attention backend 'flash' needs the flash-attn package: pip install 'lce[flash]'")
        return cls(BACKENDS[name]())

    def dense(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None) -> Part:
        """All T queries of a head see the same keys.

        `q [H, T, D]`, `k v [G, N, D]` to `out [H, T, D]`, `lse [H, T]`. Causal: the last query sees the last key, and
        with `window` no query sees a key that many or more behind it. Time: O(H · T · N · D); keys are never repeated
        for the query heads that share them.
        """
        if q.shape[1] == 0 or k.shape[1] == 0:
            return torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
        grouped = q.unflatten(0, (k.shape[0], -1))  # [G, R, T, D]
        out, lse = self.backend.attend(grouped, k, v, causal=causal, window=window)
        return out.flatten(0, 1), lse.flatten(0, 1)

    def routed(self, q: Tensor, chunk_ids: Tensor, chunks: Iterable[Round]) -> Part:
        """Every query of every head attends its own list of whole chunks.

        `q [H, T, D]`, or `[H, T, K, D]` with one placed copy a choice; `chunk_ids [H, T, K]`, -1 for none; `chunks` as
        `LayerCache.rounds` gives them: keys and values `[P, M, L, D]` and where in them each KV head's chunks are, one
        part of the chunks after the other if need be. Returns `out [H, T, D]`, `lse [H, T]`.

        A mixture-of-experts dispatch: an expert is a (KV head, chunk) pair; the queries that chose it are gathered and
        attended in one go, so its keys are read once however many chose it. Time: O(H · T · K · L · D) and a sort of
        H·T·K numbers; bytes: H·T·K·D for the gathered queries and as much for their partial results.
        """
        n_heads, n_queries, n_choices = chunk_ids.shape
        placed = q[:, :, None].expand(-1, -1, n_choices, -1) if q.ndim == 3 else q
        rows = placed.reshape(-1, q.shape[-1])  # [A, D], A = H * T * K
        out, lse = torch.zeros_like(rows), rows.new_full(rows.shape[:1], -torch.inf, dtype=torch.float32)
        for table, k, v in chunks:  # every choice is served in one round alone
            keys, values, apart = _in_a_row(k, v)
            self._dispatch(rows, _experts(chunk_ids, table, k, apart), keys, values, (out, lse))
        shape = (n_heads, n_queries, n_choices)
        return _merge_choices(out.view(*shape, q.shape[-1]), lse.view(shape))

    def _dispatch(self, rows: Tensor, expert: Tensor, k: Tensor, v: Tensor, into: Part) -> None:
        """Each row of `[A, D]` attends the expert `k v [E, L, D]` of this number, `[A]`; -1 for none."""
        n_experts = len(k)
        # Stable, so that an expert's rows stand in the same order wherever its keys are.
        sorted_experts, order = expert.masked_fill(expert < 0, n_experts).sort(stable=True)
        counts = torch.zeros(n_experts + 1, dtype=torch.int64, device=rows.device)
        counts = counts.scatter_add_(0, sorted_experts, torch.ones_like(sorted_experts))[:-1]
        self.backend.grouped(rows, counts, order, k, v, into)


def merge(parts: Sequence[Part]) -> Tensor:
    """One softmax over the keys of all parts, exactly: `out [H, T, D]`. Every query must have seen some key."""
    return combine(list(parts))[0] if len(parts) > 1 else parts[0][0]


def _in_a_row(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Chunks `[P, M, L, D]` as one list `[E, L, D]`, a view where they lie evenly in memory.

    Also how far apart in the list two heads' chunks are, and two chunks of a head.
    """
    n_heads, n_chunks = k.shape[:2]
    by_head, by_chunk = (stride if n > 1 else 0 for stride, n in zip(k.stride(), k.shape[:2], strict=False))
    step = math.gcd(by_head, by_chunk)
    if not n_chunks or k.stride() != v.stride() or step < k.shape[2] * k.shape[3]:
        return k.flatten(0, 1), v.flatten(0, 1), (n_chunks, 1)
    per_head, per_chunk = by_head // step, by_chunk // step
    shape = ((n_heads - 1) * per_head + (n_chunks - 1) * per_chunk + 1, *k.shape[2:])
    strides = (step, *k.stride()[2:])
    return k.as_strided(shape, strides), v.as_strided(shape, strides), (per_head, per_chunk)


def _experts(chunk_ids: Tensor, table: Tensor | None, k: Tensor, apart: tuple[int, int]) -> Tensor:
    """The expert of each choice `[H, T, K]`, flat: its place in the list of a round's keys `k`, -1 if it is none."""
    n_heads, n_chunks, (per_head, per_chunk) = len(chunk_ids), max(1, k.shape[1]), apart
    kv_head = torch.arange(n_heads, device=chunk_ids.device) // (n_heads // (len(k) if table is None else len(table)))
    if table is None:
        expert = kv_head[:, None, None] * per_head + chunk_ids * per_chunk
        return expert.masked_fill(chunk_ids < 0, -1).reshape(-1)
    places = torch.where(table < 0, -1, table // n_chunks * per_head + table % n_chunks * per_chunk)
    return places[kv_head[:, None, None], chunk_ids.clamp(min=0)].masked_fill(chunk_ids < 0, -1).reshape(-1)


def _merge_choices(out: Tensor, lse: Tensor) -> Part:
    """`out [H, T, K, D]`, `lse [H, T, K]` merged over K by one small matrix product a query."""
    total = lse.logsumexp(-1)
    weights = (lse - total.masked_fill(total == -torch.inf, 0.0)[..., None]).exp()
    return (weights[..., None, :].to(out.dtype) @ out).squeeze(-2), total
