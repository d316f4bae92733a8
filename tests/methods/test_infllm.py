"""InfLLM: what the comparison with the oracle does not cover."""

from __future__ import annotations

import pytest

import lce
from lce.methods import InfLLM
from tests import oracle
from tests.running import cut, run, vectors

KNOBS = {"block_size": 8, "repr_tokens": 2, "top_k": 3, "sinks": 5, "local": 12}


def test_weights_are_summed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = vectors(1, 4, 2, 150, 8)
    whole = run(InfLLM(**KNOBS), q, k, v, cut(150, 30), window=32)
    monkeypatch.setattr("lce.attention.scores.IN_CACHES", 600)
    assert (run(InfLLM(**KNOBS), q, k, v, cut(150, 30), window=32) - whole).abs().max() < 1e-6


def test_the_trace_names_memory_blocks() -> None:
    engine = lce.load("demo", method=InfLLM(**KNOBS), block=20)
    trace = engine.trace(list(range(2, 102)))
    assert (trace.chunk_size, trace.first) == (8, 5)
    chosen = trace.chosen[0][:, 80:]  # the last block's: memory is tokens 5..68
    assert chosen.shape[-1] == 3
    assert ((chosen >= 0) & (chosen < 8)).all()
    assert (chosen == chosen[:1, :1]).all()


def test_large_logits_outside_the_local_window_do_no_harm() -> None:
    q, k, v = vectors(1, 4, 2, 150, 8)
    q = q * 20  # future keys have logits far above the sum over the window
    setting = oracle.Setting(32, cut(150, 30))
    truth = oracle.attention(q, k, v, oracle.infllm(q, k, v, setting, **KNOBS), setting)
    assert (run(InfLLM(**KNOBS), q, k, v, setting.blocks, window=32) - truth).abs().max() < 1e-3
