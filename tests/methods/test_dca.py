"""Dual Chunk Attention: what the comparison with the oracle does not cover."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import lce
from lce.errors import ModelError, UsageError
from lce.methods import DualChunk


def test_the_default_chunk_is_three_quarters_of_the_window() -> None:
    assert DualChunk().resolve(4096).chunk_size == 3072


def test_a_chunk_beyond_the_window_is_refused() -> None:
    with pytest.raises(UsageError, match="dca: chunk_size is 65; expected at most the window, 64"):
        DualChunk(chunk_size=65).resolve(64)


def with_config(model: Path, folder: Path, **values: object) -> Path:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


def test_qwens_config_is_read(tiny_model: Path, tmp_path: Path) -> None:
    sizes = {"chunk_size": 40, "local_size": 8, "original_max_position_embeddings": 48}
    folder = with_config(
        tiny_model, tmp_path / "model", dual_chunk_attention_config=sizes, max_position_embeddings=4096
    )
    engine = lce.load(folder, method="dca")
    assert (engine.method, engine.window) == (DualChunk(chunk_size=32), 48)
    assert lce.load(folder, method=DualChunk(chunk_size=20)).method == DualChunk(chunk_size=20)


def test_a_config_that_makes_no_sense_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    sizes = {"chunk_size": 8, "local_size": 8}
    folder = with_config(tiny_model, tmp_path / "model", dual_chunk_attention_config=sizes)
    assert lce.load(folder).window == 64  # other methods do not read it
    with pytest.raises(ModelError, match="a smaller local_size; give -o chunk_size=N"):
        lce.load(folder, method="dca")
