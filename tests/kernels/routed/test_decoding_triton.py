"""Decode over runs, on a GPU or in Triton's interpreter, beside one softmax in float64."""

import math

import pytest
import torch

pytest.importorskip("triton")
from lce.kernels.routed.decoding_triton import attend_runs
from tests.attention.truth import turned
from tests.kernels.truth import DEVICE, MOST, ON_GPU, on_device, random

pytestmark = ON_GPU
CASES = [  # H, G, C, S, D, most, dtype
    (2, 2, 2, 3, 64, 40, torch.float32),  # one row a program
    (4, 2, 4, 2, 80, 100, torch.bfloat16),
    (4, 2, 1, 3, 32, 40, torch.float32),  # the heads of a KV head together
    (6, 2, 2, 2, 128, 130, torch.bfloat16),
    (20, 1, 1, 1, 16, 40, torch.float16),
    (2, 1, 2, 2, 256, 9, torch.float16),
    (2, 2, 1, 2, 96, 300, torch.float32),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs(case: tuple[int, int, int, int, int, int, torch.dtype]) -> None:
    """Keys lie in a slice of a buffer that is NaN behind the runs; the first run is empty and begins anywhere."""
    n_heads, n_kv_heads, n_choosers, n_runs, dim, most, dtype = case
    numbers, apart = torch.Generator().manual_seed(6), most + 3
    q = random(n_heads, dim, dtype=dtype, seed=1)
    k, v = (random(n_kv_heads, n_runs * apart, dim, dtype=dtype, seed=seed) for seed in (2, 3))
    count = torch.randint(1, most + 1, (n_choosers, n_runs), generator=numbers)
    count[0, -1] = most
    first = (torch.arange(n_runs) * apart).expand(n_choosers, n_runs).clone()
    last = (first + count.amax(0)).amax(0)
    for run in range(n_runs):  # what no chooser sees of a run
        k[:, int(last[run]) : (run + 1) * apart] = v[:, int(last[run]) : (run + 1) * apart] = math.nan
    if n_runs > 1:
        first[0, 0], count[0, 0] = 1 << 40, 0
    angle, turn = random(3, dim // 2, dtype=torch.float32, seed=4), torch.arange(n_runs).flip(0) % 3
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    held_k, held_v = (torch.full((n_kv_heads + 1, k.shape[1] + 8, dim), math.nan, dtype=dtype) for _ in range(2))
    held_k[1:, 4:-4], held_v[1:, 4:-4] = k, v
    keys, values = held_k.to(DEVICE)[1:, 4:-4], held_v.to(DEVICE)[1:, 4:-4]
    found = attend_runs(*on_device(q), keys, values, *on_device(first, count, turn, cos, sin), most)
    for head in range(n_heads):
        chooser, kv_head, scores, seen = head * n_choosers // n_heads, head * n_kv_heads // n_heads, [], []
        for run in range(n_runs):
            rows = slice(int(first[chooser, run]), int(first[chooser, run] + count[chooser, run]))
            own = turned(q[head].float(), cos[turn[run]].float(), sin[turn[run]].float())
            scores.append(k[kv_head, rows].double() @ own.double() / math.sqrt(dim))
            seen.append(v[kv_head, rows].double())
        logits = torch.cat(scores)
        assert (found[0][head].cpu() - logits.softmax(0) @ torch.cat(seen)).abs().max() < MOST[dtype]
        assert abs(found[1][head].cpu() - logits.logsumexp(0)) < MOST[dtype]


@pytest.mark.parametrize("n_choosers", [1, 4])
def test_a_head_that_sees_nothing(n_choosers: int) -> None:
    q, k = random(4, 32, dtype=torch.float32, seed=1), torch.full((2, 10, 32), math.nan)
    none, cos = torch.zeros(n_choosers, 2, dtype=torch.int64), torch.ones(1, 16)
    turn = torch.zeros(2, dtype=torch.int64)
    out, lse = attend_runs(*on_device(q, k, k, none, none, turn, cos, cos), 8)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("n_choosers", [1, 4])
def test_no_nan_is_hidden(n_choosers: int) -> None:
    q, k = random(4, 32, dtype=torch.float32, seed=1), random(2, 90, 32, dtype=torch.float32, seed=2)
    k[1, 70, 3] = math.nan
    first, turn = torch.zeros(n_choosers, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    cos, sin = torch.ones(1, 16), torch.zeros(1, 16)
    out, lse = attend_runs(*on_device(q, k, k.nan_to_num(), first, first + 90, turn, cos, sin), 90)
    assert out.isnan().all(-1).tolist() == [False, False, True, True]
    assert lse.isnan().tolist() == [False, False, True, True]
