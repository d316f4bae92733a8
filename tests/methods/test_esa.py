"""ESA: what the comparison with the oracle does not cover."""

from __future__ import annotations

import re

import pytest
import torch

import lce
from lce.errors import UsageError
from lce.methods import ESA, lowdim
from tests.running import cut, run, vectors

WINDOW = 32
KNOBS = {"sinks": 4, "local": 10, "top_k": 7}


def test_defaults_follow_the_window() -> None:
    method = ESA(compress="none").resolve(4096)
    assert (method.local, method.top_k, method.far, method.block) == (2048, 1024, 2048, 512)
    assert ESA(compress="none").resolve(512).block == 128


def test_compression_to_the_keys_own_dimension_is_exact() -> None:
    q, k, v = vectors(1, 4, 2, 200, 8)
    blocks = [40, *cut(160, 16)]  # the directions are those of the first block's keys
    exact = run(ESA(compress="none", **KNOBS), q, k, v, blocks, window=WINDOW)
    pca = run(ESA(compress="pca", low_dim=16, **KNOBS), q, k, v, blocks, window=WINDOW)
    assert (exact - pca).abs().max() < 1e-5
    rough = run(ESA(compress="pca", low_dim=2, **KNOBS), q, k, v, blocks, window=WINDOW)
    assert (exact - rough).abs().max() > 1e-2


@pytest.mark.parametrize("compress", ["none", "pca"])
def test_long_texts_are_scored_in_slices(compress: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = vectors(1, 4, 2, 150, 8)
    method = ESA(compress=compress, **KNOBS)
    whole = run(method, q, k, v, [90, 60], window=WINDOW)
    monkeypatch.setattr(lowdim, "SCORES_AT_ONCE", 500)
    assert (run(method, q, k, v, [90, 60], window=WINDOW) - whole).abs().max() < 1e-6


def test_the_trace_names_tokens() -> None:
    engine = lce.load("demo", method=ESA(**KNOBS), block=20)
    trace = engine.trace(list(range(2, 102)))
    assert (trace.chunk_size, trace.first) == (1, 0)
    chosen = trace.chosen[0][:, 80:]  # the last block's: sinks 0-3, local from 70 on
    assert chosen.shape[-1] == 7
    assert ((chosen >= 4) & (chosen < 70)).all()
    assert (chosen == chosen[:1, :1]).all()  # a block's queries, in all heads, choose together
    assert (chosen.diff(dim=-1) > 0).all()


def test_the_demo_brings_its_maps() -> None:
    method = lce.load("demo", method="esa").method
    assert isinstance(method, ESA)
    assert method.maps is not None
    assert re.search(r"maps=LowDimMaps\('esa_maps.safetensors', [0-9a-f]{8}\)\)$", repr(method))


def test_without_maps_the_remedies_are_named(tiny_model: object) -> None:
    with pytest.raises(UsageError, match=r"lce calibrate --model M --text FILE .*compress=pca or -o compress=none"):
        lce.load(tiny_model, method="esa")  # type: ignore[arg-type]


def test_an_interrupted_prefill_leaves_no_trace() -> None:
    engine = lce.load("demo", method=ESA(compress="pca", **KNOBS), block=30)
    ids = list(range(2, 200))
    context = engine.prefill(ids[:150])
    before = context.fork()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.prefill(list(range(100, 190)), context=context, progress=interrupt)
    assert len(context) == 150
    context = engine.prefill(ids[:20], context=context)
    assert torch.equal(context.logits, engine.prefill(ids[:20], context=before).logits)
