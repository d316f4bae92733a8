"""Qwen2 and Qwen2.5 against transformers, their sliding window, and the chunk sizes that Qwen publishes for dca."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

import lce
from lce.errors import ModelError
from lce.methods import DualChunk
from tests.parity import (
    PLAIN,
    Kind,
    Saved,
    assert_bfloat16_as_close,
    assert_equals_the_oracle,
    assert_every_bias_matters,
    assert_kind_matters,
    assert_same_greedy_tokens,
    assert_same_logits,
    edited,
    rope,
    save_kind,
)

QWEN_2 = rope("default", 1e6)
YARN = rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=64)
SLIDING = {"use_sliding_window": True, "sliding_window": 24}
KINDS = {
    "qwen2-multi-head": Kind(Qwen2Config, {"num_key_value_heads": 4, **QWEN_2}, PLAIN),
    "qwen2.5": Kind(Qwen2Config, QWEN_2, {"rms_norm_eps": 0.5}),
    "qwen2.5-0.5b": Kind(Qwen2Config, {"tie_word_embeddings": True, **QWEN_2}, PLAIN),
    "narrow-heads": Kind(Qwen2Config, {"head_dim": 24, **QWEN_2}, PLAIN),
    "yarn": Kind(Qwen2Config, YARN, QWEN_2),
    "dynamic": Kind(Qwen2Config, rope("dynamic", 1e6, factor=2.0), QWEN_2),
    "sliding-window": Kind(Qwen2Config, {"max_window_layers": 0, **SLIDING, **QWEN_2}, {"sliding_window": 23}),
    "window-unused": Kind(
        Qwen2Config, {"sliding_window": 24, **QWEN_2}, {"layer_types": None, "max_window_layers": 0, **SLIDING}
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_kind(tmp_path_factory.mktemp(request.param), KINDS[request.param])


def test_same_logits_as_transformers(saved: Saved) -> None:
    assert_same_logits(saved)


def test_what_makes_the_kind_makes_a_difference(saved: Saved, tmp_path: Path) -> None:
    assert_kind_matters(saved, tmp_path / "edited")


def test_bfloat16_stays_as_close_as_transformers(saved: Saved, tmp_path: Path) -> None:
    assert_bfloat16_as_close(tmp_path, saved)


@pytest.mark.parametrize("name", ["qwen2.5", "yarn", "sliding-window"])
def test_greedy_tokens_as_transformers_generates(name: str, tmp_path: Path) -> None:
    assert_same_greedy_tokens(tmp_path, KINDS[name])


def test_biases_make_a_difference(tmp_path: Path) -> None:
    assert_every_bias_matters(tmp_path, KINDS["qwen2.5"], 2 * 3)


@pytest.mark.parametrize(("n_full", "expected"), [(0, 24), (2, None), (28, None)])
def test_a_window_of_all_layers_or_of_none(saved: Saved, tmp_path: Path, n_full: int, expected: int | None) -> None:
    changes = {**SLIDING, "layer_types": None, "max_window_layers": n_full}
    assert lce.load(edited(saved.folder, tmp_path / "model", changes)).model.config.sliding_window == expected


def test_a_window_of_some_layers_is_refused(saved: Saved, tmp_path: Path) -> None:
    message = "max_window_layers is 1; expected 0 or at least num_hidden_layers, 2: one kind .*; set use_sliding_window"
    with pytest.raises(ModelError, match=message):
        lce.load(edited(saved.folder, tmp_path / "a", {**SLIDING, "layer_types": None, "max_window_layers": 1}))
    kinds = ["full_attention", "sliding_attention"]
    with pytest.raises(ModelError, match="expected one kind of attention in all layers"):
        lce.load(edited(saved.folder, tmp_path / "b", {**SLIDING, "layer_types": kinds}))


DUAL_CHUNK = {"chunk_size": 40, "local_size": 8, "original_max_position_embeddings": 48}


@pytest.mark.parametrize("block", [1, 7, 64, 150])
def test_dca_with_the_published_chunk_sizes(tmp_path: Path, block: int) -> None:
    """As in Qwen2.5-1M: 48 trained positions, 4096 announced, chunks of 40 of which 8 are kept for the next."""
    kind = Kind(Qwen2Config, {"max_position_embeddings": 4096, "dual_chunk_attention_config": DUAL_CHUNK, **QWEN_2}, {})
    saved = save_kind(tmp_path, kind)
    engine = lce.load(saved.folder, method="dca", block=block)
    assert (engine.method, engine.window) == (DualChunk(chunk_size=32, far=40), 48)
    assert_equals_the_oracle(engine, saved.ids, chunk_size=32, far=40)
    assert torch.allclose(engine.logits(saved.ids[:41]), saved.logits[:41], atol=1e-4)  # exact up to that position
    assert not torch.allclose(engine.logits(saved.ids)[100:], saved.logits[100:], atol=0.05)
