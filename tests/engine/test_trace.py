"""Traces: the chunks of every query, whatever the blocks, and how the parts of blocks are joined."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lce
from lce.engine.trace import TraceRecorder
from lce.methods import LongHeads
from tests.checkpoints import tokens

BLOCK = 32


def test_a_trace_lists_the_chunks_of_every_query(tiny_model: Path) -> None:
    size, budget, n = 8, 4, 150
    ids = tokens(n)
    trace = lce.load(tiny_model, LongHeads(chunk_size=size, chunks=budget), block=BLOCK).trace(ids)
    assert trace.chunk_size == size
    assert len(trace.chosen) == 2
    for chosen in trace.chosen:
        assert chosen.shape == (4, n, budget - 1)
        assert chosen.dtype == torch.int64
        for head in chosen.tolist():
            for index, row in enumerate(head):
                own = index // size
                taken = [chunk for chunk in row if chunk >= 0]
                assert row == taken + [-1] * (budget - 1 - len(taken)), "none comes last"
                assert taken == sorted(set(taken)), "ascending, and none twice"
                assert len(taken) == min(own, budget - 1)
                assert own not in taken
                if own:
                    assert taken[0] == 0
                    assert taken[-1] == own - 1
    assert not torch.equal(*trace.chosen), "layers choose on their own"
    assert not torch.equal(trace.chosen[0][0], trace.chosen[0][1]), "and so do heads"


@pytest.mark.parametrize("block", [1, 7, 64, 512])
def test_a_trace_does_not_depend_on_blocks(tiny_model: Path, block: int) -> None:
    method = LongHeads(chunk_size=8, chunks=4)
    ids = tokens(120)
    expected = lce.load(tiny_model, method, block=BLOCK).trace(ids).chosen
    chosen = lce.load(tiny_model, method, block=block).trace(ids).chosen
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(chosen, expected, strict=True))


@pytest.mark.parametrize("name", ["full", "longheads"])
def test_a_trace_is_empty_where_nothing_is_chosen(tiny_model: Path, name: str) -> None:
    trace = lce.load(tiny_model, name).trace(tokens(40 if name == "full" else 2))
    assert [chosen.shape for chosen in trace.chosen] == [(4, 40 if name == "full" else 2, 0)] * 2


def test_a_recorder_joins_the_blocks_of_each_layer() -> None:
    """Two layers, one head: layer 0 chooses from the second block on, layer 1 nothing."""
    recorder = TraceRecorder(n_layers=2, n_heads=1)
    for n_tokens, chosen in ((2, None), (1, [[[0]]]), (2, [[[0, 1], [0, -1]]])):
        if chosen is not None:
            recorder.note(0, torch.tensor(chosen))
        recorder.end_block(n_tokens)
    trace = recorder.trace((3, 4))
    assert (trace.first, trace.chunk_size) == (3, 4)
    assert trace.chosen[0].tolist() == [[[-1, -1], [-1, -1], [0, -1], [0, 1], [0, -1]]]
    assert trace.chosen[1].shape == (1, 5, 0)
