"""The merge of attention results for disjoint sets of keys into the result of one softmax over all these keys."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from numba import carray, float32, int64
from torch import Tensor

from lce.kernels.cpu.compiling import Kernel, by_dtype
from lce.kernels.cpu.numbers import exp, itemsize, pointer, read, stored, write

_ROWS = 64  # the smallest number of queries that a thread takes


def merged(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge two or more attention results, outputs `[..., D]` and log-sum-exps `[...]` (float32), into one such pair.

    The log-sum-exp of attention to no key is -inf. Sums are float32. Bytes moved: each result once.
    """
    first, dtype = parts[0][0], parts[0][0].dtype
    n_parts, size = len(parts), first.shape[-1]
    n = first.numel() // size
    out, total = torch.empty(first.shape, dtype=dtype), torch.empty(first.shape[:-1], dtype=torch.float32)
    held = [(part.contiguous(), lse.contiguous()) for part, lse in parts]
    for part, lse in held:
        assert (part.dtype, part.shape) == (dtype, out.shape), (part.dtype, part.shape)
        assert (lse.dtype, lse.shape) == (torch.float32, total.shape), (lse.dtype, lse.shape)
    addresses = array("q", (x.data_ptr() for pair in held for x in pair))
    _merged[dtype](n, n_parts, size, out.data_ptr(), total.data_ptr(), addresses.buffer_info()[0], least=_ROWS)
    return out, total


@by_dtype(Kernel)
def _merged(first, stop, n_parts, size, out_at, total_at, parts_at):
    parts = carray(pointer(parts_at, int64), (n_parts, 2))
    total = carray(pointer(total_at, float32), (stop,))
    sums, weights = np.empty(size, np.float32), np.empty(n_parts, np.float32)
    for row in range(first, stop):
        top = np.float32(-np.inf)
        for i in range(n_parts):
            weights[i] = carray(pointer(parts[i, 1] + 4 * row, float32), (1,))[0]
            top = max(top, weights[i])
        whole = np.float32(0)
        for i in range(n_parts):
            weights[i] = exp(weights[i] - top) if weights[i] != np.float32(-np.inf) else np.float32(0)
            whole += weights[i]
        total[row] = top + np.log(whole)
        scale = np.float32(1) / whole if whole != np.float32(0) else np.float32(0)
        sums[:] = 0
        for i in range(n_parts):
            if weights[i] != np.float32(0):  # a weight that is NaN is not skipped
                part = carray(pointer(parts[i, 0] + row * size * itemsize, stored), (size,))
                weight = weights[i] * scale
                for d in range(size):
                    sums[d] += weight * read(part[d])
        out = carray(pointer(out_at + row * size * itemsize, stored), (size,))
        for d in range(size):
            out[d] = write(sums[d])
