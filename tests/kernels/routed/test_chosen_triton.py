"""Attention of many queries to their chosen chunks on GPUs, beside one softmax in float64 for each query."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from lce.attention import Turn
from lce.kernels.routed.chosen_triton import chosen_attention
from tests.attention.truth import assert_same, routed
from tests.kernels.truth import MOST, ON_GPU, on_device, random

pytestmark = ON_GPU

CASES = [  # H, G, T, slots, chunks, L, D, a turn for each slot, dtype
    (1, 1, 1, 3, 5, 5, 16, True, torch.float32),
    (4, 4, 9, 2, 4, 16, 64, False, torch.float16),  # heads alone
    (8, 1, 11, 5, 9, 24, 64, True, torch.bfloat16),  # more than a block of rows, and chunks of two blocks of keys
    (4, 2, 3, 20, 40, 8, 80, True, torch.bfloat16),  # lists split into pieces
    (3, 1, 30, 3, 3, 100, 96, True, torch.float16),  # all queries chose all chunks
    (2, 1, 5, 2, 3, 40, 256, False, torch.bfloat16),
    (6, 2, 30, 12, 40, 8, 128, False, torch.bfloat16),  # eight chunks a step
    (2, 1, 40, 30, 50, 4, 64, False, torch.float16),
    (2, 2, 9, 5, 9, 8, 32, False, torch.float32),
]


def given(
    n_heads: int, n_groups: int, n: int, n_slots: int, n_chunks: int, size: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values of chunks, and lists: chunk 1 is no one's, head 0 has gaps, query 0 chose nothing."""
    q = random(n_heads, n, dim, dtype=dtype, seed=1)
    k, v = (random(n_groups, n_chunks, size, dim, dtype=dtype, seed=seed) for seed in (2, 3))
    k[:, 1], v[:, 1] = math.nan, math.nan
    some = torch.rand(n_heads, n, n_chunks, generator=torch.Generator().manual_seed(4)).argsort(-1)
    chosen = some[..., :n_slots].sort(-1)[0]
    chosen[chosen == 1] = -1
    chosen[0, :, n_slots // 2] = -1
    chosen[:, 0] = -1
    return q, k, v, chosen


def tiles_of(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Chunks `[G, M, L, D]` as tiles in another order, with their index."""
    n_groups, n_chunks = k.shape[:2]
    order = torch.randperm(n_groups * n_chunks, generator=torch.Generator().manual_seed(6)).to(k.device)
    return k.flatten(0, 1)[order], v.flatten(0, 1)[order], order.argsort().view(n_groups, n_chunks)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chosen_attention(case: tuple[int, int, int, int, int, int, int, bool, torch.dtype]) -> None:
    n_heads, n_groups, n, n_slots, n_chunks, size, dim, per_slot, dtype = case
    q, k, v, chosen = given(n_heads, n_groups, n, n_slots, n_chunks, size, dim, dtype)
    angle = random(7, q.shape[-1] // 2, dtype=torch.float32, seed=5)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    rows = torch.arange(n * n_slots).view(n, n_slots)[:, : n_slots if per_slot else 1] % 7
    q_, cos_, sin_, rows_, chosen_, k_, v_ = on_device(q, cos, sin, rows, chosen, k, v)
    out, lse = chosen_attention(q_, (cos_, sin_), rows_, chosen_, [tiles_of(k_, v_)])
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    turns = Turn(cos[rows], sin[rows])
    assert_same((out.cpu().float(), lse.cpu()), routed(q, turns, chosen, (k, v)), MOST[dtype])


def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_rounds() -> None:
    """To the bit: a memory budget decides which chunks come together, and where they lie."""
    q, k, v, chosen = given(4, 2, 34, 4, 12, 16, 32, torch.bfloat16)
    cos, rows = random(9, 16, dtype=torch.bfloat16, seed=5), torch.arange(34 * 4).view(34, 4) % 9
    q, k, v, chosen, cos, rows = on_device(q, k, v, chosen, cos, rows)
    out, lse = chosen_attention(q, (cos, cos), rows, chosen, [tiles_of(k, v)])
    tile_k, tile_v, index = tiles_of(k, v)
    column = torch.arange(12, device=k.device)
    rounds = [(tile_k, tile_v, index.masked_fill((column >= 7) == late, -1)) for late in (True, False)]
    again = chosen_attention(q, (cos, cos), rows, chosen, rounds)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])
    others = chosen.clone()
    others[:, ::2] = others[:, ::2].flip(1)
    changed, _ = chosen_attention(q, (cos, cos), rows, others, [tiles_of(k, v)])
    assert torch.equal(out[:, 1::2], changed[:, 1::2])
