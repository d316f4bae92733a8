"""Products of a few rows with a weight matrix, which read the weights once, at the speed of memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba import carray, float32
from torch import Tensor

from lce.kernels.compiling import MOST_ROWS, kernel, n_threads
from lce.kernels.numbers import READ, STORED, WRITE, pointer

_ROWS = 64  # weight rows that a thread takes at a time


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [T, in]` times `weight [out, in]` transposed, plus `bias [out]`: `[T, out]`, for T up to `MOST_ROWS`.

    All contiguous, on the CPU and of one dtype. Sums are float32. Bytes: the weights, once. Each number of the result
    is one sum in one order, whatever the number of threads.
    """
    n, size = x.shape
    out = torch.empty(n, weight.shape[0], dtype=x.dtype)
    wide = x.float()
    assert n <= MOST_ROWS and weight.shape[1] == size and weight.dtype == x.dtype, (x.shape, weight.shape, weight.dtype)
    assert weight.is_contiguous() and wide.is_contiguous()
    n_threads()
    _product(x.dtype)(
        wide.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
        n, weight.shape[0], size,
    )  # fmt: skip
    return out


@cache
def _product(dtype: torch.dtype) -> Callable[..., Any]:
    stored, read, write = STORED[dtype], READ[dtype], WRITE[dtype]

    @kernel("void(intp, intp, intp, intp, intp, intp, intp)")
    def compiled(x_at, weight_at, bias_at, out_at, n, n_out, size):
        x = carray(pointer(x_at, float32), (n, size))
        weight = carray(pointer(weight_at, stored), (n_out, size))
        bias = carray(pointer(bias_at, stored), (n_out,))
        out = carray(pointer(out_at, stored), (n, n_out))
        for task in numba.prange((n_out + _ROWS - 1) // _ROWS):
            for row in range(task * _ROWS, min(n_out, task * _ROWS + _ROWS)):
                start = read(bias[row]) if bias_at else np.float32(0)
                for i in range(n):
                    total = np.float32(0)
                    for j in range(size):
                        total += x[i, j] * read(weight[row, j])
                    out[i, row] = write(start + total)

    return compiled
