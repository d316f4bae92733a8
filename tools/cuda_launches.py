"""Calls of the Triton kernels' wrappers, one for each kind of launch that they make: what `compile_cuda` compiles.

Tensors hold nothing; only their shapes, strides and addresses count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

HEAD_SIZES = (16, 64, 80, 96, 128, 256)  # the first is that of tests, and as small as blocks get
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Call:
    """A call that launches one kernel or several; `spills` says whether they may keep registers in memory.

    Those of a decode step in half precision may not.
    """

    name: str
    run: Callable[[], object]
    spills: bool = True


def _decode(dtype: torch.dtype, dim: int, n_heads: int, n_kv_heads: int, n_choosers: int, most: int = 256) -> None:
    from lce.kernels.cuda.decoding import attend_runs

    k = torch.empty(n_kv_heads, 4096, dim, dtype=dtype)
    first, turn = torch.zeros(n_choosers, 16, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)
    cos = torch.empty(16, dim // 2, dtype=dtype)
    attend_runs(torch.empty(n_heads, dim, dtype=dtype), k, k, first, first, turn, cos, cos, most)


def _dense(
    dtype: torch.dtype, dim: int, rep: int, n_queries: int, n_keys: int, window: int | None = None, turned: bool = True,
    causal: bool = True,
) -> None:  # fmt: skip
    from lce.kernels.cuda.attention import attend

    k, cos = torch.empty(4, n_keys, dim, dtype=dtype), torch.empty(n_queries, dim // 2, dtype=dtype)
    turn = (cos, cos) if turned else (None, None)
    attend(torch.empty(4 * rep, n_queries, dim, dtype=dtype), k, k, causal, window, *turn)


def _tiles(dtype: torch.dtype, dim: int, n_queries: int, size: int) -> None:
    from lce.kernels.cuda.attention import attend_tiles

    n_slots, q = 4, torch.empty(4, n_queries, dim, dtype=dtype)
    k, cos = torch.empty(8, size, dim, dtype=dtype), torch.empty(n_queries, n_slots, dim // 2, dtype=dtype)
    n = 4 * n_queries * n_slots
    attend_tiles(q, cos, cos, torch.zeros(n, dtype=torch.int64), k, k, torch.empty(n, dim, dtype=dtype), torch.empty(n))


def _combine(dtype: torch.dtype, n_parts: int) -> None:
    from lce.kernels.cuda.merging import combined

    combined([(torch.empty(4, 32, 128, dtype=dtype), torch.empty(4, 32)) for _ in range(n_parts)])


def _merge_slots(dtype: torch.dtype, n_slots: int) -> None:
    from lce.kernels.cuda.merging import merge_slots

    merge_slots(torch.empty(4, 32, n_slots, 128, dtype=dtype), torch.empty(4, 32, n_slots))


def _attention() -> Iterator[Call]:
    for (name, dtype), dim in ((x, d) for x in DTYPES.items() for d in HEAD_SIZES):
        at, spills = f"{name} {dim}", dtype is torch.float32
        yield Call(f"decode one row {at}", partial(_decode, dtype, dim, 8, 8, 8), spills)
        yield Call(f"decode 4 rows {at}", partial(_decode, dtype, dim, 32, 8, 8), spills)
        yield Call(f"dense one query {at}", partial(_dense, dtype, dim, 1, 1, 8192), spills)
        yield Call(f"dense block {at}", partial(_dense, dtype, dim, 1, 1024, 8192))
        yield Call(f"dense block window {at}", partial(_dense, dtype, dim, 4, 1024, 8192, 4096))
        yield Call(f"dense few {at}", partial(_dense, dtype, dim, 1, 40, 8192, None, False))
        yield Call(f"dense unmasked {at}", partial(_dense, dtype, dim, 1, 256, 256, None, False, False))
        yield Call(f"tiles block {at}", partial(_tiles, dtype, dim, 256, 256))
        yield Call(f"tiles ragged {at}", partial(_tiles, dtype, dim, 256, 100))
        yield Call(f"tiles one query {at}", partial(_tiles, dtype, dim, 1, 256), spills)
    for name, dtype in DTYPES.items():
        spills = dtype is torch.float32
        yield Call(f"decode 64 rows {name} 128", partial(_decode, dtype, 128, 64, 1, 1), spills)
        yield Call(f"decode 7 rows {name} 128", partial(_decode, dtype, 128, 28, 4, 1, 4096), spills)
        yield Call(f"merge slots {name}", partial(_merge_slots, dtype, 15), False)
        yield Call(f"merge many slots {name}", partial(_merge_slots, dtype, 100), False)
        for n_parts in (2, 3, 4):
            yield Call(f"combine {n_parts} {name}", partial(_combine, dtype, n_parts), False)


CALLS: tuple[Call, ...] = (*_attention(),)
