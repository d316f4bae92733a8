"""Keys and values in rows of 8 bits: the rows by their definition, and attention to them beside plain arithmetic."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lce.attention import Attention, Tiles, Turn, append_rows, rotate, row_bytes
from lce.attention import widened as of_rows
from tests.attention.truth import random, slots
from tests.kernels.truth import attended

SHAPES = [  # H, G, T, N, D, window
    *((9, 3, 1, 1100, 64, None), (4, 4, 1, 5, 64, None), (16, 2, 1, 529, 128, None), (4, 2, 3, 300, 96, 100)),
    *((5, 1, 1, 271, 80, None), (8, 2, 40, 513, 64, 200), (3, 3, 2, 40, 10, None), (3, 1, 1, 785, 16, 530)),
]
MOST = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def rows_of(x: Tensor, turn: Turn | None = None) -> Tensor:
    """`x [G, N, D]` as it is written to a cache, here behind three other tokens."""
    into = torch.zeros(len(x), x.shape[1] + 4, row_bytes(x.shape[2]), dtype=torch.uint8)
    append_rows(x, x, into, into.clone(), 3, turn)
    return into[:, 3 : 3 + x.shape[1]]


def widened(rows: Tensor, dim: int) -> Tensor:
    """Vectors of rows in float64, by the definition."""
    scale = rows[..., -4:].contiguous().view(torch.float32).double()
    return rows[..., :dim].view(torch.int8).double() * scale


@pytest.mark.parametrize("dim", [10, 64])
def test_rows_are_vectors_to_half_a_step(dtype: torch.dtype, dim: int) -> None:
    x, angle = random(2, 300, dim, seed=1).to(dtype), random(300, dim // 2, seed=2)
    x[0, 7] = 0
    turn = Turn(angle.cos().to(dtype), angle.sin().to(dtype))
    for given, truth in ((None, x), (turn, rotate(x, turn))):
        rows, step = rows_of(x, given), truth.double().abs().amax(-1, keepdim=True) / 127
        assert ((widened(rows, dim) - truth.double()).abs() <= step * 0.501).all()
        assert torch.equal(of_rows(rows, dim, dtype), widened(rows, dim).to(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", ["compiled", "reference"])
def test_attention_to_rows_is_that_to_their_numbers(backend: str, shape: Any, dtype: torch.dtype) -> None:
    n_heads, groups, n_queries, n_keys, dim, window = shape
    q = random(n_heads, n_queries, dim, seed=3, scale=1).to(dtype)
    k, v = (rows_of(random(groups, n_keys, dim, seed=seed, scale=1).to(dtype)) for seed in (4, 5))
    out, lse = Attention.choose(backend).dense(q, k, v, causal=True, window=window)
    truth, total = attended(q, widened(k, dim), widened(v, dim), True, window)
    assert (out - truth).abs().max() < MOST[dtype]
    assert (lse - total).abs().max() < MOST[dtype]


def test_bits_do_not_depend_on_threads_or_on_how_many_queries_there_are() -> None:
    q, (k, v) = random(3, 7, 64, seed=3), (rows_of(random(3, 1300, 64, seed=seed)) for seed in (4, 5))
    found, attend = [], Attention.choose("compiled").dense
    for n in (1, 2):
        torch.set_num_threads(n)
        found.append(attend(q, k, v, causal=False)[0])
        found.append(torch.cat([attend(x, k, v, causal=False)[0] for x in q.split(1, 1)], 1))
    assert all(torch.equal(each, found[0]) for each in found)


def test_sums_of_integers_do_not_overflow() -> None:
    """All numbers have the largest magnitude, and all weights are equal."""
    for sign in (1, -1):
        q, k, v = torch.full((3, 1, 256), 4.0), torch.full((1, 2000, 256), 3.0 * sign), torch.full((1, 2000, 256), 2.0)
        out, lse = Attention.choose("compiled").dense(q, rows_of(k), rows_of(v * sign), causal=False)
        torch.testing.assert_close(out, torch.full_like(q, 2.0 * sign))
        torch.testing.assert_close(lse, torch.full_like(lse, 192.0 * sign) + torch.tensor(2000.0).log())


def test_chosen_chunks_of_rows() -> None:
    q, (k, v) = random(4, 9, 64, seed=3, scale=1), (rows_of(random(2, 192, 64, seed=seed, scale=1)) for seed in (4, 5))
    chosen = torch.stack([torch.randperm(6)[:3].sort().values for _ in range(36)]).view(4, 9, 3)
    turn = Turn(torch.ones(9, 1, 32), torch.zeros(9, 1, 32))
    found = []
    for keys, values in ((k, v), (widened(k, 64).float(), widened(v, 64).float())):
        tiles = Tiles.of_chunks(*(x.contiguous().unflatten(1, (6, 32)) for x in (keys, values)))
        found.append(Attention.choose("compiled").routed(q, slots(turn), chosen, [tiles])[0])
    assert (found[0] - found[1]).abs().max() < 1e-4


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("n_queries", [1, 40])
def test_no_nan_is_hidden_in_rows(which: int, n_queries: int) -> None:
    tensors = [random(2, n, 64, seed=n) for n in (n_queries, 700, 700)]
    tensors[which][:, 0, 3] = torch.nan
    out, _ = Attention.choose("compiled").dense(tensors[0], rows_of(tensors[1]), rows_of(tensors[2]), causal=False)
    assert out[:, 0].isnan().any(-1).all()
