"""Dual Chunk Attention: what the comparison with the oracle does not cover."""

from pathlib import Path

import pytest

import lce
from lce.errors import ModelError
from lce.methods import DualChunk
from lce_lab.study.explain import explain
from tests.parity import edited


def test_qwens_config_is_read(tiny_model: Path, tmp_path: Path) -> None:
    sizes = {"chunk_size": 40, "local_size": 8, "original_max_position_embeddings": 48}
    values = {"dual_chunk_attention_config": sizes, "max_position_embeddings": 4096}
    folder = edited(tiny_model, tmp_path / "model", values)
    engine = lce.load(folder, method="dca")
    assert (engine.method, engine.window) == (DualChunk(chunk_size=32, far=40), 48)
    assert "far=40" in repr(engine)
    assert lce.load(folder, method=DualChunk(chunk_size=20)).method == DualChunk(chunk_size=20, far=47)
    assert lce.load(folder, method=DualChunk(far=47)).method == DualChunk(chunk_size=32, far=47)


@pytest.mark.parametrize(("size", "kept"), [(12, 3), (12, 8), (12, 6), (9, 0), (8, 1)])
def test_qwens_models_are_read_as_they_are_served(size: int, kept: int, tiny_model: Path, tmp_path: Path) -> None:
    """The tables of Qwen's serving code: where queries and keys are, by their offset in a chunk of `size - kept`."""
    sizes = {"chunk_size": size, "local_size": kept, "original_max_position_embeddings": size}
    folder = edited(tiny_model, tmp_path / "model", {"dual_chunk_attention_config": sizes})
    method = lce.load(folder, method="dca").method
    length, n = size - kept, 4 * size
    successive = [min(offset + length, size) for offset in range(length)]
    inter = successive[-1]
    distance = explain(method, tokens=n, window=size).distance
    for i in range(n):
        for j in range(i + 1):
            behind = i // length - j // length
            query = {0: i % length, 1: successive[i % length]}.get(behind, inter)
            assert distance[i, j] == query - j % length, (i, j)


def test_a_config_that_makes_no_sense_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    sizes = {"chunk_size": 8, "local_size": 8}
    folder = edited(tiny_model, tmp_path / "model", {"dual_chunk_attention_config": sizes})
    assert lce.load(folder).window == 64  # other methods do not read it
    with pytest.raises(ModelError, match="a smaller local_size; give -o chunk_size=N"):
        lce.load(folder, method="dca")
