"""Merges partial attentions over disjoint keys into one softmax over all keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numba
import numpy as np
import torch
from numba import carray, float32
from torch import Tensor

from lce.kernels.cpu.compiling import Kernel, kernel
from lce.kernels.cpu.numbers import READ, STORED, WRITE, exp, pointer

MOST_PARTS = 4
_ROWS = 64  # queries that a thread takes at a time


def merged(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge two to `MOST_PARTS` parts `out [..., D]`, `lse [...]` (float32) into one, with its log-sum-exp.

    A part that saw no key has lse -inf. Sums are float32. Time and bytes: O(parts), read once.
    """
    first, dtype = parts[0][0], parts[0][0].dtype
    n_parts, size = len(parts), first.shape[-1]
    n = first.numel() // size
    out, total = torch.empty(first.shape, dtype=dtype), torch.empty(first.shape[:-1], dtype=torch.float32)
    held = [(part.contiguous(), lse.contiguous()) for part, lse in parts]
    assert 2 <= n_parts <= MOST_PARTS, n_parts
    for part, lse in held:
        assert (part.dtype, part.shape) == (dtype, out.shape), (part.dtype, part.shape)
        assert (lse.dtype, lse.shape) == (torch.float32, total.shape), (lse.dtype, lse.shape)
    addresses = [(part.data_ptr(), lse.data_ptr()) for part, lse in held] + [(0, 0)] * (MOST_PARTS - n_parts)
    _merged(dtype)(*(x for pair in addresses for x in pair), out.data_ptr(), total.data_ptr(), n_parts, n, size)
    return out, total


@cache
def _merged(dtype: torch.dtype) -> Kernel:
    stored, read, write, item, rows = STORED[dtype], READ[dtype], WRITE[dtype], dtype.itemsize, _ROWS

    @kernel("void(intp, intp, intp, intp, intp, intp, intp, intp, intp, intp, intp, intp, intp)")
    def compiled(out0, lse0, out1, lse1, out2, lse2, out3, lse3, out_at, total_at, n_parts, n, size):
        outs, lses = (out0, out1, out2, out3), (lse0, lse1, lse2, lse3)
        for task in numba.prange((n + rows - 1) // rows):
            sums, weights = np.empty(size, np.float32), np.empty(4, np.float32)
            for row in range(task * rows, min(n, task * rows + rows)):
                top = np.float32(-np.inf)
                for i in range(n_parts):
                    weights[i] = carray(pointer(lses[i] + 4 * row, float32), (1,))[0]
                    top = max(top, weights[i])
                whole = np.float32(0)
                for i in range(n_parts):
                    weights[i] = exp(weights[i] - top) if weights[i] != np.float32(-np.inf) else np.float32(0)
                    whole += weights[i]
                carray(pointer(total_at + 4 * row, float32), (1,))[0] = top + np.log(whole)
                scale = np.float32(1) / whole if whole != np.float32(0) else np.float32(0)
                sums[:] = 0
                for i in range(n_parts):
                    if weights[i] != np.float32(0):  # NaN too
                        part = carray(pointer(outs[i] + row * size * item, stored), (size,))
                        weight = weights[i] * scale
                        for d in range(size):
                            sums[d] += weight * read(part[d])
                out = carray(pointer(out_at + row * size * item, stored), (size,))
                for d in range(size):
                    out[d] = write(sums[d])

    return compiled
