"""The one matrix product of the model files, on the fastest exact kernel that the machine has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [T, in]` times `weight [out, in]` transposed, plus `bias [out]`. Time: O(T · in · out).

    In float32 on a CPU it goes to oneDNN, which PyTorch itself uses only below float32: on AMD processors it is about
    twice as fast as the MKL routine that `torch.nn.functional.linear` calls, and as exact.
    """
    if _ONEDNN and x.dtype == torch.float32 and not x.is_cuda:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def _onednn_works() -> bool:
    """Whether this PyTorch has the operator; it is not part of its public interface."""
    try:
        torch.ops.mkldnn._linear_pointwise(torch.zeros(1, 8), torch.zeros(8, 8), None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return False
    return True


_ONEDNN = _onednn_works()
