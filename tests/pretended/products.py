"""Products of half-precision matrices with a result in float32, which PyTorch has on CUDA alone (`out_dtype`)."""

from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def check(a: Tensor, b: Tensor, out_dtype: torch.dtype, **_: Any) -> None:
    if a.dtype != b.dtype:
        raise RuntimeError(f"expected scalar types to be the same, not {a.dtype} and {b.dtype}")
    if out_dtype != a.dtype and not (out_dtype == torch.float32 and a.dtype in HALF):
        raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")


def compute(a: Tensor, b: Tensor, out_dtype: torch.dtype, **_: Any) -> Tensor:
    return (a.float() @ b.float()).to(out_dtype)
