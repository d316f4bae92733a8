"""`delta`: what its definition implies, the pairs that it takes, and its spelling."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lce
from lce.attention import Attention, Order
from lce.errors import UsageError
from lce.methods import Delta, make, registry
from lce.methods.attending import around_core, bounds
from lce.methods.costs import QueryBlock, cost
from lce.methods.lowdim import LowDimMaps
from lce.methods.parts import Part
from lce.methods.registry import UserFile, user_file
from tests.methods.test_matrix import KNOBS, WINDOW, drawn
from tests.running import cut, low_dim_map, run, vectors

# Without esa, whose blocks choose.
KNOBS_OF_PAIRS = [knobs for knobs in KNOBS["delta"] if not str(knobs["method"]).startswith("esa")]


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_blocks_of_several_queries_give_the_same(data: st.DataObject) -> None:
    """Groups begin and end anywhere in a block; only small blocks are dense."""
    method = Delta(**data.draw(st.sampled_from(KNOBS_OF_PAIRS)))
    blocks = [size for size in drawn(data, data.draw(st.integers(1, 5 * WINDOW)), 40) if size > method.dense_up_to]
    n = sum(blocks)
    if n > method.dense_up_to:
        q, k, v = vectors(data.draw(st.integers(0, 3)), 4, 2, n, 8)
        whole = run(method, q, k, v, [n], window=WINDOW)
        assert (run(method, q, k, v, blocks, window=WINDOW) - whole).abs().max() <= 1e-4


@given(data=st.data())
@settings(max_examples=30, deadline=None)
@pytest.mark.slow
def test_without_dense_blocks_any_blocks_give_the_same_and_a_text_can_be_truncated(data: st.DataObject) -> None:
    knobs = data.draw(st.sampled_from(KNOBS_OF_PAIRS))
    method, n = Delta(**{**knobs, "dense_up_to": 0}), 3 * WINDOW
    q, k, v = vectors(9, 4, 2, n, 8)
    cuts = data.draw(st.lists(st.integers(0, n - 1), max_size=3))
    whole = run(method, q, k, v, [n], window=WINDOW)
    out = run(method, q, k, v, drawn(data, n, n), window=WINDOW, truncate=cuts)
    assert (out - whole).abs().max() <= 1e-4


CORRECTED = {"method": "xattention:stride=2:block_size=4:top_p=0.4", "every": 6}  # whose output follows the blocks


@pytest.mark.parametrize("knobs", [*KNOBS_OF_PAIRS, CORRECTED], ids=str)
def test_the_ends_of_the_knobs_are_the_two_methods(knobs: dict[str, object]) -> None:
    q, k, v = vectors(2, 4, 2, 4 * WINDOW, 8)
    method = Delta(**{**knobs, "dense_up_to": 0}).resolve(WINDOW)
    blocks = cut(4 * WINDOW, 50)

    def out(made: lce.Method) -> Tensor:
        return run(made, q, k, v, blocks, window=WINDOW)

    sparse, dense = out(method.sparse_method), out(method.dense_method)
    assert (out(Delta(**{**knobs, "every": 1})) - dense).abs().max() <= 1e-5
    assert (out(Delta(**{**knobs, "dense_up_to": 50})) - dense).abs().max() <= 1e-5
    plain = out(Delta(**{**knobs, "dense_up_to": 0, "correct": False}))
    first = torch.arange(4 * WINDOW) % method.every == 0
    assert (plain - torch.where(first[:, None], dense, sparse)).abs().max() <= 1e-5
    corrected = out(method)
    assert torch.equal(corrected[:, first], plain[:, first])
    before = torch.arange(4 * WINDOW) // method.every * method.every
    assert (corrected - sparse - (dense - sparse)[:, before]).abs().max() <= 1e-5


def test_the_default_pair_is_one_that_caches_keys_alike() -> None:
    for text, dense in (
        *((text, "full") for text in ("streaming", "quest", "xattention", "pages:placement=true")),
        *((text, "rerope") for text in ("lm_infinite", "infllm", "longheads:placement=constant", "esa:compress=pca")),
        ("longheads", "dca:chunk_size=4:"),
        ("pages:placement=dual:placement.chunk_size=64", "dca:chunk_size=64:"),
        ("pages:placement=grouped:placement.group=5", "self_extend:local=128:group=5"),
        ("dca:parts=intra", "dca:"),
    ):
        assert str(Delta(method=text).resolve(512).dense).startswith(dense), text


def test_pairs_that_cannot_be() -> None:
    for knobs, words in (
        ({"dense": "rerope"}, "rerope caches keys at other positions than streaming; pairs that work: full with"),
        ({"method": "lm_infinite", "dense": "full"}, "full caches keys at other positions than lm_infinite"),
        ({"method": "longheads", "dense": "dca:chunk_size=9"}, "dca caches keys at other positions than longheads"),
        ({"dense": "quest"}, "dense is quest; valid: "),
        ({"method": "delta"}, "method is delta itself"),
        ({"method": "streaming:sinks"}, "method has 'sinks'; expected NAME:KNOB=VALUE"),
        ({"method": "streaming:sink=3"}, "method 'streaming' has no option 'sink'"),
        ({"method": "streamin"}, "did you mean 'streaming'"),
        ({"every": 0}, "every is 0; expected 1 or more"),
    ):
        with pytest.raises(UsageError) as raised:
            Delta(**knobs).resolve(512)
        assert words in str(raised.value), knobs


def test_a_method_is_spelled_with_all_its_knobs() -> None:
    made = make("delta", {"method": "pages:placement=true:budget.top_p=0.37:budget.local=3", "every": "9"}).resolve(512)
    assert made.method.startswith(
        "pages:select=bounds:placement=true:page=16:budget=256:budget.sinks=16:budget.local=3:budget.top_p=0.37:share="
    )
    assert made == made.resolve(512)
    pages = make("pages", {"placement": "true", "budget.top_p": 0.37, "budget.local": 3})
    assert made.sparse_method == pages.resolve(512)
    assert Delta().resolve(512).method == "streaming:sinks=4:local=128"


def test_what_cannot_be_spelled_and_whose_code_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = LowDimMaps([low_dim_map(4, 2, 8, 3)])
    with pytest.raises(UsageError, match="delta: maps of esa cannot be spelled; choose knobs without maps"):
        Delta()._spell(lce.methods.ESA(maps=maps))
    assert user_file(Delta()) is None
    monkeypatch.setitem(registry._FILES, lce.methods.Streaming, (mine := UserFile("mine.py", "0")))
    assert user_file(Delta()) is mine


def test_limits_are_those_of_both() -> None:
    assert Delta().resolve(512).limit(512) == 512
    assert Delta(method="lm_infinite").resolve(512).limit(512) is None


def test_common_keys_are_cut_out() -> None:
    """Every token of a span is in exactly one piece, for spans that overlap or not, or are empty."""
    random = torch.Generator().manual_seed(0)
    for _ in range(200):
        i = torch.arange(5) * 7 + 20
        start, size = (torch.randint(0, 20, (5,), generator=random).sort().values for _ in range(2))
        part, token = Part((start, start + size), i), torch.arange(60)

        def seen(piece: Part, i: Tensor = i, token: Tensor = token) -> Tensor:
            first, stop = bounds(piece, i)
            return ((token >= first[:, None]) & (token < stop[:, None])).long()

        assert torch.equal(sum(seen(piece) for piece in around_core(part, i)), seen(part))


def test_common_keys_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    backend = type(Attention.choose())
    dense = backend.dense

    def watched(self: Attention, q: Tensor, k: Tensor, *args: object, order: Order, **more: object) -> object:
        read.append((q.shape[1], k.shape[1] - order.unseen))
        return dense(self, q, k, *args, order=order, **more)

    monkeypatch.setattr(backend, "dense", watched)
    q, k, v = vectors(1, 4, 2, 100, 8)
    lce.methods.run(Delta(method="streaming:sinks=0:local=1", every=10), q, k, v, window=WINDOW, blocks=[60, 40])
    assert read[-4:] == [(4, 61), (1, 10), (1, 20), (1, 30)], "the dense queries 60, 70, 80 and 90 of the second block"


def test_cost_of_the_dense_queries() -> None:
    made = Delta(method="streaming:sinks=4:local=60", every=64).resolve(4096)
    block = QueryBlock(2048, 2048 + 512, 4, 2, 8)
    more = (cost(made, block).attention - cost(made.sparse_method, block).attention) / block.causal.attention
    assert 0.0149 < more < 1 / 64
    step = QueryBlock(2050, 2051, 4, 2, 8)
    assert cost(made, step) == cost(made.dense_method, step)
