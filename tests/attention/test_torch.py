"""The CUDA ways of PyTorch's kernels, on a pretended GPU: what is passed, and where results go."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lce.attention import Attended, Attention, Tiles, Turn
from lce.attention import torch as backend
from lce.attention.reference import Reference
from tests.attention.test_attention import CHOICES, choices
from tests.attention.truth import HEADS, assert_same, dense, random, routed, routed_vectors, slots, turns_of, vectors
from tests.depth import pairs
from tests.pretended import Gpus, flash

TORCH = Attention.choose("torch")
SEEN = [(False, None), (True, None), (True, 1), (True, 7), (True, 69), (True, 100)]


Calls = list[dict[str, Any]]


@pytest.fixture
def calls(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What PyTorch's flash attention is called with from now on."""
    found, check = Calls(), flash.check

    def noted(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> None:
        found.append({"k": k, "v": v, "max_q": args[2], **options})
        check(q, k, v, *args, **options)

    monkeypatch.setattr(flash, "check", noted)
    return found


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("n_queries", [1, 5, 70])
def test_dense_reads_the_keys_where_they_lie(calls: Calls, heads: tuple[int, int], n_queries: int) -> None:
    q, k, v = (x.half() for x in vectors(*heads, n_queries, 90))
    gpu_k, gpu_v, at = k.cuda(), v.cuda(), slice(10, 80)
    gpu_q = q.cuda().transpose(0, 1).contiguous().transpose(0, 1)
    for causal, window in SEEN:
        part = TORCH.dense(gpu_q, gpu_k[:, at], gpu_v[:, at], causal, window)
        assert_same(part, dense(q, k[:, at], v[:, at], causal, window), 4e-3)
    for call in calls:
        assert all(0 <= call[name].data_ptr() - x.data_ptr() < x.nbytes for name, x in (("k", gpu_k), ("v", gpu_v)))
        bounds = [call.get(f"window_size_{side}") for side in ("left", "right")]
        assert n_queries > 1 or set(bounds) <= {None, -1}, "heads share keys only without bounds"


@pytest.mark.parametrize(
    ("most_blocks", "n_queries", "n_chunks", "kind", "heads"),
    pairs([65_535, 5], [pytest.param(3, 40), pytest.param(37, 6)], CHOICES, [(8, 2), (3, 3)]),
    ids=str,
)
@pytest.mark.covering
def test_routed_never_waits(
    calls: Calls,
    gpus: Gpus,
    monkeypatch: pytest.MonkeyPatch,
    most_blocks: int,
    n_queries: int,
    n_chunks: int,
    kind: str,
    heads: tuple[int, int],
) -> None:
    """More tiles than rows, and fewer."""
    q, k, v = (x.half() for x in routed_vectors(*heads, n_queries, n_chunks, 5))
    turns, chosen = turns_of(n_queries, 3, torch.float16), choices(kind, heads[0], n_queries, 3, n_chunks)
    unchosen = torch.ones(heads[1], n_chunks, dtype=torch.bool)
    for head, of_head in enumerate(chosen):
        unchosen[head * heads[1] // heads[0], of_head[of_head >= 0]] = False
    truth = routed(q, turns, chosen, (k, v))
    k[unchosen] = v[unchosen] = torch.nan
    for each in (flash, backend):
        monkeypatch.setattr(each, "MOST_BLOCKS", most_blocks)
    gpu_k, turns_there = k.cuda(), Turn(turns.cos.cuda(), turns.sin.cuda())
    args = (q.cuda(), slots(turns_there), chosen.cuda(), [Tiles.of_chunks(gpu_k, v.cuda())])
    with gpus.counting() as counts:
        part = TORCH.routed(*args)
    assert (counts.syncs, counts.uploads) == (0, 0), counts.at
    assert_same(part, truth, 1e-2)
    n_tiles = min(heads[1] * n_chunks, chosen.numel())
    assert len(calls) == -(-n_tiles // most_blocks)
    assert all(call["max_q"] <= n_queries * heads[0] // heads[1] for call in calls)
    assert all(call["k"].data_ptr() == gpu_k.data_ptr() for call in calls)


@pytest.mark.usefixtures("gpus")
def test_routed_in_rounds_keeps_what_other_rounds_wrote() -> None:
    q, k, v = (x.half() for x in routed_vectors(4, 2, 9, 6, 5))
    turns, chosen = turns_of(9, 1, torch.float16), choices("some none", 4, 9, 3, 6)
    whole, turns_there = Tiles.of_chunks(k.cuda(), v.cuda()), Turn(turns.cos.cuda(), turns.sin.cuda())
    even = torch.arange(6, device="cuda") % 2
    rounds = [Tiles(whole.k, whole.v, whole.index.masked_fill(even == rest, -1)) for rest in range(2)]
    part = TORCH.routed(q.cuda(), slots(turns_there), chosen.cuda(), rounds)
    assert_same(part, routed(q, turns, chosen, (k, v)), 8e-3)


def test_head_dimensions_that_the_kernel_has_not(calls: Calls) -> None:
    q, k, v = (x.half() for x in vectors(4, 2, 5, 20, 20))
    part = TORCH.dense(q.cuda(), k.cuda(), v.cuda(), causal=True)
    assert_same(part, dense(q, k, v, causal=True), 4e-3)
    assert not calls


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("n_queries", [1, 33, 70])
def test_float32_holds_a_slices_scores(heads: tuple[int, int], n_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, sizes, whole = heads[0] * 70 * 4, [], Reference.softmax

    def watched(self: Reference, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Attended:
        sizes.append(q[..., 0].numel() * k.shape[1])
        return whole(self, q, k, v, **options)

    monkeypatch.setattr(Reference, "softmax", watched)
    monkeypatch.setattr(backend, "SCORES_AT_ONCE", at_once)
    q, k, v = vectors(*heads, n_queries, 70)
    for causal, window in SEEN:
        assert_same(backend.softmax_of_slices(q, k, v, causal, window), dense(q, k, v, causal, window))
    assert max(sizes) <= at_once


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("n_queries", "window"), [(1, None), (1, 3000), (3, None), (3, 3000), (200, 700)])
def test_keys_long_enough_to_be_split(dtype: torch.dtype, dim: int, n_queries: int, window: int | None) -> None:
    """Against float32 arithmetic on the CPU."""
    q, k, v = random(8, n_queries, dim, seed=1), random(2, 20_000, dim, seed=2, scale=1), random(2, 20_000, dim, seed=3)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    truth = Attention.choose("reference").dense(q.float(), k.float(), v.float(), True, window)
    part = TORCH.dense(q.cuda(), k.cuda(), v.cuda(), True, window)
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert_same(part, (truth[0].double(), truth[1].double()), tolerance)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_queries", [1, 300])
def test_more_tiles_than_a_grid_has(dtype: torch.dtype, n_queries: int) -> None:
    """70,000 (head, chunk) pairs: few of them chosen in decode, most of them in prefill."""
    heads, n_chunks, dim = (16, 4), 17_500, 64
    keys = [random(heads[1], n_chunks, 4, dim, seed=seed).to(dtype).cuda() for seed in (1, 2)]
    q = random(heads[0], n_queries, dim, seed=3).to(dtype)
    chosen = torch.randint(n_chunks, (heads[0], n_queries, 16), generator=torch.Generator().manual_seed(4))
    chosen = chosen.sort(-1).values
    chosen[..., 1:].masked_fill_(chosen[..., 1:] == chosen[..., :-1], -1)  # no chunk twice
    as_it_is = Turn(*(make(n_queries, 1, dim // 2, dtype=dtype, device="cuda") for make in (torch.ones, torch.zeros)))
    tiles = [Tiles.of_chunks(*keys)]
    part = TORCH.routed(q.cuda(), slots(as_it_is), chosen.cuda(), tiles)
    truth = Attention.choose("reference").routed(q.cuda(), slots(as_it_is), chosen.cuda(), tiles)
    assert_same(part, (truth[0].cpu().double(), truth[1].cpu().double()), 0.06 if dtype is torch.bfloat16 else 8e-3)
