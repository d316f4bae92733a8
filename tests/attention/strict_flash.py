"""A strict stand-in of PyTorch's CUDA flash attention, `aten._flash_attention_forward`, on CPU tensors.

It has the arguments that PyTorch 2.11 knows, refuses what the kernel would refuse or read beyond, and leaves NaN where
the kernel writes nothing. It waits for nothing itself, so a test may forbid everything that would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lce.attention import torch as backend

HALF = (torch.float16, torch.bfloat16)
WAITS = ("item", "tolist", "nonzero", "unique", "cpu", "__bool__", "__int__", "__float__")


@dataclass
class StrictFlash:
    """The operator, and what it was called with."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    most_blocks: int = 65_535

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor | None, cum_k: Tensor | None, max_q: int, max_k: int,
        dropout: float, causal: bool, debug: bool, *, scale: float | None = None, window_size_left: int | None = None,
        window_size_right: int | None = None, seqused_k: Tensor | None = None, alibi_slopes: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        assert (dropout, debug, scale, alibi_slopes) == (0.0, False, None, None)
        for x in (q, k, v):
            assert x.dtype in HALF
            assert (x.dtype, x.stride(-1), x.ndim) == (q.dtype, 1, 4 if cum_q is None else 3)
        assert (q.shape[-1] % 8, q.shape[-1], q.shape[-2] % k.shape[-2]) == (0, min(k.shape[-1], 256), 0)
        assert k.shape == v.shape
        left = -1 if window_size_left is None else window_size_left
        right = 0 if causal and max_q > 1 else -1 if window_size_right is None else window_size_right
        self.calls.append({"k": k, "v": v, "max_q": max_q, "left": left, "right": right})
        out, n_heads = torch.full_like(q, math.nan), q.shape[-2]
        if cum_q is None or cum_k is None:
            assert (cum_q, cum_k, seqused_k) == (None, None, None)
            assert (len(q), max_q, max_k) == (len(k), q.shape[1], k.shape[1])
            assert len(q) * n_heads <= self.most_blocks
            lse = torch.full((len(q), n_heads, max_q), math.nan)
            for batch in range(len(q)):
                out[batch], lse[batch] = attend(q[batch], k[batch], v[batch], left, right)
            return out, lse, None, None, None
        lse = torch.full((n_heads, len(q)), math.nan)
        for bounds in (cum_q, cum_k):
            assert (bounds.dtype, bounds.is_contiguous(), bounds.shape) == (torch.int32, True, cum_q.shape)
        starts, firsts = cum_q.numpy(), cum_k.numpy()
        sizes = firsts[1:] - firsts[:-1] if seqused_k is None else seqused_k.numpy()
        assert 0 < len(starts) - 1 <= self.most_blocks
        assert len(sizes) == len(starts) - 1
        assert seqused_k is None or (seqused_k.dtype, seqused_k.is_contiguous()) == (torch.int32, True)
        for p, (start, stop) in enumerate(pairwise(starts)):
            assert 0 <= start <= stop <= min(len(q), start + max_q)
            assert sizes[p] <= max_k
            if start < stop:
                assert 0 <= firsts[p] <= len(k) - sizes[p]
                keys = slice(firsts[p], firsts[p] + sizes[p])
                out[start:stop], lse[:, start:stop] = attend(q[start:stop], k[keys], v[keys], left, right)
        return out, lse, None, None, None


def attend(q: Tensor, k: Tensor, v: Tensor, left: int, right: int) -> tuple[Tensor, Tensor]:
    """`q [T, H, D]`, `k v [N, G, D]` in float64; the last query stands at the last key."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    place = torch.arange(k.shape[1]) - (torch.arange(q.shape[1]) + k.shape[1] - q.shape[1])[:, None]
    unseen = ((place < -left) & (left >= 0)) | ((place > right) & (right >= 0))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(unseen, -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)


def install(monkeypatch: pytest.MonkeyPatch) -> StrictFlash:
    """Half precision on CPUs goes the way that it goes on CUDA, to the stand-in."""
    stand_in = StrictFlash()
    takes = backend.flash_takes
    monkeypatch.setattr(backend, "flash_takes", lambda x: takes(OnCuda(x)))
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", stand_in)
    return stand_in


@dataclass
class OnCuda:
    """A CPU tensor's dtype and shape as those of a CUDA tensor."""

    x: Tensor
    is_cuda: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def shape(self) -> torch.Size:
        return self.x.shape


def forbid_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, whatever would wait for a GPU fails."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("this would wait for the GPU")

    for name in WAITS:
        monkeypatch.setattr(Tensor, name, refuse)
