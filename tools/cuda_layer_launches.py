"""Calls of the Triton kernels around attention, one for each kind of launch: products, norms, rotations, choices.

Tensors hold nothing; only their shapes, strides and addresses count. The smallest shapes are there because Triton makes
a constant of a number that is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODELS = {  # hidden size, inner size, heads, KV heads, head size
    "7B": (4096, 11008, 32, 32, 128),
    "8B": (4096, 14336, 32, 8, 128),
    "0.5B": (896, 4864, 14, 2, 64),
    "tiny": (64, 96, 4, 2, 16),
}


def layer_launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and calls. None of these kernels may keep registers in memory."""
    for kind, dtype in DTYPES.items():
        for model, sizes in MODELS.items():
            for n in (1, 2, 3, 4):
                yield f"products {n} {kind} {model}", lambda n=n, d=dtype, s=sizes: _products(n, d, *s)
            for n in (1, 2048):
                yield f"elementwise {n} {kind} {model}", lambda n=n, d=dtype, s=sizes: _elementwise(n, d, *s)
        for n_chunks, dim in ((1, 16), (77, 80), (512, 128), (8192, 256)):
            yield f"choices {n_chunks} {kind} {dim}", lambda m=n_chunks, d=dtype, k=dim: _choices(m, d, k)


def _products(n: int, dtype: torch.dtype, hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> None:
    """A layer's products, with a bias and without."""
    from lce.kernels.cuda.products import product

    def some(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    x, rows = some(n, hidden), (heads + 2 * kv_heads) * dim
    product(x, some(rows, hidden), norm=some(hidden), eps=1e-5)
    product(x, some(rows, hidden), some(rows), norm=some(hidden), eps=1e-5)
    product(some(n, heads * dim), some(hidden, heads * dim), onto=x)
    product(some(n, heads * dim), some(hidden, heads * dim), some(hidden), onto=x)
    product(x, some(2 * inner, hidden), norm=some(hidden), eps=1e-5, gated=True)
    product(x, some(2 * inner, hidden), some(2 * inner), norm=some(hidden), eps=1e-5, gated=True)
    product(some(n, inner), some(hidden, inner), onto=x)


def _elementwise(n: int, dtype: torch.dtype, hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> None:
    from lce.kernels.cuda import elementwise

    def some(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    at = torch.zeros(1, dtype=torch.int64)
    joined, cos = some(n, heads + 2 * kv_heads, dim).transpose(0, 1), some(n, dim // 2)
    q, k, v = joined.split_with_sizes((heads, kv_heads, kv_heads))
    elementwise.rms_norm(some(n, hidden), some(hidden), 1e-5)
    elementwise.rms_norm_two(q, some(dim), k, some(dim), 1e-5)
    elementwise.silu_mul(some(n, 2 * inner))
    elementwise.rotate(q, cos, cos)
    elementwise.rotate(q, cos[:1], cos[:1])
    elementwise.rotate(q[:, :, None], some(n, 4, dim // 2), some(n, 4, dim // 2))
    into = some(kv_heads, n + 1000, dim)
    for place in (at, 0):
        elementwise.append(k, v, into, into, place, cos, cos)
        elementwise.append(k, v, into, into, place, None, None)
    elementwise.take_rows(into, into, torch.zeros(n, dtype=torch.int64))
    elementwise.take_rows(into[:1], into[:1], at)


def _choices(n_chunks: int, dtype: torch.dtype, dim: int) -> None:
    from lce.kernels.cuda import choices

    def some(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    at, forced = torch.zeros(1, dtype=torch.int64), torch.zeros(n_chunks, dtype=torch.bool)
    for size, n in ((256, 15), (1, 1)):
        for choosers in (32, 8, 1):
            choices.best_runs(
                some(32, dim), some(32, n_chunks, dim), at, size, n, choosers=choosers, keep_first=True, keep_last=True
            )
        choices.best_runs(some(32, dim), some(8, n_chunks, 2, dim), at, size, n, own=True)
        choices.best_runs(some(32, dim), some(32, n_chunks, dim), at, size, n, least=True)
        for n_queries in (1, 512):
            choices.best_chunks(some(32, n_queries, n_chunks), forced.expand(n_queries, -1).contiguous(), n, 7, size)
            choices.best_chunks(some(1, n_queries, n_chunks), forced.expand(n_queries, -1).contiguous(), n, at, size)
    for n, position in ((15, at), (1, None)):
        choices.runs_of_chunks(torch.zeros(8, n, dtype=torch.int64), 256, position)
    for n_queries in (1, 8):
        choices.scores_of_few(some(1, n_queries, dim), some(1, n_chunks, dim))
        choices.scores_of_few(some(32, n_queries, dim), some(8, n_chunks, 2, dim))
