"""LongHeads: what the comparison with the oracle does not cover."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lce
from lce.methods import LongHeads, make
from tests import oracle
from tests.running import cut, run, vectors

WINDOW = 32


def choices(method: LongHeads, n: int, blocks: list[int]) -> tuple[Tensor, list[list[set[int]]]]:
    """The output, and for each head and query the set of chunks it chose."""
    q, k, v = vectors(11, 4, 2, n, 8)
    seen: list[list[set[int]]] = [[] for _ in range(4)]

    def note(layer: int, chosen: Tensor) -> None:
        for head in range(4):
            seen[head] += [{c for c in row if c >= 0} for row in chosen[head].tolist()]

    return run(method, q, k, v, blocks, window=WINDOW, note=note), seen


def test_the_released_setting_is_a_preset() -> None:
    assert make("longheads", {"preset": "released"}) == LongHeads(chunk_size=256, chunks=16)
    assert make("longheads", {"preset": "released", "chunks": 8}) == LongHeads(chunk_size=256, chunks=8)
    assert make("longheads", {"preset": "released"}).resolve(4096) == make("longheads").resolve(4096)
    with pytest.raises(lce.UsageError, match="has no preset 'relased'; did you mean 'released'"):
        make("longheads", {"preset": "relased"})


def test_random_choices_do_not_depend_on_blocks() -> None:
    method = LongHeads(chunk_size=4, rank="random")
    whole, chosen = choices(method, 200, [200])
    blocks = [7, 64, 1, 1, 127]
    assert choices(method, 200, blocks)[1][0][-150:] == chosen[0][-150:]
    assert (choices(method, 200, blocks)[0] - whole).abs().max() <= 1e-4
    best = choices(LongHeads(chunk_size=4), 200, [200])[1]
    assert chosen != best
    assert chosen[0] != chosen[1]


def test_random_choices_are_placed_as_any_others() -> None:
    method = LongHeads(chunk_size=4, chunks=5, rank="random")
    q, k, v = vectors(11, 4, 2, 120, 8)
    out, chosen = choices(method, 120, [120])
    tables = oracle.placed(4, 120, 4, lambda h, i: sorted(chosen[h][i]))
    assert (out - oracle.attention(q, k, v, tables, oracle.Setting(WINDOW))).abs().max() <= 1e-4


def test_random_choices_are_spread_evenly() -> None:
    _, chosen = choices(LongHeads(chunk_size=4, chunks=8, rank="random"), 800, cut(800, 100))
    middle = torch.zeros(200)
    for row in (row for head in chosen for row in head[-100:]):
        for chunk in row - {0}:
            middle[chunk] += 1
    expected = 400 * 5 / 172  # five free places among the chunks that every one of these queries may choose
    assert (middle[1:170] > 0).all()
    assert (middle[1:170] < expected * 3).all()
