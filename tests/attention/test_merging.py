"""Parts of one attention are one softmax again when they are merged."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lce.attention import Attention, Tiles, causal_mask, combine, merge
from tests.attention.truth import AS_IT_IS, BACKENDS, assert_same, dense_truth, vectors


@pytest.mark.parametrize("name", BACKENDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_merged_parts_are_one_softmax(name: str, data: st.DataObject) -> None:
    attention = Attention.choose(name)
    q, k, v = vectors(4, 2, 3, data.draw(st.integers(1, 30)))
    cuts = sorted(data.draw(st.lists(st.integers(0, k.shape[1]), max_size=4)))
    bounds = [0, *cuts, k.shape[1]]
    parts = [attention.dense(q, k[:, low:high], v[:, low:high], causal=False) for low, high in pairwise(bounds)]
    torch.testing.assert_close(merge(parts), attention.dense(q, k, v, causal=False)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_part_that_saw_nothing_adds_nothing(name: str) -> None:
    attention = Attention.choose(name)
    q, k, v = vectors(4, 2, 6, 24)
    seen, nothing = attention.dense(q, k, v, causal=True), attention.dense(q, k[:, :0], v[:, :0], causal=False)
    chunks = (k.unflatten(1, (4, 6)), v.unflatten(1, (4, 6)))
    unrouted = attention.routed(q, AS_IT_IS, torch.full((4, 6, 3), -1), [Tiles.of_chunks(*chunks)])
    torch.testing.assert_close(merge([nothing, seen, unrouted]), seen[0])
    assert torch.equal(merge([nothing, unrouted]), torch.zeros(4, 6, 16))


def test_combined_parts_have_the_log_sum_exp_of_all() -> None:
    attention = Attention.choose("reference")
    q, k, v = vectors(4, 2, 6, 24)
    parts = [attention.dense(q, k[:, a:b], v[:, a:b], causal=False) for a, b in ((0, 5), (5, 6), (6, 24))]
    assert_same(combine(parts), dense_truth(q, k, v, causal=False))
    assert combine(parts[:1]) is parts[0]


@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_causal_mask_ends_at_the_last_key(window: int | None) -> None:
    seen = causal_mask(4, 9, window, torch.device("cpu"))
    for query in range(4):
        own = 9 - 4 + query
        first = 0 if window is None else max(0, own - window + 1)
        assert seen[query].nonzero().flatten().tolist() == list(range(first, own + 1))
