"""Gemma 3 against transformers: two kinds of layers, GELU, norms of 1 + w, scaled embeddings and queries."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig

import lce
from tests.checkpoints import save_by_transformers, tokens
from tests.parity import FamilyTests, Kind, difference, edited, logits_of, save_kind

TYPES = ["sliding_attention", "full_attention"]
GEMMA_3 = {"pad_token_id": 0, "head_dim": 24, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
GEMMA_3 |= {"layer_types": TYPES, "sliding_window": 24}
GLOBAL, LOCAL = {"rope_type": "default", "rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"full_attention": {**GLOBAL, "rope_type": "linear", "factor": 8.0}, "sliding_attention": LOCAL}
KINDS = {
    "gemma3": Kind(Gemma3TextConfig, GEMMA_3, {"sliding_window": 23}),
    "multi-head": Kind(Gemma3TextConfig, GEMMA_3 | {"num_key_value_heads": 4}, {"norms_plus_one": True}),
    "untied": Kind(Gemma3TextConfig, GEMMA_3 | {"tie_word_embeddings": False}, {"rope_parameters": None}),
    "linear": Kind(Gemma3TextConfig, GEMMA_3 | {"rope_parameters": LINEAR}, {"rope_parameters": {}}),
    "27b": Kind(Gemma3TextConfig, GEMMA_3 | {"query_pre_attn_scalar": 32}, {"query_pre_attn_scalar": 24}),
}
KINDS["untied"].matters["rope_parameters"] = {"full_attention": GLOBAL, "sliding_attention": GLOBAL}


class TestGemma3Text(FamilyTests):
    kinds = KINDS
    greedy = ("untied",)
    weights = (
        (KINDS["gemma3"], r".*\.1\..*norm\.weight", 6),
        (Kind(Gemma3TextConfig, GEMMA_3 | {"attention_bias": True}, {}), r".*\.bias", 2 * 4),
    )
    refused = (
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; expected null: lce does not implement"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; expected null"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True; expected null or 0"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'; expected 'gelu_pytorch_tanh'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'gelu_pytorch_tanh'"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; expected a number from"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0; expected a whole number from 1"),
        ({"rope_local_base_freq": "1e4"}, "rope_local_base_freq is '1e4'; expected a number"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope'; expected a supported scaling"),
        ({"sliding_window": None}, "sliding_window is None; expected a number of tokens"),
    )


def test_older_configs_have_the_window_as_a_pattern(tmp_path: Path) -> None:
    """As published: a pattern, one scaling, and the base of sliding windows in a key of its own."""
    saved = save_kind(tmp_path / "saved", Kind(Gemma3TextConfig, GEMMA_3 | {"rope_parameters": LINEAR}, {}))
    older: dict[str, Any] = {"rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    older |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    folder = edited(saved.folder, tmp_path / "edited", older | {"layer_types": None, "sliding_window_pattern": 2})
    engine = lce.load(folder)
    assert difference(engine.logits(saved.ids), saved.logits) <= 1e-4
    assert lce.plan(folder, tokens=1).readable == engine.window, "the announced window is the scaled one"


def test_norms_may_be_stored_with_the_1_inside(tmp_path: Path) -> None:
    """As in GGUF files."""
    saved = save_kind(tmp_path / "saved", KINDS["gemma3"])
    folder = edited(saved.folder, tmp_path / "edited", {"norms_plus_one": True})
    weights = load_file(folder / "model.safetensors")
    added = {name: w + 1 if name.endswith("norm.weight") else w for name, w in weights.items()}
    save_file(added, folder / "model.safetensors", {"format": "pt"})
    assert difference(lce.load(folder).logits(saved.ids), saved.logits) <= 1e-4


def test_bfloat16_does_not_round_the_norms_1_plus_w(tmp_path: Path) -> None:
    """Rounded, the sums would make the logits as wrong as those of transformers; as they are, a fifth less."""
    model = save_by_transformers(tmp_path, KINDS["gemma3"].build()).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    ids = tokens(150)
    engine, truth = lce.load(tmp_path), lce.load(tmp_path, dtype="float32").logits(ids)
    ours, theirs = ((logits - truth).abs().mean() for logits in (engine.logits(ids), logits_of(model, ids)))
    assert ours <= 0.9 * theirs
    norms = 2 * (4 * 64 + 2 * 24) * 4
    stored = sum(weight.nbytes for weight in load_file(tmp_path / "model.safetensors").values())
    assert lce.plan(tmp_path, tokens=10).tiers["device"].weights == stored + norms // 2
