"""Every registered method against the oracle, and the properties that all of them share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lce.methods import available, make
from tests import oracle
from tests.running import cut, run, vectors

WINDOW = 32
HEADS = {"multi-head": (4, 4), "grouped-query": (8, 2)}
# Knobs that every method is also tried with, beside its defaults.
KNOBS: dict[str, list[dict[str, object]]] = {
    "full": [{}],
    "longheads": [
        {"chunk_size": 4},
        {"chunk_size": 8, "chunks": 3},
        {"chunk_size": 4, "share": "group"},
        {"chunk_size": 4, "share": "layer"},
        {"chunk_size": 4, "rank": "last"},
        {"chunk_size": 4, "keep_first": False},
        {"chunk_size": 4, "fix_head": True},
        {"chunk_size": 5, "chunks": 6},
    ],
}
CASES = [(name, knobs) for name in available() for knobs in [{}, *KNOBS.get(name, [])]]


def test_every_method_has_a_definition() -> None:
    assert set(oracle.DEFINITIONS) == set(available())


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("name", "knobs"), CASES, ids=str)
def test_equals_the_oracle_far_beyond_the_window(name: str, knobs: dict[str, object], heads: tuple[int, int]) -> None:
    n = 9 * WINDOW + 5
    q, k, v = vectors(7, *heads, n, 16)
    setting = oracle.Setting(WINDOW)
    truth = oracle.attention(q, k, v, oracle.DEFINITIONS[name](q, k, v, setting, **knobs), setting)
    for blocks in (cut(n, 1), cut(n, 7), cut(n, 64), [n], [200, *cut(n - 200, 1)], [3, 90, 1, 1, n - 95]):
        out = run(make(name, knobs), q, k, v, blocks, window=WINDOW)
        assert (out - truth).abs().max() <= 1e-4, f"blocks {blocks[:5]}"


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", available())
def test_backends_agree(name: str, backend: str) -> None:
    q, k, v = vectors(3, 4, 2, 150, 8)
    setting = oracle.Setting(WINDOW)
    truth = oracle.attention(q, k, v, oracle.DEFINITIONS[name](q, k, v, setting), setting)
    out = run(make(name), q, k, v, cut(150, 40), window=WINDOW, backend=backend)
    assert (out - truth).abs().max() <= 1e-4


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("name", "knobs"), CASES, ids=str)
def test_equals_full_attention_while_everything_fits(
    name: str, knobs: dict[str, object], heads: tuple[int, int]
) -> None:
    method = make(name, knobs).resolve(WINDOW)
    budget = getattr(method, "chunks", 1) * method.cache_chunk
    n = min(budget, WINDOW) if name != "full" else WINDOW
    q, k, v = vectors(5, *heads, n, 16)
    truth = run(make("full"), q, k, v, [n], window=WINDOW)
    for blocks in (cut(n, 1), cut(n, 7), [n]):
        assert (run(method, q, k, v, blocks, window=WINDOW) - truth).abs().max() <= 1e-5


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_blocks_give_the_same(data: st.DataObject) -> None:
    name, knobs = data.draw(st.sampled_from(CASES))
    n = data.draw(st.integers(1, 5 * WINDOW))
    q, k, v = vectors(data.draw(st.integers(0, 3)), 4, 2, n, 8)
    blocks, left = [], n
    while left:
        blocks.append(data.draw(st.integers(1, left)))
        left -= blocks[-1]
    whole = run(make(name, knobs), q, k, v, [n], window=WINDOW)
    assert (run(make(name, knobs), q, k, v, blocks, window=WINDOW) - whole).abs().max() <= 1e-4


def test_half_precision_stays_close() -> None:
    for name in available():
        q, k, v = (x.bfloat16() for x in vectors(2, 4, 2, WINDOW, 16))
        out = run(make(name), q, k, v, [WINDOW], window=WINDOW)
        truth = run(make("full"), q.float(), k.float(), v.float(), [WINDOW], window=WINDOW)
        assert out.dtype == torch.bfloat16
        assert (out.float() - truth).abs().max() < 0.1
