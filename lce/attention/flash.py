"""The flash-attn package."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from lce.attention.compiled import Compiled
from lce.attention.parts import Part


class Flash(Compiled):
    """flash-attn on CUDA in half precision; elsewhere the `compiled` backend."""

    name = "flash"
    speed = 3

    @classmethod
    def missing(cls) -> str | None:
        if importlib.util.find_spec("flash_attn") is None:
            return "the flash-attn package: pip install 'lce[flash]'"
        return None

    @classmethod
    def suits_machine(cls) -> bool:
        return torch.cuda.is_available()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Part:
        if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
            return super().attend(q, k, v, causal=causal, window=window)
        from flash_attn import flash_attn_func

        span = (-1, -1) if window is None or not causal else (window - 1, 0)
        out, lse, _ = flash_attn_func(
            q.transpose(1, 2), k[:, :, None], v[:, :, None], causal=causal, window_size=span, return_attn_probs=True
        )
        return out.transpose(1, 2), lse

    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, q_bounds: Tensor, k_bounds: Tensor, most_queries: int, most_keys: int,
        span: tuple[int, int] = (-1, -1),
    ) -> Part:  # fmt: skip
        from flash_attn import flash_attn_varlen_func

        out, lse, _ = flash_attn_varlen_func(
            q, k, v, q_bounds, k_bounds, most_queries, most_keys, window_size=span, return_attn_probs=True
        )
        return out, lse.transpose(0, 1)
