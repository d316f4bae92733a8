"""LM-Infinite: what the comparison with the oracle does not cover."""

from __future__ import annotations

import pytest

from lce.methods import LMInfinite, best_tokens
from tests.running import cut, run, vectors


def test_the_middle_is_scored_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = vectors(1, 4, 2, 150, 8)
    method = LMInfinite(sinks=2, local=12, top_k=4)
    whole = run(method, q, k, v, cut(150, 40), window=32)
    monkeypatch.setattr(best_tokens, "SCORES_AT_ONCE", 2000)
    assert (run(method, q, k, v, cut(150, 40), window=32) - whole).abs().max() < 1e-6


def test_from_layer_holds_the_middle_back() -> None:
    q, k, v = vectors(1, 4, 2, 150, 8)
    without, with_it, later = (
        run(LMInfinite(sinks=2, local=12, **knobs), q, k, v, [150], window=32)
        for knobs in ({}, {"top_k": 4}, {"top_k": 4, "from_layer": 1})
    )
    assert (later - without).abs().max() == 0
    assert (with_it - without).abs().max() > 1e-2
