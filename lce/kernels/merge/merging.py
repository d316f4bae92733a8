"""The merge of attention results on CPUs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lce.kernels.runtime.kernel import Kernels

_merged = Kernels("merging.merged")
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
    given = n_parts, size, out, total, *(x for pair in held for x in pair)
    _merged[dtype](n, *given, least=_ROWS, memory=4 * (size + n_parts))
    return out, total
