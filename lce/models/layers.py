"""The matrix product and the norm of the model files, on the fastest exact kernels that the machine has."""

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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x [T, hidden]` over its root mean square, times `weight [hidden]`; computed in float32 whatever `x` is.

    On a CPU written out, in place after one copy: PyTorch's own is several times slower there below float32.
    """
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    out = x * scale if x.dtype == torch.float32 else x.float().mul_(scale)
    return out.mul_(weight).to(x.dtype)


def _onednn_works() -> bool:
    """Whether this PyTorch has the operator; it is not part of its public interface."""
    try:
        torch.ops.mkldnn._linear_pointwise(torch.zeros(1, 8), torch.zeros(8, 8), None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return False
    return True


_ONEDNN = _onednn_works()
