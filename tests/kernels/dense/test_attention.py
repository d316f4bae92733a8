"""The attention kernels beside one softmax in float64: at the borders of their blocks, and with NaN among numbers."""

import math

import pytest
import torch
from torch import Tensor

from lce.kernels.dense.attention import RoutedAttention, dense_attention
from tests.kernels.truth import attended, random

MOST = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 3e-3}
SHAPES = [  # G, heads of a group, T, N, D, window
    *((1, 1, 1, 1, 8, None), (2, 1, 1, 15, 64, None), (1, 8, 1, 17, 64, 16), (1, 9, 1, 257, 80, None)),
    *((2, 2, 2, 255, 96, 256), (1, 4, 2, 513, 112, 255), (1, 1, 9, 271, 64, None), (3, 1, 8, 272, 24, 17)),
    *((1, 16, 2, 769, 16, 1), (1, 33, 1, 767, 64, None), (1, 1, 97, 100, 40, 17), (1, 7, 14, 511, 256, 100)),
    *((1, 64, 3, 528, 64, None), (1, 1, 17, 4113, 64, 4096), (3, 3, 1, 1050, 64, None), (1, 7, 1, 300, 128, 255)),
    *((2, 3, 2, 289, 96, None), (1, 5, 1, 33, 32, None)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_at_the_borders_of_blocks(shape: tuple[int, int, int, int, int, int | None], dtype: torch.dtype) -> None:
    groups, rep, n_queries, n_keys, dim, window = shape
    q = random(groups * rep, n_queries, dim, dtype=dtype)
    k, v = (random(groups, n_keys, dim, dtype=dtype, seed=seed) for seed in (2, 3))
    for causal in (False, True):
        found, within = [], window if causal else None
        for n in (1, 2):
            torch.set_num_threads(n)
            found.append(dense_attention(q, k, v, causal, within))
        (out, lse), other = found
        assert all(map(torch.equal, (out, lse), other))
        expected, expected_lse = attended(q, k, v, causal, within)
        assert (out - expected).abs().max() < MOST[dtype]
        assert (lse - expected_lse).abs().max() < 3e-5


@pytest.mark.parametrize("slope", [-3.0, 0.02, 0.7, 9.0, 2000.0])
@pytest.mark.parametrize("n_queries", [1, 3, 50])
def test_scores_that_rise_or_fall_from_key_to_key(n_queries: int, slope: float, dtype: torch.dtype) -> None:
    """The score that weights are relative to follows the largest one, however fast that grows."""
    n_keys, dim = 600, 64
    if dtype is torch.float16 and slope * n_keys > 60_000:
        pytest.skip("the keys exceed float16")
    q = torch.ones(2, n_queries, dim).to(dtype)
    k = (torch.arange(n_keys)[:, None] * slope / math.sqrt(dim)).expand(2, n_keys, dim).to(dtype).contiguous()
    v = torch.randn(2, n_keys, dim).to(dtype)
    out, lse = dense_attention(q, k, v, causal=False)
    expected, expected_lse = attended(q, k, v, causal=False)
    rounding = 1e-6 * expected_lse.abs().max()  # of scores in float32
    assert (out - expected).abs().max() < max(MOST[dtype], rounding)
    assert (lse - expected_lse).abs().max() < max(3e-5, rounding)


@pytest.mark.parametrize("n_queries", [1, 5, 40])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_no_nan_is_hidden(n_queries: int, which: str, dtype: torch.dtype) -> None:
    """Where a number is none, the result is none: else a model with such weights would write text all the same."""
    for n_keys, dim in ((40, 24), (700, 64)):
        q = torch.randn(4, n_queries, dim).to(dtype)
        k, v = (torch.randn(2, n_keys, dim).to(dtype) for _ in range(2))
        damaged = {"q": q, "k": k, "v": v}[which]
        damaged[0].view(-1, dim)[0, 3] = math.nan
        out, _ = dense_attention(q, k, v, causal=False)
        assert torch.equal(out.isnan().any(-1), attended(q, k, v, causal=False)[0].isnan().any(-1))


@pytest.mark.parametrize("n_queries", [2, 3, 8])
@pytest.mark.parametrize("n_keys", [17, 20, 50, 113])
def test_what_a_call_leaves_in_memory_changes_no_bit(n_queries: int, n_keys: int, dtype: torch.dtype) -> None:
    """Kernels of all contexts share a thread's memory."""
    q, k = torch.randn(2, n_queries, 64).to(dtype), torch.randn(1, n_keys, 64).to(dtype)
    out, lse = dense_attention(q, k, k, causal=True)
    bad = torch.full((1, 256, 64), math.nan).to(dtype)
    dense_attention(q, bad, bad, causal=True)
    again = dense_attention(q, k, k, causal=True)
    assert all(map(torch.equal, (out, lse), again))


@pytest.mark.parametrize(("n_heads", "dim"), [(n, dim) for n in (2, 3, 4, 6, 7, 8) for dim in (32, 96, 128)])
def test_heads_that_choose_alike_see_what_each_of_them_sees_alone(n_heads: int, dim: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(*shape).to(dtype) for shape in ((n_heads, 5, dim), (9, 8, dim), (9, 8, dim)))
    q[0] *= 8  # weights that a larger one makes small
    angle, turn, tile = torch.randn(9, dim // 2), torch.randint(0, 9, (5, 4)), torch.arange(9).view(1, 9)
    chosen = torch.stack([torch.randperm(9)[:4].sort().values for _ in range(5)]).expand(n_heads, -1, -1)
    rotated = angle.cos().to(dtype), angle.sin().to(dtype), turn
    found = []
    for heads in (slice(n_heads), *(slice(i, i + 1) for i in range(n_heads))):
        each = RoutedAttention(q[heads], *rotated, chosen[heads])
        each.add(k, v, tile)
        found.append(each.finish())
    for (together, *alone), most in zip(zip(*found, strict=True), (MOST[dtype], 1e-4), strict=True):
        torch.testing.assert_close(together, torch.cat(alone), atol=most, rtol=0)


@pytest.mark.parametrize(("which", "size"), [(which, size) for which in "qkv" for size in (8, 32)])
def test_no_nan_is_hidden_among_tiles(which: str, size: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(*shape).to(dtype) for shape in ((4, 3, 64), (4, size, 64), (4, size, 64)))
    {"q": q, "k": k, "v": v}[which][..., 0] = math.nan
    cos, sin = torch.ones(3, 32, dtype=dtype), torch.zeros(3, 32, dtype=dtype)
    found = RoutedAttention(q, cos, sin, torch.arange(3)[:, None], torch.arange(2).expand(4, 3, 2))
    found.add(k, v, torch.arange(4).view(2, 2))
    assert found.finish()[0].isnan().any(-1).all()


@pytest.mark.parametrize(("choosers", "in_order"), [(6, False), (2, False), (2, True)])
@pytest.mark.parametrize(("n_queries", "size"), [(1, 16), (30, 7), (33, 8), (70, 16), (5, 24), (400, 33), (260, 300)])
def test_rounds_of_tiles_and_threads_change_no_bit(
    n_queries: int, size: int, choosers: int, in_order: bool, dtype: torch.dtype
) -> None:
    """Nor does it matter where tiles lie. A query that chose a chunk twice sees it twice."""
    q, k, v = (torch.randn(*shape).to(dtype) for shape in ((6, n_queries, 64), (16, size, 64), (16, size, 64)))
    chosen = torch.randint(-1, 8, (choosers, n_queries, 5)).repeat_interleave(6 // choosers, 0)
    if in_order:
        chosen = torch.stack([torch.randperm(9)[:5].sort().values - 1 for _ in range(n_queries)]).expand(6, -1, -1)
    angle = torch.randn(9, 32)
    rotated = angle.cos().to(dtype), angle.sin().to(dtype), torch.randint(0, 9, (n_queries, 5))

    def run(order: Tensor, threads: int, *rounds: Tensor) -> tuple[Tensor, Tensor]:
        found = RoutedAttention(q, *rotated, chosen)
        torch.set_num_threads(threads)
        for tile in rounds:
            found.add(k[order.argsort()], v[order.argsort()], torch.where(tile < 0, tile, order[tile]))
        return found.finish()

    tile = torch.arange(16).view(2, 8)
    out, lse = run(torch.arange(16), 2, tile)
    cut = torch.arange(8) < 3
    again = run(torch.randperm(16), 1, tile.masked_fill(~cut, -1), tile.masked_fill(cut, -1))
    assert all(map(torch.equal, (out, lse), again))
    seen = (chosen >= 0).sum(-1) > 0
    assert torch.equal(lse > -math.inf, seen)
    assert not out[~seen].any()
    for head in range(6):  # a head alone
        found = RoutedAttention(q[head : head + 1], *rotated, chosen[head : head + 1])
        found.add(k, v, tile[head // 3 : head // 3 + 1])
        alone = found.finish()
        assert (alone[0] - out[head : head + 1]).abs().max() < MOST[dtype]
        assert not seen[head].any() or (alone[1] - lse[head])[0, seen[head]].abs().max() < 3e-5
