"""Qwen2 and Qwen2.5 against transformers, their sliding window, and the chunk sizes that Qwen publishes for dca."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

import lce
from lce.errors import ModelError
from lce.methods import DualChunk
from tests.parity import PLAIN, FamilyTests, Kind, assert_equals_the_oracle, edited, rope, save_kind

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


class TestQwen2(FamilyTests):
    kinds = KINDS
    greedy = ("qwen2.5", "yarn", "sliding-window")
    weights = ((KINDS["qwen2.5"], r".*\.bias", 2 * 3),)


def test_a_window_is_of_all_layers_or_of_none(tmp_path: Path) -> None:
    folder = save_kind(tmp_path / "saved", KINDS["qwen2.5"]).folder
    windowed = {**SLIDING, "layer_types": None}
    for n_full, expected in ((0, 24), (2, None), (28, None)):
        changed = edited(folder, tmp_path / f"{n_full}", windowed | {"max_window_layers": n_full})
        assert lce.load(changed).setup.model.config.sliding_window == expected
    message = "max_window_layers is 1; expected 0 or at least num_hidden_layers, 2: one kind .*; set use_sliding_window"
    with pytest.raises(ModelError, match=message):
        lce.load(edited(folder, tmp_path / "a", windowed | {"max_window_layers": 1}))
    kinds = {"layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(ModelError, match="expected one kind of attention in all layers"):
        lce.load(edited(folder, tmp_path / "b", SLIDING | kinds))


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
