"""PyTorch's own flash kernels: the CPU one, and on CUDA the variable-length one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lce.attention.backend import Backend
from lce.attention.parts import Part, causal_mask, combine
from lce.attention.reference import Reference
from lce.attention.tiles import SlotQueries

FEW_ROWS = 4  # up to here a tile's products of matrices are plain batched ones


class Torch(Backend):
    """PyTorch's operators. Float32 on CUDA has no flash kernel there and takes the reference arithmetic."""

    name = "torch"
    speed = 1

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
        seen = causal_mask(n_queries, k.shape[-2], window, q.device)
        bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -math.inf)
        shared = (q.shape[0], q.shape[1], -1, -1)
        return _flash_cpu(q, k[:, None].expand(shared), v[:, None].expand(shared), bias=bias)

    def _attend_cuda(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> Part:
        if not _is_half(q):
            return Reference().attend(q, k, v, causal=causal, window=window)
        groups, rep, n_queries, dim = q.shape
        n_keys = k.shape[1]
        span = (-1, -1) if not causal else (-1 if window is None else window - 1, 0)
        flat_q = q.transpose(1, 2).reshape(groups * n_queries, rep, dim)
        flat_k, flat_v = (x.reshape(groups * n_keys, 1, dim) for x in (k, v))
        q_bounds, k_bounds = (_bounds(groups, n, q.device) for n in (n_queries, n_keys))
        out, lse = self.ragged(flat_q, flat_k, flat_v, q_bounds, k_bounds, n_queries, n_keys, span)
        out = out.view(groups, n_queries, rep, dim).transpose(1, 2)
        return out, lse.reshape(groups, n_queries, rep).transpose(1, 2)

    def attend_tiles(self, q: Tensor, k: Tensor, v: Tensor) -> Part:
        """Few rows take plain batched products on the CPU.

        With several threads the flash kernel's products of one to three rows depend on the thread that computes them:
        its scratch space is aligned differently in each. In half precision plain products are faster, too: one row and
        256 keys take a quarter of the time.
        """
        if q.is_cuda or len(q) == 1 or q.shape[2] > FEW_ROWS:
            return super().attend_tiles(q, k, v)
        scores = torch.bmm(q[:, 0].float() * q.shape[-1] ** -0.5, k.mT.float())
        lse = scores.logsumexp(-1, keepdim=True)
        out = torch.bmm((scores - lse).exp_(), v.float())
        return out[:, None].to(q.dtype), lse.mT

    def grouped(self, queries: SlotQueries, counts: Tensor, order: Tensor, k: Tensor, v: Tensor, into: Part) -> None:
        """On a GPU one variable-length call over the keys where they lie. Bytes: two copies of the queries."""
        if not k.is_cuda or not _is_half(k):
            super().grouped(queries, counts, order, k, v, into)
            return
        n_tiles, size, dim = k.shape
        bounds = torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)
        flat_k, flat_v = k.reshape(-1, 1, dim), v.reshape(-1, 1, dim)
        q = queries.take(order)[:, None]
        part, lse = self.ragged(q, flat_k, flat_v, bounds, _bounds(n_tiles, size, k.device), len(order), size)
        # The kernel leaves rows behind the last tile's undefined.
        has_tile = torch.arange(len(order), device=k.device) < counts.sum()
        into[0].index_copy_(0, order, torch.where(has_tile[:, None], part.squeeze(1), into[0][order]))
        into[1].index_copy_(0, order, torch.where(has_tile, lse.reshape(-1).float(), into[1][order]))

    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, q_bounds: Tensor, k_bounds: Tensor, most_queries: int, most_keys: int,
        span: tuple[int, int] = (-1, -1),
    ) -> Part:  # fmt: skip
        """Problem p has queries `q_bounds[p]..` of `q [A, R, D]`, keys `k_bounds[p]..` of `k v [B, 1, D]`.

        `span` is how far a query sees to the left and to the right, -1 without an end. `out [A, R, D]`, `lse [A, R]`.
        """
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        out, lse = varlen_attn(
            q, k, v, q_bounds, k_bounds, most_queries, most_keys,
            return_aux=AuxRequest(lse=True), window_size=span, enable_gqa=True,
        )  # fmt: skip
        n_heads = q.shape[1]  # some versions give heads first
        return out, lse if lse.shape[-1] == n_heads and lse.shape[0] != n_heads else lse.transpose(0, 1)


def _is_half(x: Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16)


def _bounds(n: int, size: int, device: torch.device) -> Tensor:
    """Where each of `n` problems of `size` rows begins, and where the last one ends."""
    return torch.arange(0, (n + 1) * size, size, dtype=torch.int32, device=device)


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, bias: Tensor | None = None) -> Part:
    """PyTorch's CPU flash kernel: `[B, heads, T, D]`, top-left causal; lse is a strided view."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias)
    return out, lse.float().contiguous()
