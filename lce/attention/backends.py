"""The attention kernels behind `lce.attention.attention`, each with its log-sum-exp.

A backend answers one question: G independent problems of R query heads that share keys,
`q [G, R, T, D]`, `k v [G, N, D]` to `out [G, R, T, D]`, `lse [G, R, T]` (float32, natural logarithm). Causal means
that the last query sees the last key. With `window=w` a query also sees at most its w nearest keys, its own included.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

AT_ONCE = 4 << 20  # bytes of queries and keys that are gathered for one batched call; what the caches hold
Part = tuple[Tensor, Tensor]  # out [..., T, D] and lse [..., T]


class Backend(ABC):
    """One set of kernels."""

    name: str

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Part:
        """See the module's text. N ≥ 1, and N ≥ T where causal."""

    def grouped(self, q: Tensor, counts: Tensor, order: Tensor, k: Tensor, v: Tensor, into: Part) -> None:
        """Ragged work: rows of `q [A, D]` sorted by expert, `counts [E]` rows each, `order [A]` the sorted rows.

        `k v [E, L, D]` are the experts' keys. Puts the results `out [A, D]`, `lse [A]` of rows that an expert takes in
        their place in `into`; those that no expert takes come last in `order`, and stay as they are. Experts are served
        in classes of like load, padded by a quarter at most, so that some dozen batched calls serve them all and each
        expert's keys are read once. Time: O(A · L · D). Bytes: queries and keys at work, some `AT_ONCE` bytes.
        """
        (out, lse), starts, load = into, counts.cumsum(0) - counts, _padded(counts)
        for size in load.unique().tolist():
            if not size:
                continue
            slots = torch.arange(size, device=q.device)
            at_once = max(1, AT_ONCE // ((2 * k.shape[1] + 2 * size) * k.shape[2] * k.element_size()))
            for experts in (load == size).nonzero().squeeze(1).split(at_once):
                # Padding repeats an expert's last row: it writes the same result to the same place.
                rows = order[starts[experts, None] + torch.minimum(slots, counts[experts, None] - 1)].flatten()
                queries = q.index_select(0, rows).view(len(experts), 1, size, -1)
                part = self.attend(queries, k.index_select(0, experts), v.index_select(0, experts), causal=False)
                out.index_copy_(0, rows, part[0].flatten(0, 2))
                lse.index_copy_(0, rows, part[1].flatten())


class Reference(Backend):
    """Plain float32 arithmetic over the whole score matrix: for tests and for reading."""

    name = "reference"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Part:
        scores = q.float() @ k.float()[:, None].transpose(-1, -2) / math.sqrt(q.shape[-1])
        if causal:
            scores = scores.masked_fill(~band(q.shape[-2], k.shape[-2], window, q.device), -math.inf)
        lse = scores.logsumexp(-1)
        return ((scores - lse[..., None]).exp() @ v.float()[:, None]).to(q.dtype), lse


class Torch(Backend):
    """PyTorch's own flash kernels: the CPU one, and the variable-length one on CUDA (half precision).

    Float32 on CUDA has no such kernel and takes the reference arithmetic.
    """

    name = "torch"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Part:
        if q.is_cuda:
            return self._attend_cuda(q, k, v, causal, window)
        n_queries, n_keys = q.shape[-2], k.shape[-2]
        if causal and window is not None and window < n_keys:
            return self._attend_window(q, k, v, window)
        if not causal or n_queries == 1:  # every query sees every key: fold the heads that share them into the rows
            folded = q.reshape(q.shape[0], 1, -1, q.shape[-1])
            out, lse = _flash_cpu(folded, k[:, None], v[:, None])
            return out.view(q.shape), lse.view(q.shape[:-1])
        shared = (q.shape[0], q.shape[1], -1, -1)
        k, v = k[:, None].expand(shared), v[:, None].expand(shared)
        past = n_keys - n_queries
        own = _flash_cpu(q, k[:, :, past:], v[:, :, past:], causal=True)
        if past == 0:
            return own
        return combine([self.attend(q, k[:, 0, :past], v[:, 0, :past], causal=False), own])

    def _attend_window(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Part:
        n_queries = q.shape[-2]
        first = max(0, k.shape[-2] - n_queries - window + 1)
        k, v = k[:, first:], v[:, first:]
        seen = band(n_queries, k.shape[-2], window, q.device)
        bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -math.inf)
        shared = (q.shape[0], q.shape[1], -1, -1)
        return _flash_cpu(q, k[:, None].expand(shared), v[:, None].expand(shared), bias=bias)

    def _attend_cuda(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> Part:
        if q.dtype not in (torch.float16, torch.bfloat16):
            return Reference().attend(q, k, v, causal=causal, window=window)
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        groups, rep, n_queries, dim = q.shape
        n_keys = k.shape[1]
        span = (-1, -1) if not causal else (-1 if window is None else window - 1, 0)
        out, lse = varlen_attn(
            q.transpose(1, 2).reshape(groups * n_queries, rep, dim),
            k.reshape(groups * n_keys, 1, dim),
            v.reshape(groups * n_keys, 1, dim),
            torch.arange(0, (groups + 1) * n_queries, n_queries, dtype=torch.int32, device=q.device),
            torch.arange(0, (groups + 1) * n_keys, n_keys, dtype=torch.int32, device=q.device),
            n_queries,
            n_keys,
            return_aux=AuxRequest(lse=True),
            window_size=span,
            enable_gqa=True,
        )
        out = out.view(groups, n_queries, rep, dim).transpose(1, 2)
        return out, _heads_last(lse, rep).reshape(groups, n_queries, rep).transpose(1, 2)

    def grouped(self, q: Tensor, counts: Tensor, order: Tensor, k: Tensor, v: Tensor, into: Part) -> None:
        """On a GPU one variable-length call over the keys where they lie. Bytes: two copies of the queries."""
        if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
            super().grouped(q, counts, order, k, v, into)
            return
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        size, dim = k.shape[1:]
        bounds = torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)
        keys = torch.arange(0, (counts.shape[0] + 1) * size, size, dtype=torch.int32, device=q.device)
        flat_k, flat_v = k.reshape(-1, 1, dim), v.reshape(-1, 1, dim)
        part, part_lse = varlen_attn(
            q[order][:, None], flat_k, flat_v, bounds, keys, q.shape[0], size, return_aux=AuxRequest(lse=True)
        )
        _put_back(part.squeeze(1), _heads_last(part_lse, 1).reshape(-1), order, counts, into)


class Flash(Torch):
    """The flash-attn package, where it is installed, on CUDA and in half precision; else PyTorch's kernels."""

    name = "flash"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Part:
        if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
            return super().attend(q, k, v, causal=causal, window=window)
        from flash_attn import flash_attn_func

        span = (-1, -1) if window is None or not causal else (window - 1, 0)
        out, lse, _ = flash_attn_func(
            q.transpose(1, 2), k[:, :, None], v[:, :, None], causal=causal, window_size=span, return_attn_probs=True
        )
        return out.transpose(1, 2), lse

    def grouped(self, q: Tensor, counts: Tensor, order: Tensor, k: Tensor, v: Tensor, into: Part) -> None:
        """On a GPU one variable-length call over the keys where they lie. Bytes: two copies of the queries."""
        if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
            super().grouped(q, counts, order, k, v, into)
            return
        from flash_attn import flash_attn_varlen_func

        size, dim = k.shape[1:]
        bounds = torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)
        keys = torch.arange(0, (counts.shape[0] + 1) * size, size, dtype=torch.int32, device=q.device)
        flat_k, flat_v = k.reshape(-1, 1, dim), v.reshape(-1, 1, dim)
        part, lse, _ = flash_attn_varlen_func(
            q[order][:, None], flat_k, flat_v, bounds, keys, q.shape[0], size, return_attn_probs=True
        )
        _put_back(part.squeeze(1), lse.reshape(-1), order, counts, into)


def combine(parts: list[Part]) -> Part:
    """Merge partial attentions over disjoint keys: one softmax over all of them, and its log-sum-exp.

    Each part `out [..., T, D]`, `lse [..., T]`; a part that saw no key has lse -inf. Time: O(parts · T · D).
    """
    lses = torch.stack([lse for _, lse in parts])
    total = lses.logsumexp(0)
    weights = (lses - total.masked_fill(total == -math.inf, 0.0)).exp()
    out = parts[0][0].float() * weights[0, ..., None]
    for (part, _), weight in zip(parts[1:], weights[1:], strict=True):
        out.addcmul_(part.float(), weight[..., None])
    return out.to(parts[0][0].dtype), total


def band(n_queries: int, n_keys: int, window: int | None, device: torch.device) -> Tensor:
    """`[T, N]`, True where a causal query sees a key; the last query sees the last key."""
    distance = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None] - torch.arange(n_keys, device=device)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _padded(counts: Tensor) -> Tensor:
    """Each count rounded up to 1, 1.25, 1.5 or 1.75 times a power of two, or as it is up to 4."""
    step = 2 ** (torch.log2(counts.clamp(min=4).double()).floor().long() - 2)
    return -(-counts // step) * step


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, bias: Tensor | None = None) -> Part:
    """PyTorch's CPU flash kernel: `[B, heads, T, D]`, top-left causal; lse is a strided view."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias)
    return out, lse.contiguous()


def _heads_last(lse: Tensor, n_heads: int) -> Tensor:
    """A variable-length kernel's lse as `[rows, heads]`; some versions give heads first."""
    return lse if lse.shape[-1] == n_heads and lse.shape[0] != n_heads else lse.transpose(0, 1)


def _put_back(out: Tensor, lse: Tensor, order: Tensor, counts: Tensor, into: Part) -> None:
    """Put sorted rows in their own places; those behind the last expert's are nobody's and change nothing."""
    taken = torch.arange(order.shape[0], device=order.device) < counts.sum()
    into[0].index_copy_(0, order, torch.where(taken[:, None], out, into[0][order]))
    into[1].index_copy_(0, order, torch.where(taken, lse.float(), into[1][order]))
