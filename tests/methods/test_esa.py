"""ESA: what the comparison with the oracle does not cover."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import lce
from lce.errors import UsageError
from lce.methods import ESA
from lce.methods.lowdim import LowDimMap, LowDimMaps
from lce.weights.source import DEMO
from tests import oracle
from tests.running import cut, low_dim_map, run, vectors

WINDOW = 32
KNOBS = {"sinks": 4, "local": 10, "top_k": 7}


def learned(n_heads: int, n_kv_heads: int, dim: int, low_dim: int) -> LowDimMap:
    """Random maps with biases that matter."""
    maps = low_dim_map(n_heads, n_kv_heads, dim, low_dim)
    return replace(maps, query_bias=maps.query_bias * 40)


@pytest.mark.parametrize("blocks", [[100, 60, 40], [90, *cut(110, 1)], cut(200, 7)], ids=["3", "decode", "7"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_learned_maps_equal_the_oracle(heads: tuple[int, int], blocks: list[int]) -> None:
    q, k, v = vectors(3, *heads, 200, 8)
    maps = learned(*heads, 8, 6)
    setting = oracle.Setting(WINDOW, blocks)
    tables = oracle.esa(q, k, v, setting, compress="calibrated", maps=maps.tensors(), **KNOBS)
    method = ESA(maps=LowDimMaps([maps]), low_dim=6, **KNOBS)
    out = run(method, q, k, v, blocks, window=WINDOW)
    assert (out - oracle.attention(q, k, v, tables, setting)).abs().max() <= 1e-4
    unbiased = ESA(maps=LowDimMaps([LowDimMap.unbiased(maps.query, maps.key)]), low_dim=6, **KNOBS)
    assert (out - run(unbiased, q, k, v, blocks, window=WINDOW)).abs().max() > 1e-2


def test_compression_to_the_keys_own_dimension_is_exact() -> None:
    q, k, v = vectors(1, 4, 2, 200, 8)
    blocks = [40, *cut(160, 16)]  # the directions are those of the first block's keys
    exact = run(ESA(compress="none", **KNOBS), q, k, v, blocks, window=WINDOW)
    pca = run(ESA(compress="pca", low_dim=16, **KNOBS), q, k, v, blocks, window=WINDOW)
    assert (exact - pca).abs().max() < 1e-5
    rough = run(ESA(compress="pca", low_dim=2, **KNOBS), q, k, v, blocks, window=WINDOW)
    assert (exact - rough).abs().max() > 1e-2


def test_the_demo_brings_its_maps() -> None:
    method = lce.load("demo", method="esa").method
    assert isinstance(method, ESA)
    assert re.search(r"maps=LowDimMaps\('esa_maps.safetensors', [0-9a-f]{8}\)[,)]", repr(method))


def test_without_maps_the_remedies_are_named(tiny_model: object) -> None:
    with pytest.raises(
        UsageError, match=r"`lce calibrate --model /.* --far 32 --window 64 --rope none` and .*=pca or -o compress=none"
    ):
        lce.load(tiny_model, method="esa")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("knobs", "options", "words"),
    [
        ({"far": 128}, {}, ["far=256, and here far=128", "--far 128 --window 512 --rope none"]),
        ({"local": 100}, {}, ["far=256, and here far=100"]),
        ({"low_dim": 64}, {}, ["low_dim=128, and here low_dim=64"]),
        ({"far": 256}, {"window": 1024}, ["window=512, and here window=1024", "--far 256 --window 1024"]),
        ({}, {"rope": "linear", "rope_factor": 4}, ["rope.kind=none", "--rope linear --rope-factor 4"]),
        ({}, {"rope": "dynamic", "rope_factor": 4}, ["the length of each text", "--rope ntk", "compress=pca"]),
    ],
    ids=str,
)
def test_maps_learned_for_something_else_are_refused(
    knobs: dict[str, Any], options: dict[str, Any], words: list[str]
) -> None:
    opened = lce.load("demo", "esa").method.maps  # type: ignore[attr-defined]
    for maps in (None, str(DEMO / "esa_maps.safetensors"), opened):
        with pytest.raises(UsageError) as caught:
            lce.load("demo", ESA(maps=maps, **knobs), **options)
        assert all(word in str(caught.value) for word in words)
        assert "\n" not in str(caught.value)
    for compress in ("pca", "none"):
        lce.load("demo", ESA(compress=compress, maps="not read", **knobs), **options)  # type: ignore[arg-type]


def test_maps_made_in_memory_are_checked_by_their_sizes() -> None:
    q, k, v = vectors(1, 8, 4, 20, 64)
    n_layers = lce.load("demo").setup.model.config.n_layers
    maps = LowDimMaps([learned(8, 4, 64, 6)] * n_layers)
    lce.load("demo", ESA(maps=maps, low_dim=6, far=3))
    lce.methods.run(ESA(maps=maps, low_dim=6, far=3), q, k, v, window=8)
    with pytest.raises(UsageError, match=r"low_dim is 5, but .* has 6; give -o low_dim=6"):
        lce.methods.run(ESA(maps=maps, low_dim=5), q, k, v, window=8)
    for bad in (LowDimMaps([learned(8, 4, 64, 6)]), LowDimMaps([learned(8, 2, 64, 6)] * n_layers)):
        with pytest.raises(UsageError, match=f"expected maps of {n_layers} layers"):
            lce.load("demo", ESA(maps=bad, low_dim=6))
    with pytest.raises(UsageError, match=r"does not fit this model"):
        lce.methods.run(ESA(maps=maps, low_dim=6), q[:4], k, v, window=8)
    opened = lce.load("demo", "esa").method
    with pytest.raises(UsageError, match="far=256, window=512, and here far=4, window=8"):
        lce.methods.run(opened.__class__(maps=opened.maps), q, k, v, window=8)  # type: ignore[attr-defined, call-arg]


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
