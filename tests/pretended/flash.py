"""A stand-in of PyTorch's flash attention on CUDA, `aten._flash_attention_forward`, as strict as the real one.

The conditions are those of `mha_fwd` and `mha_varlen_fwd` in PyTorch's flash_api.cpp (2.11 to 2.13), and those that
only the GPU would notice: alignment, bounds that leave the tensors, and the size of the grid. The arguments
are those of 2.11. Results are computed in float64. What the kernel does not write is NaN.
"""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.pretended.tensor import PretendedTensor, poison

MOST_BLOCKS = 65_535  # along the second and the third axis of a grid
HALF = (torch.float16, torch.bfloat16)


def check(q: Tensor, k: Tensor, v: Tensor, *args: Any, seqused_k: Tensor | None = None, **options: Any) -> None:
    """What the operator checks, and what a GPU would not survive, save for the numbers in the bounds."""
    cum_seq_q, cum_seq_k, max_q, _, dropout_p, _, return_debug_mask = args
    newer = [name for name in ("block_table", "num_splits") if options.get(name) is not None]
    _expect(not newer, "no argument of PyTorch 2.11: block_table, num_splits")
    plain = options.get("alibi_slopes") is None and dropout_p == 0 and not return_debug_mask
    _expect(plain, "the stand-in has no such argument")
    _expect((cum_seq_q is None) == (cum_seq_k is None), "cum_seq_q and cum_seq_k must be both set or both not set")
    dense = cum_seq_q is None
    _check_vectors(q, k, v, 4 if dense else 3)
    if dense:
        _expect(seqused_k is None, "seqused_k needs bounds")
        _expect(len(k) == len(q), "q and k must have one batch size")
        _check_grid(len(q), q.shape[2], q.shape[1])
        return
    bounds = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "seqused_k": seqused_k}
    for name, x in ((name, x) for name, x in bounds.items() if x is not None):
        _expect(isinstance(x, PretendedTensor) and x.device == q.device, f"{name} must be on {q.device}")
        _expect(x.dtype == torch.int32, f"{name} must have dtype int32, not {x.dtype}")
        _expect(x.is_contiguous(), f"{name} must be contiguous")
    n_problems = cum_seq_q.numel() - 1
    _expect(n_problems > 0, "batch size must be positive")
    _expect(cum_seq_q.shape == cum_seq_k.shape == (n_problems + 1,), "bounds must have the shape [batch + 1]")
    _expect(seqused_k is None or seqused_k.shape == (n_problems,), "seqused_k must have the shape [batch]")
    _check_grid(n_problems, q.shape[1], max_q)


def compute(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
    """`q [B, T, H, D]`, `k v [B, N, G, D]` without bounds, lse `[B, H, T]`; with them `[A, H, D]`, lse `[H, A]`."""
    cum_seq_q, cum_seq_k, max_q, max_k, _, is_causal, _ = args
    out, sides = torch.empty(q.shape, dtype=q.dtype), [options.get(f"window_size_{side}") for side in ("left", "right")]
    if cum_seq_q is None or cum_seq_k is None:
        max_q, max_k = q.shape[1], k.shape[1]
        lse = torch.empty(len(q), q.shape[2], max_q)
        problems = list(zip(q, k, v, out, lse, strict=True))
    else:
        lse = torch.empty(q.shape[1], len(q))
        bounds = _bounds(q, k, args, options.get("seqused_k"))
        problems = [(q[rows], k[keys], v[keys], out[rows], lse[:, rows]) for rows, keys in bounds]
        swapped = max_q == 1 and q.shape[1] > k.shape[1] and sides == [None, None]
        _expect(not swapped or len(q) == len(problems), "with one query a problem, q must have a row for each")
    poison(out)
    poison(lse)
    left, right = (-1 if size is None or size >= max_k else size for size in sides)
    scale, window = options.get("scale") or 1 / math.sqrt(q.shape[-1]), (left, 0 if is_causal and max_q > 1 else right)
    for own_q, own_k, own_v, own_out, own_lse in problems:
        if len(own_q):
            found = _attend(own_q.double(), own_k.double(), own_v.double(), scale, window)
            own_out.copy_(found[0])
            own_lse.copy_(found[1])
    rng_state, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, lse, rng_state, unused, torch.empty(0, dtype=q.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """`q [T, H, D]`, `k v [N, G, D]`; the last query stands at the last key. A query that sees no key has lse inf."""
    rep = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,nhd->htn", q, k.repeat_interleave(rep, dim=1)) * scale
    i, j = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    left, right = window
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    seen &= (j >= i - left) if left >= 0 else True
    seen &= (j <= i + right) if right >= 0 else True
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1) if len(k) else torch.full(scores.shape[:2], -math.inf, dtype=torch.float64)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    out = torch.einsum("htn,nhd->thd", weights, v.repeat_interleave(rep, dim=1))
    return out, lse.masked_fill(lse == -math.inf, math.inf)


def _check_vectors(query: Tensor, key: Tensor, value: Tensor, ndim: int) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        _expect(isinstance(x, PretendedTensor), f"{name} must be on CUDA")
        _expect(x.device == query.device, f"{name} is on {x.device}, query on {query.device}")
        _expect(x.dtype in HALF, f"FlashAttention only support fp16 and bf16 data type, not {x.dtype}")
        _expect(x.dtype == query.dtype, "query, key and value must have the same dtype")
        _expect(x.ndim == ndim, f"{name} must have {ndim} dimensions, not {x.ndim}")
        _expect(x.stride(-1) == 1 or x.shape[-1] == 1, "Input tensor must have contiguous last dimension")
        _expect(x.shape[-1] == query.shape[-1], "q, k and v must have one head size")
        strides = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
        aligned = x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in strides)
        _expect(aligned, f"misaligned address: {name} has strides {x.stride()} from {x.data_ptr() % 16} of 16")
    dim = query.shape[-1]
    _expect(dim % 8 == 0, f"head_size must be a multiple of 8, not {dim}")
    _expect(dim <= 256, f"FlashAttention forward only supports head dimension at most 256, not {dim}")
    _expect(key.shape == value.shape, f"k has the shape {list(key.shape)}, v {list(value.shape)}")
    _expect(query.shape[-2] % key.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")


def _bounds(q: Tensor, k: Tensor, args: Any, seqused_k: Tensor | None) -> list[tuple[slice, slice]]:
    """The rows and the keys of each problem. Where `seqused_k` says how many keys, bounds only say where they begin."""
    rows, keys = (list(pairwise(x.tolist())) for x in args[:2])
    if seqused_k is not None:
        keys = [(start, start + n) for (start, _), n in zip(keys, seqused_k.tolist(), strict=True)]
    keys = [span if row[0] < row[1] else (0, 0) for row, span in zip(rows, keys, strict=True)]  # others are not read
    for pairs, total, most, name in ((rows, len(q), args[2], "q"), (keys, len(k), args[3], "k")):
        for start, stop in pairs:
            _expect(0 <= start <= stop <= total, f"cu_seqlens_{name} leave the tensor: {start}..{stop} of {total}")
            _expect(stop - start <= most, f"max_{name} is {most}; a problem has {stop - start}")
    return [(slice(*some), slice(*others)) for some, others in zip(rows, keys, strict=True)]


def _check_grid(n_problems: int, n_heads: int, most_queries: int) -> None:
    grid = (-(-most_queries // 64), n_problems, n_heads)
    fits = min(grid) > 0 and grid[0] < 1 << 31 and max(grid[1:]) <= MOST_BLOCKS
    _expect(fits, f"CUDA error: invalid configuration argument (a grid of {grid})")


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


class Product:
    """Products of half-precision matrices with a result in float32, which PyTorch has on CUDA alone (`out_dtype`)."""

    @staticmethod
    def check(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> None:
        _expect(a.dtype == b.dtype, f"expected scalar types to be the same, not {a.dtype} and {b.dtype}")
        fits = out_dtype == a.dtype or (out_dtype == torch.float32 and a.dtype in HALF)
        _expect(fits, "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")

    @staticmethod
    def compute(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return (a.float() @ b.float()).to(out_dtype)
