"""Traces: the chunks of every query, whatever the blocks, and how the parts of blocks are joined."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lce
from lce.engine.trace import TraceObserver
from lce.methods import LongHeads, Observation
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
    assert not torch.equal(trace.chosen[0][0], trace.chosen[0][2]), "and so do KV heads"


@pytest.mark.parametrize("block", [1, 7, 64, 512])
def test_a_trace_does_not_depend_on_blocks(tiny_model: Path, block: int) -> None:
    method = LongHeads(chunk_size=8, chunks=4)
    ids = tokens(120)
    expected = lce.load(tiny_model, method, block=BLOCK).trace(ids).chosen
    chosen = lce.load(tiny_model, method, block=block).trace(ids).chosen
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(chosen, expected, strict=True))


def test_an_observed_engine_continues_the_contexts_of_the_plain_one(tiny_model: Path) -> None:
    engine = lce.load(tiny_model, LongHeads(chunk_size=8, chunks=4), block=BLOCK)
    ids, observer = tokens(96), TraceObserver()
    context = engine.prefill(ids[:64])
    watched = lce.Engine(engine.setup.observed(observer))
    found = watched.generate(ids[64:], context=context, max_tokens=5)
    truth = engine.generate(ids, max_tokens=5)
    assert (found.token_ids, found.text) == (truth.token_ids, truth.text)
    expected = engine.trace([*ids, *truth.token_ids[:-1]]).chosen
    chosen = observer.trace(engine.method.choices).chosen
    assert all(torch.equal(ours, theirs[:, 64:]) for ours, theirs in zip(chosen, expected, strict=True))
    assert len(engine.generate([5], context=context, max_tokens=1).token_ids) == 1, "and back"


def observed(observer: TraceObserver, layer: int, n_tokens: int, chosen: Any, scores: Any = None) -> None:
    """Hand an observer what a layer of one or two heads chose in a block."""
    q = torch.zeros(1 if chosen is None else len(chosen), n_tokens, 2)
    picked, by = (None if x is None else torch.tensor(x) for x in (chosen, scores))
    seen = Observation(None, q, SimpleNamespace(index=layer), None, torch.arange(n_tokens), picked, by)
    assert observer.observe(seen, q) is q


def test_the_blocks_of_each_layer_are_joined() -> None:
    """Two layers, one head: layer 0 chooses from the second block on, layer 1 nothing."""
    observer = TraceObserver()
    for n_tokens, chosen in ((2, None), (1, [[[0]]]), (2, [[[0, 1], [0, -1]]])):
        observed(observer, 0, n_tokens, chosen)
        observed(observer, 1, n_tokens, None)
    trace = observer.trace((3, 4))
    assert (trace.first, trace.chunk_size) == (3, 4)
    assert trace.chosen[0].tolist() == [[[-1, -1], [-1, -1], [0, -1], [0, 1], [0, -1]]]
    assert trace.chosen[1].shape == (1, 5, 0)


def test_choices_have_their_scores_and_ranks() -> None:
    """Two heads choose together in layer 0; of the second block's query no score of chunk 2 is known."""
    observer = TraceObserver(keep_all=True)
    observed(observer, 0, 1, [[[0, 1]], [[1, 2]]], [[[0.5, 2.0, 1.0]]])
    observed(observer, 0, 1, [[[1, -1]], [[0, -1]]], [[[3.0, 3.0]]])
    trace = observer.trace((0, 4))
    assert trace.ranks[0].tolist() == [[[2, 0], [0, -1]], [[0, 1], [1, -1]]]
    none = float("nan")
    expected = torch.tensor([[[0.5, 2.0], [3.0, none]], [[2.0, 1.0], [3.0, none]]])
    assert torch.equal(trace.scores[0].nan_to_num(7), expected.nan_to_num(7))
    assert trace.all_scores[0].tolist() == [[[0.5, 2.0, 1.0], [3.0, 3.0, float("-inf")]]]


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("longheads", {"chunk_size": 8, "chunks": 5, "keep_first": False, "local": 0}),
        ("quest", {"dense_layers": 1, "page": 4, "budget": 16}),
        ("oracle", {"chunk_size": 8, "keep_first": False}),
        ("esa", {"compress": "none", "sinks": 4, "top_k": 6, "eps": 0}),
        ("infllm", {"block_size": 4, "sinks": 4, "top_k": 5}),
    ],
    ids=str,
)
def test_the_best_are_chosen(tiny_model: Path, name: str, knobs: dict[str, object]) -> None:
    """The ranks of what a query is free to choose are the first ones, and scores fall with them."""
    engine = lce.load(tiny_model, lce.methods.make(name, knobs))
    trace = engine.trace(tokens(150), scores=True)
    for chosen, scores, ranks in zip(trace.chosen, trace.scores, trace.ranks, strict=True):
        if not chosen.shape[-1]:
            continue
        taken = (chosen[:, -1] >= 0).sum(-1)
        forced = 1 if name == "oracle" else 0  # the last complete chunk
        assert (ranks[:, -1].sort(-1).values[:, forced : int(taken[0]) - forced] <= int(taken[0])).all()
        if not forced:
            assert ranks[0, -1].sort().values.tolist() == list(range(int(taken[0])))
        order = ranks[:, -1].argsort(-1)
        assert (scores[:, -1].gather(-1, order).diff(dim=-1) <= 0).all()
    assert trace.all_scores[-1].shape[1] == 150
    assert engine.trace(tokens(150)).all_scores is None
