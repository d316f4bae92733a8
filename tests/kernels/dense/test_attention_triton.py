"""Attention kernels for GPUs, on one or in Triton's interpreter, beside one softmax in float64."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from lce.kernels.dense.attention_triton import attend, attend_tiles, sorted_blocks
from lce.kernels.rows.rows_triton import takes
from tests.attention.truth import turned
from tests.kernels.truth import DEVICE, MOST, ON_GPU, attended, on_device, random, rotated

pytestmark = ON_GPU


def buffer_slice(x: Tensor, before: int = 3, after: int = 5) -> Tensor:
    """`x [G, N, D]` as a slice of a buffer that is NaN elsewhere, on the device."""
    whole = torch.full((len(x), before + x.shape[1] + after, x.shape[2]), torch.nan, dtype=x.dtype)
    whole[:, before : before + x.shape[1]] = x
    return whole.to(DEVICE)[:, before : before + x.shape[1]]


CASES = [  # H, G, T, N, D, causal, window, dtype
    (2, 2, 1, 1, 64, True, None, torch.float32),
    (4, 2, 3, 70, 80, True, None, torch.float32),
    (6, 2, 70, 130, 16, True, 33, torch.float32),
    (2, 1, 5, 3, 96, False, None, torch.bfloat16),
    (3, 1, 40, 200, 128, True, 64, torch.bfloat16),
    (2, 1, 150, 150, 64, True, None, torch.float16),  # blocks of 128 rows
    (2, 2, 1, 1100, 64, True, None, torch.float16),  # split keys
    (4, 1, 2, 1030, 32, True, 700, torch.bfloat16),  # split keys and a window that skips some
    (1, 1, 20, 90, 256, True, None, torch.bfloat16),
    (4, 4, 20, 64, 6, False, 3, torch.float32),  # the window of a part that is not causal says nothing
]


@pytest.mark.parametrize(
    ("case", "turn"),
    [
        pytest.param(case, turn, marks=[pytest.mark.slow] * ((i + turn) % 2))
        for i, case in enumerate(CASES)
        for turn in (False, True)  # every day each case in one of them
    ],
    ids=str,
)
def test_attend(case: tuple[int, int, int, int, int, bool, int | None, torch.dtype], turn: bool) -> None:
    n_heads, n_groups, n_queries, n_keys, dim, causal, window, dtype = case
    q = random(n_queries, n_heads, dim, dtype=dtype, seed=1).transpose(0, 1)  # as projections are
    k, v = (random(n_groups, n_keys, dim, dtype=dtype, seed=seed) for seed in (2, 3))
    angle = random(n_queries, dim // 2, dtype=torch.float32, seed=4)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    truth = attended(rotated(q, cos, sin).to(dtype) if turn else q, k, v, causal, window if causal else None)
    turns = on_device(cos, sin) if turn else ()
    out, lse = attend(q.to(DEVICE), buffer_slice(k), buffer_slice(v), causal, window, *turns)
    assert out.dtype == dtype
    assert (out.cpu() - truth[0]).abs().max() < MOST[dtype]
    assert (lse.cpu() - truth[1]).abs().max() < MOST[dtype]


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_no_nan_is_hidden(which: str) -> None:
    vectors = {name: random(1, 40, 32, dtype=torch.float32, seed=1) for name in "qkv"}
    vectors[which][0, 2, 3] = math.nan
    out, _ = attend(*on_device(*vectors.values()), causal=False)
    seen = [2] if which == "q" else list(range(40))
    assert out[0].isnan().any(-1).nonzero().flatten().tolist() == seen


TILES = [  # H, T, slots, L, D, a turn for each slot, dtype
    (2, 1, 3, 5, 16, True, torch.float32),  # every row alone
    (4, 2, 3, 64, 80, False, torch.bfloat16),
    (4, 9, 2, 5, 16, False, torch.float32),
    (2, 70, 2, 64, 64, True, torch.bfloat16),  # more than a block of rows of one tile
    (2, 20, 3, 70, 96, True, torch.float16),
]


@pytest.mark.parametrize("case", TILES, ids=str)
def test_attend_tiles(case: tuple[int, int, int, int, int, bool, torch.dtype]) -> None:
    """Some rows have no tile: what `out` holds for them stays. Tiles that nobody chose are not read."""
    n_heads, n_queries, n_slots, size, dim, per_slot, dtype = case
    n_tiles = 8
    q = random(n_heads, n_queries, dim, dtype=dtype, seed=1)
    k, v = (random(n_tiles, size, dim, dtype=dtype, seed=seed) for seed in (2, 3))
    k[3], v[3] = math.nan, math.nan
    angle = random(n_queries, n_slots if per_slot else 1, dim // 2, dtype=torch.float32, seed=4)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    tile = torch.randint(-1, 3, (n_heads, n_queries, n_slots), generator=torch.Generator().manual_seed(5))
    tile[:, :, 0] = n_tiles - 1 if n_queries > 4 else tile[:, :, 0]
    out, lse = torch.full((tile.numel(), dim), 7, dtype=dtype), torch.full((tile.numel(),), 7.0)
    q_, cos_, sin_, tile_, k_, v_, out_, lse_ = on_device(q, cos, sin, tile.view(-1), k, v, out, lse)
    attend_tiles(q_, cos_, sin_, tile_, k_, v_, out_, lse_)
    for a, which in enumerate(tile.view(-1).tolist()):
        if which < 0:
            assert (out_[a] == 7).all()
            assert lse_[a] == 7
            continue
        slot, query, head = a % n_slots, a // n_slots % n_queries, a // n_slots // n_queries
        turn = slot if per_slot else 0
        own = turned(q[head, query], cos[query, turn], sin[query, turn])
        scores = k[which].double() @ own.double() / math.sqrt(dim)
        assert (out_[a].cpu() - scores.softmax(0) @ v[which].double()).abs().max() < MOST[dtype]
        assert abs(lse_[a].cpu() - scores.logsumexp(0)) < MOST[dtype]


def test_a_row_does_not_depend_on_the_rows_and_tiles_beside_it() -> None:
    """To the bit: a memory budget decides which tiles come together, and where they lie."""
    dim, n_queries = 32, 20
    q, k = random(1, n_queries, dim, dtype=torch.bfloat16, seed=1), random(6, 16, dim, dtype=torch.bfloat16, seed=2)
    cos, sin = torch.ones(n_queries, 1, dim // 2).bfloat16(), torch.zeros(n_queries, 1, dim // 2).bfloat16()
    tile = torch.arange(n_queries * 2) % 6
    q, cos, sin, k, tile = on_device(q, cos, sin, k, tile)
    whole, parts = torch.zeros(2, 40, dim).bfloat16().to(DEVICE), torch.zeros(2, 40).to(DEVICE)
    attend_tiles(q, cos, sin, tile, k, k, whole[0], parts[0])
    for some in (0, 1):  # the even tiles, then the odd ones
        own = torch.where(tile % 2 == some, tile // 2, -1)
        attend_tiles(q, cos, sin, own, k[some::2], k[some::2], whole[1], parts[1])
    assert torch.equal(whole[0], whole[1])
    assert torch.equal(parts[0], parts[1])


def test_rows_are_sorted_into_blocks_of_one_tile() -> None:
    order, starts, block_tile = (x.tolist() for x in sorted_blocks(torch.tensor([1, 0, 1, 1]), 2, 2))
    assert order == [1, 0, 2, 3]
    assert starts == [[0, 1, 4], [0, 1, 3]]
    assert block_tile[:3] == [0, 1, 1]
    assert set(block_tile[3:]) <= {2}
    order, starts, block_tile = (x.tolist() for x in sorted_blocks(torch.tensor([-1, 4, -1]), 5, 16))
    assert order == [0, 2, 1]
    assert starts[0] == [2, 2, 2, 2, 2, 3]
    assert block_tile[0] == 4


def test_what_the_kernels_take() -> None:
    x = torch.zeros(2, 3, 64)
    assert takes(x, x)
    assert not takes(x, x.half())
    assert not takes(x.double())
    assert not takes(x.mT)
    assert not takes(torch.zeros(2, 3, 63))
    assert not takes(torch.zeros(2, 3, 512))
