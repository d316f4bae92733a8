"""The kernels' one door against attention written out in float64, one query of one head at a time."""

import importlib.util
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lce.attention import Attention, Order, Tiles, Turn, combine, compiled, merge, rotate
from tests.attention.truth import HEADS, assert_same, dense, random, routed, routed_vectors, slots, turns_of, vectors
from tests.depth import pairs

Two = tuple[int, int]
BACKENDS = ("compiled", "torch", "reference")
AS_IT_IS = Turn(torch.ones(1, 1, 8), torch.zeros(1, 1, 8))
# Of outputs up to 6, so about one unit in the last place.
FLOAT, HALF = torch.float32, {torch.bfloat16: 3e-2, torch.float16: 4e-3}
ON_CUDA = ("torch", "reference", "triton", *(["flash"] if importlib.util.find_spec("flash_attn") else []))
HALF_MARKS = {torch.float16: pytest.mark.slow}
EVERYWHERE = [
    *(pytest.param(x, "cpu", dtype, marks=HALF_MARKS.get(dtype, ())) for x in BACKENDS for dtype in (FLOAT, *HALF)),
    *(pytest.param(name, "cuda", dtype, marks=pytest.mark.cuda) for name in ON_CUDA for dtype in (FLOAT, *HALF)),
]


SIZES = [(1, 1), (1, 70), (5, 70), (33, 70), (70, 70)]
SEEN: list[tuple[bool, int | None]] = [(False, None), (True, None), (True, 1), (True, 7), (True, 69)]


@pytest.mark.parametrize(
    ("name", "device", "dtype", "heads", "sizes", "seen"), pairs(EVERYWHERE, HEADS.values(), SIZES, SEEN), ids=str
)
@pytest.mark.covering
def test_dense(
    name: str, device: str, dtype: torch.dtype, heads: Two, sizes: Two, seen: tuple[bool, int | None]
) -> None:
    q, k, v = (x.to(dtype) for x in vectors(*heads, *sizes, 16 if device == "cpu" else 64))
    part = Attention.choose(name).dense(*(x.to(device) for x in (q, k, v)), *seen)
    assert part[0].dtype == dtype
    assert_same(part, dense(q, k, v, *seen), HALF.get(dtype, 3e-5 if device == "cpu" else 1e-4))


@pytest.mark.parametrize("seen", SEEN, ids=str)
def test_read_tokens_with_amx(seen: tuple[bool, int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled backend takes PyTorch's kernel for them, for rotated queries and keys that no query sees too."""
    monkeypatch.setattr(compiled, "has_tiles", lambda dtype: dtype is torch.bfloat16)
    q, k, v = (x.bfloat16() for x in vectors(6, 2, 40, 64, 16))
    turn = Turn(*(x.flatten(0, 1) for x in turns_of(40, 1, torch.bfloat16)))
    part = Attention.choose("compiled").dense(q, k, v, *seen, turn, Order(unseen=3))
    truth = dense(rotate(q, turn), k[:, 3:], v[:, 3:], *seen)
    assert_same(part, truth, HALF[torch.bfloat16])


@pytest.mark.parametrize("name", BACKENDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_dense_of_any_shape(name: str, data: st.DataObject) -> None:
    rep, n_kv_heads = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    n_keys, causal = data.draw(st.integers(1, 25)), data.draw(st.booleans())
    n_queries = data.draw(st.integers(1, n_keys if causal else 30))
    window = data.draw(st.none() | st.integers(1, 50)) if causal else None
    q, k, v = vectors(rep * n_kv_heads, n_kv_heads, n_queries, n_keys, data.draw(st.sampled_from([2, 6, 8, 20, 80])))
    assert_same(Attention.choose(name).dense(q, k, v, causal, window), dense(q, k, v, causal, window))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
def test_nothing_to_see_and_nobody_to_see_it(name: str, causal: bool) -> None:
    attention = Attention.choose(name)
    q, k, v = vectors(4, 2, 3, 0)
    nothing = torch.zeros(4, 3, 16).double(), torch.full((4, 3), -math.inf).double()
    assert_same(attention.dense(q, k, v, causal), nothing)
    q, k, v = vectors(4, 2, 0, 5)
    out, lse = attention.dense(q, k, v, causal)
    assert (out.shape, lse.shape) == ((4, 0, 16), (4, 0))


@pytest.mark.parametrize("name", BACKENDS)
def test_views_of_a_larger_cache(name: str) -> None:
    """Keys come as slices of buffers, queries as transposed projections."""
    q, k, v = random(5, 4, 16, seed=1).transpose(0, 1), random(2, 90, 16, seed=2), random(2, 90, 16, seed=3)
    keys = (k[:, 7:50], v[:, 7:50])
    assert_same(Attention.choose(name).dense(q, *keys, causal=True), dense(q, *keys, causal=True))


@pytest.mark.parametrize("name", BACKENDS)
def test_large_scores_do_not_overflow(name: str) -> None:
    q, k, v = vectors(4, 2, 6, 40)
    part = Attention.choose(name).dense(q * 200, k * 2, v, causal=True)
    truth = dense(q * 200, k * 2, v, causal=True)
    assert truth[1].abs().max() > 1000
    torch.testing.assert_close(part[0].double(), truth[0], rtol=0, atol=1e-3)
    torch.testing.assert_close(part[1].double(), truth[1], rtol=1e-6, atol=0)


# Choices, [H, T, K] each: few queries a chunk, and as unfair as can be.
def choices(kind: str, n_heads: int, n_queries: int, n_choices: int, n_chunks: int) -> Tensor:
    shape = (n_heads, n_queries, n_choices)
    order = torch.rand(n_heads, n_queries, n_chunks, generator=torch.Generator().manual_seed(4)).argsort(-1)
    chosen = order[..., :n_choices].clone()
    if kind == "some none":
        chosen[torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.4] = -1
        chosen[1, 2] = -1
        chosen[0] = -1
    elif kind == "all none":
        chosen[:] = -1
    elif kind == "all the first":
        chosen[:] = -1
        chosen[..., 0] = 0
    elif kind == "nearly all the last":
        chosen[:] = -1
        chosen[..., -1] = n_chunks - 1
        chosen[0, 0, 0] = 0
    return chosen


CHOICES = ("all different", "some none", "all none", "all the first", "nearly all the last")


@pytest.mark.parametrize(
    ("name", "device", "dtype", "heads", "kind", "per_slot", "n_queries"),
    pairs(EVERYWHERE, HEADS.values(), CHOICES, [False, True], [3, 37]),
    ids=str,
)
@pytest.mark.covering
def test_routed(
    name: str, device: str, dtype: torch.dtype, heads: Two, kind: str, per_slot: bool, n_queries: int
) -> None:
    q, k, v = (x.to(dtype) for x in routed_vectors(*heads, n_queries, 6, 5))
    turns, chosen = turns_of(n_queries, 3 if per_slot else 1, dtype), choices(kind, heads[0], n_queries, 3, 6)
    there = Turn(turns.cos.to(device), turns.sin.to(device))
    tiles = [Tiles.of_chunks(k.to(device), v.to(device))]
    part = Attention.choose(name).routed(q.to(device), slots(there), chosen.to(device), tiles)
    assert part[0].dtype == dtype
    assert_same(part, routed(q, turns, chosen, (k, v)), 2 * HALF.get(dtype, 1.5e-5 if device == "cpu" else 1e-4))


@pytest.mark.parametrize("name", BACKENDS)
def test_routed_over_several_rounds(name: str) -> None:
    """The chunks of a KV head in other places, in other orders, in three rounds, among tiles of nobody's."""
    q, k, v = routed_vectors(8, 2, 37, 6, 5)
    turns, chosen = turns_of(37, 3), choices("some none", 8, 37, 3, 6)
    rounds = []
    for some in ([4, 0], [5, 1, 2], [3]):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(some[0]))
        tiles_k, tiles_v = torch.full((12, 5, 16), torch.nan), torch.full((12, 5, 16), torch.nan)
        index = torch.full((2, 6), -1)
        for n, (head, chunk) in enumerate((head, chunk) for head in range(2) for chunk in some):
            index[head, chunk] = order[n]
            tiles_k[order[n]], tiles_v[order[n]] = k[head, chunk], v[head, chunk]
        rounds.append(Tiles(tiles_k, tiles_v, index))
    part = Attention.choose(name).routed(q, slots(turns), chosen, rounds)
    assert_same(part, routed(q, turns, chosen, (k, v)))


@pytest.mark.parametrize("name", BACKENDS)
def test_many_queries_are_turned_as_they_are_gathered(name: str) -> None:
    """More rows than are rotated at once give the same as a few."""
    q, k, v = routed_vectors(8, 2, 2600, 6, 5)
    turns, chosen = turns_of(2600, 4), choices("all different", 8, 2600, 4, 6)
    attention = Attention.choose(name)
    out, lse = attention.routed(q, slots(turns), chosen, [Tiles.of_chunks(k, v)])
    some = slice(1000, 1100)
    part = attention.routed(q[:, some], slots(turns.at(some)), chosen[:, some], [Tiles.of_chunks(k, v)])
    assert_same((out[:, some], lse[:, some]), (part[0].double(), part[1].double()), 1e-5)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_routed_of_any_shape(data: st.DataObject) -> None:
    rep, n_kv_heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    n_queries, n_choices = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 4))
    n_chunks, size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    q, k, v = routed_vectors(rep * n_kv_heads, n_kv_heads, n_queries, n_chunks, size)
    turns = turns_of(n_queries, n_choices if data.draw(st.booleans()) else 1)
    shape = (rep * n_kv_heads, n_queries, n_choices)
    ids = st.integers(-1, n_chunks - 1)
    flat = data.draw(st.lists(ids, min_size=math.prod(shape), max_size=math.prod(shape)))
    chosen = torch.tensor(flat, dtype=torch.int64).view(shape)
    attention = Attention.choose(data.draw(st.sampled_from(BACKENDS)))
    part = attention.routed(q, slots(turns), chosen, [Tiles.of_chunks(k, v)])
    assert_same(part, routed(q, turns, chosen, (k, v)))


@pytest.mark.parametrize("name", BACKENDS)
def test_unchosen_chunks_are_not_even_looked_at(name: str) -> None:
    """What a cache holds beyond its tokens may be anything."""
    q, k, v = routed_vectors(4, 2, 9, 6, 5)
    turns, chosen = turns_of(9, 2), choices("all different", 4, 9, 2, 5)
    part = Attention.choose(name).routed(q, slots(turns), chosen, [Tiles.of_chunks(k, v)])
    k[:, 5], v[:, 5] = torch.nan, torch.inf
    again = Attention.choose(name).routed(q, slots(turns), chosen, [Tiles.of_chunks(k, v)])
    assert_same(again, (part[0].double(), part[1].double()))


def test_float64_works_and_its_log_sum_exp_is_float32() -> None:
    q, k, v = (x.double() for x in routed_vectors(8, 2, 20, 6, 5))
    turns, chosen = turns_of(20, 3, torch.float64), choices("some none", 8, 20, 3, 6)
    part = Attention.choose("torch").routed(q, slots(turns), chosen, [Tiles.of_chunks(k, v)])
    assert_same(part, routed(q, turns, chosen, (k, v)))


@pytest.mark.parametrize("name", BACKENDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_merged_parts_are_one_softmax(name: str, data: st.DataObject) -> None:
    attention = Attention.choose(name)
    q, k, v = vectors(4, 2, 3, data.draw(st.integers(1, 30)))
    bounds = [0, *sorted(data.draw(st.lists(st.integers(0, k.shape[1]), max_size=4))), k.shape[1]]
    parts = [attention.dense(q, k[:, low:high], v[:, low:high], causal=False) for low, high in pairwise(bounds)]
    torch.testing.assert_close(merge(parts), attention.dense(q, k, v, causal=False)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_part_that_saw_nothing_adds_nothing(name: str) -> None:
    attention = Attention.choose(name)
    q, k, v = vectors(4, 2, 6, 24)
    seen, nothing = attention.dense(q, k, v, causal=True), attention.dense(q, k[:, :0], v[:, :0], causal=False)
    chunks = (k.unflatten(1, (4, 6)), v.unflatten(1, (4, 6)))
    unrouted = attention.routed(q, slots(AS_IT_IS), torch.full((4, 6, 3), -1), [Tiles.of_chunks(*chunks)])
    torch.testing.assert_close(merge([nothing, seen, unrouted]), seen[0])
    assert torch.equal(merge([nothing, unrouted]), torch.zeros(4, 6, 16))


def test_combined_parts_have_the_log_sum_exp_of_all() -> None:
    attention = Attention.choose("reference")
    q, k, v = vectors(4, 2, 6, 24)
    parts = [attention.dense(q, k[:, a:b], v[:, a:b], causal=False) for a, b in ((0, 5), (5, 6), (6, 24))]
    assert_same(combine(parts), dense(q, k, v, causal=False))
    assert combine(parts[:1]) is parts[0]
