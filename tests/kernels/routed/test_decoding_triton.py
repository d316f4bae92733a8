"""Decode over runs, on a GPU or in Triton's interpreter, beside one softmax in float64."""

import itertools
import math

import pytest
import torch

pytest.importorskip("triton")
from lce.kernels.routed import decoding_triton
from lce.kernels.routed.decoding_triton import attend_runs
from tests.attention.truth import turned
from tests.kernels.truth import MOST, ON_GPU, lane_rows, on_device, random

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
LANES = [None, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 5, 8, 33, 64))]


@pytest.mark.parametrize("n_lanes", LANES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("enough", [decoding_triton.ENOUGH, 2])
def test_runs(
    enough: int,
    case: tuple[int, int, int, int, int, int, torch.dtype],
    n_lanes: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys lie in a slice of a buffer that is NaN behind the runs; the first run is empty and begins anywhere."""
    monkeypatch.setattr(decoding_triton, "ENOUGH", enough)  # with few programs, runs share one
    n_heads, n_kv_heads, n_choosers, n_runs, dim, most, dtype = case
    numbers, apart, n = torch.Generator().manual_seed(6), most + 3, n_lanes or 1
    q = random(n_heads, n, dim, dtype=dtype, seed=1)
    k, v = (random(n, n_kv_heads, n_runs * apart, dim, dtype=dtype, seed=seed) for seed in (2, 3))
    count = torch.randint(1, most + 1, (n_choosers, n, n_runs), generator=numbers)
    count[0, :, -1] = most
    first = (torch.arange(n_runs) * apart).expand(n_choosers, n, n_runs).clone()
    last = (first + count).amax(0)
    for lane, run in itertools.product(range(n), range(n_runs)):  # what no chooser sees of a run
        unseen = slice(int(last[lane, run]), (run + 1) * apart)
        k[lane, :, unseen] = v[lane, :, unseen] = math.nan
    if n_runs > 1:
        first[0, :, 0], count[0, :, 0] = 1 << 40, 0
    angle, turn = random(n, 3, dim // 2, dtype=torch.float32, seed=4), torch.arange(n_runs).flip(0) % 3
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    sizes = [(n_kv_heads + 1, k.shape[2] + 8 + b, dim) for b in range(n) for _ in "kv"]
    held = [torch.full(size, math.nan, dtype=dtype) for size in sizes]
    for x, own in zip(held, [x for pair in zip(k, v, strict=True) for x in pair], strict=True):
        x[1:, 4 : 4 + k.shape[2]] = own
    held = [x[1:, 4 : 4 + k.shape[2]] for x in on_device(*held)]
    keys, values = (held[0], held[1]) if n_lanes is None else (lane_rows(held[::2]), lane_rows(held[1::2]))
    found = attend_runs(*on_device(q), keys, values, *on_device(first, count, turn, cos, sin), most)
    for head, lane in itertools.product(range(n_heads), range(n)):
        chooser, kv_head, scores, seen = head * n_choosers // n_heads, head * n_kv_heads // n_heads, [], []
        for run in range(n_runs):
            start = int(first[chooser, lane, run])
            rows = slice(start, start + int(count[chooser, lane, run]))
            own = turned(q[head, lane].float(), cos[lane, turn[run]].float(), sin[lane, turn[run]].float())
            scores.append(k[lane, kv_head, rows].double() @ own.double() / math.sqrt(dim))
            seen.append(v[lane, kv_head, rows].double())
        logits = torch.cat(scores)
        assert (found[0][head, lane].cpu() - logits.softmax(0) @ torch.cat(seen)).abs().max() < MOST[dtype]
        assert abs(found[1][head, lane].cpu() - logits.logsumexp(0)) < MOST[dtype]


@pytest.mark.parametrize("n_choosers", [1, 4])
def test_a_head_that_sees_nothing(n_choosers: int) -> None:
    q, k = random(4, 1, 32, dtype=torch.float32, seed=1), torch.full((2, 10, 32), math.nan)
    none, cos = torch.zeros(n_choosers, 1, 2, dtype=torch.int64), torch.ones(1, 1, 16)
    turn = torch.zeros(2, dtype=torch.int64)
    out, lse = attend_runs(*on_device(q, k, k, none, none, turn, cos, cos), 8)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("n_choosers", [1, 4])
def test_no_nan_is_hidden(n_choosers: int) -> None:
    q, k = random(4, 1, 32, dtype=torch.float32, seed=1), random(2, 90, 32, dtype=torch.float32, seed=2)
    k[1, 70, 3] = math.nan
    first, turn = torch.zeros(n_choosers, 1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    cos, sin = torch.ones(1, 1, 16), torch.zeros(1, 1, 16)
    out, lse = attend_runs(*on_device(q, k, k.nan_to_num(), first, first + 90, turn, cos, sin), 90)
    assert out.isnan().all(-1)[:, 0].tolist() == [False, False, True, True]
    assert lse.isnan()[:, 0].tolist() == [False, False, True, True]
