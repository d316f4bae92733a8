"""Qwen3 against transformers: the norm of queries and keys, explicit head_dim, biases, YaRN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

import lce
from tests.parity import (
    PLAIN,
    Kind,
    Saved,
    assert_bfloat16_as_close,
    assert_every_bias_matters,
    assert_kind_matters,
    assert_same_greedy_tokens,
    assert_same_logits,
    difference,
    rope,
    save_kind,
)

QWEN_3 = {"head_dim": 24, **rope("default", 1e6)}
YARN = rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=64)
SLIDING = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}
KINDS = {
    "qwen3": Kind(Qwen3Config, QWEN_3, PLAIN),
    "multi-head": Kind(Qwen3Config, {"num_key_value_heads": 4, **QWEN_3}, PLAIN),
    "qwen3-0.6b": Kind(Qwen3Config, {"tie_word_embeddings": True, **QWEN_3}, {"rms_norm_eps": 0.5}),
    "attention-bias": Kind(Qwen3Config, {"attention_bias": True, **QWEN_3}, PLAIN),
    "yarn": Kind(Qwen3Config, QWEN_3 | YARN, rope("default", 1e6)),
    "sliding-window": Kind(Qwen3Config, QWEN_3 | SLIDING, {"sliding_window": 23}),
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


@pytest.mark.parametrize("name", ["qwen3", "yarn"])
def test_greedy_tokens_as_transformers_generates(name: str, tmp_path: Path) -> None:
    assert_same_greedy_tokens(tmp_path, KINDS[name])


def test_biases_make_a_difference(tmp_path: Path) -> None:
    assert_every_bias_matters(tmp_path, KINDS["attention-bias"], 2 * 4)


def test_the_norms_of_queries_and_keys_make_a_difference(tmp_path: Path) -> None:
    saved = save_kind(tmp_path, KINDS["qwen3"])
    before = lce.load(tmp_path).logits(saved.ids)
    for name in ("q_norm", "k_norm"):
        weight = getattr(saved.model.model.layers[1].self_attn, name).weight
        with torch.no_grad():
            weight += torch.linspace(-1, 1, len(weight))
        saved.model.save_pretrained(tmp_path)
        after = lce.load(tmp_path).logits(saved.ids)
        assert difference(after, before) > 1e-2, name
        assert difference(after, saved.logits) <= 1e-4
        before = after
