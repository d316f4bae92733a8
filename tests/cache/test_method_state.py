"""What is kept of tokens besides keys and values."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lce.cache.stores import RecentKeys, TokenRows


@given(keep=st.integers(1, 20), blocks=st.lists(st.integers(1, 30), min_size=1, max_size=30), data=st.data())
@settings(max_examples=60, deadline=None)
def test_recent_keys_are_the_last_ones(keep: int, blocks: list[int], data: st.DataObject) -> None:
    everything = torch.arange(sum(blocks)).float().view(1, -1, 1).expand(2, -1, 4)
    recent, start = RecentKeys(keep), 0
    for size in blocks:
        stop = start + size
        if data.draw(st.booleans()):  # a pass that was discarded
            recent.write(torch.full((2, data.draw(st.integers(1, 40)), 4), -1.0), start)
        recent.write(everything[:, start:stop], start)
        first = max(0, start - keep)
        assert torch.equal(recent.since(first, stop), everything[:, first:stop])
        start = stop
        if data.draw(st.booleans()):
            copied, recent = recent, recent.copy(start)
            copied.write(torch.zeros(2, 50, 4), start)  # the one no longer reaches the other
    assert recent.n_bytes <= (3 * keep + max(blocks) + 40) * 2 * 4 * 4


@given(blocks=st.lists(st.integers(1, 90), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_token_rows_hold_every_token(blocks: list[int]) -> None:
    everything = torch.arange(sum(blocks) * 3).float().view(-1, 3)
    rows, start = TokenRows(), 0
    for size in blocks:
        rows.write(torch.full((size + 1, 3), -1.0), start)
        rows.write(everything[start : start + size], start)
        start += size
    assert torch.equal(rows.span(0, start), everything)
    copy = rows.copy(start)
    rows.write(torch.zeros(1, 3), 0)
    assert torch.equal(copy.span(0, start), everything)
    assert copy.n_bytes == everything.numel() * 4
