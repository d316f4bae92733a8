"""What the tests of kernels share: random tensors, operations in float64, and the device of the kernels for GPUs."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lce.kernels.product.quantised import QuantisedMatrix, parts_of
from lce.kernels.runtime.launching import LaneRows
from lce.kernels.runtime.shared import INT4, INT8, Layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU, Triton's interpreter runs the kernels
ON_GPU = [pytest.mark.cuda] if DEVICE == "cuda" else []
MOST = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # the largest error of attention on a GPU
EPS = 1e-5
LAYOUTS = {"int8": INT8, "int4": INT4}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [x.to(DEVICE) for x in tensors]


def lane_rows(kept: list[Tensor], n_written: int = 0) -> LaneRows:
    """Rows of contexts with `kept [heads, n, …]` each, all on the device; a context's n is its own."""
    step = [x.stride(0) * x.itemsize for x in kept]
    table = [[x.data_ptr() + head * size for head in range(len(x))] for x, size in zip(kept, step, strict=True)]
    n_rows, count = max(x.shape[1] for x in kept), torch.tensor([n_written], device=DEVICE)
    shape = (len(kept[0]), n_rows, *kept[0].shape[2:])
    return LaneRows(torch.tensor(table, device=DEVICE), count, shape, kept[0].dtype)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.double(), weight.shape, weight.double(), EPS)


def gated(x: Tensor, gate: str = "silu") -> Tensor:
    first, second = x.double().chunk(2, dim=-1)
    return (F.silu(first) if gate == "silu" else F.gelu(first, approximate="tanh")) * second


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (first, second), cos, sin = x.double().chunk(2, dim=-1), cos.double(), sin.double()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, **around: Any) -> Tensor:
    """`around`: `norm`, `gate` and `onto`, as kernels take them."""
    norm, onto = around.get("norm"), around.get("onto")
    wide = x.double() if norm is None else normed(x, norm)
    out = wide @ weight.double().T + (0 if bias is None else bias.double())
    out = gated(out, around["gate"]) if around.get("gate") else out
    return out if onto is None else onto.double() + out


def assert_close(got: Tensor, expected: Tensor, most: float | Tensor) -> None:
    """Check against float64: within the rounding of the result's dtype, relative, or `most`."""
    bound = torch.finfo(got.dtype).eps * expected.abs() + most
    assert ((got.double() - expected).abs() <= bound).all()


def unseen(n: int, n_keys: int, window: int) -> Tensor:
    """`[T, N]`: whether one of the last `n` tokens does not see a key."""
    distance = (n_keys - n + torch.arange(n))[:, None] - torch.arange(n_keys)
    return (distance < 0) | (distance >= window)


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None) -> tuple[Tensor, Tensor]:
    """One softmax over all keys of a head, and its log-sum-exp."""
    k, v = (x.double().repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = q.double() @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(unseen(q.shape[1], k.shape[1], window or k.shape[1]), -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def packed(weight: Tensor, layout: Layout) -> QuantisedMatrix:
    parts = {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in parts_of(layout, *weight.shape).items()}
    matrix = QuantisedMatrix(layout, weight.shape, parts)
    matrix.pack(weight)
    return matrix
