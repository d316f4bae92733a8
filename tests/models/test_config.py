"""A checkpoint's config: published layouts read as transformers reads them, everything else refused in one line."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, LlamaConfig

from lce.errors import ModelError
from lce.models.config import ModelConfig, RopeConfig
from lce.models.layers import read_config
from lce.weights.source import Source

# As published, with the keys that lce does not read left out.
LLAMA_2: dict[str, Any] = json.loads("""{
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 2,
    "rms_norm_eps": 1e-05, "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "float16",
    "vocab_size": 32000
}""")
LLAMA_3 = LLAMA_2 | json.loads("""{
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "intermediate_size": 14336,
    "max_position_embeddings": 131072, "num_key_value_heads": 8, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3"
    },
    "vocab_size": 128256
}""")
MISTRAL = LLAMA_2 | json.loads("""{
    "architectures": ["MistralForCausalLM"], "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_key_value_heads": 8, "rope_theta": 10000.0, "sliding_window": 4096,
    "torch_dtype": "bfloat16"
}""")
NEMO = MISTRAL | json.loads("""{
    "head_dim": 128, "hidden_size": 5120, "max_position_embeddings": 1024000, "rope_theta": 1000000.0,
    "sliding_window": null, "vocab_size": 131072
}""")
QWEN_2_5 = LLAMA_2 | json.loads("""{
    "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151645, "hidden_size": 3584,
    "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2",
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 131072, "torch_dtype": "bfloat16", "use_sliding_window": false,
    "vocab_size": 152064
}""")
QWEN_3 = QWEN_2_5 | json.loads("""{
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "head_dim": 128, "hidden_size": 1024,
    "max_position_embeddings": 40960, "model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8,
    "sliding_window": null, "tie_word_embeddings": true
}""")
MINISTRAL_3: dict[str, Any] = json.loads("""{
    "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "model_type": "mistral3",
    "text_config": {
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 9216,
        "max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 32,
        "num_hidden_layers": 26, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
            "rope_type": "yarn", "type": "yarn"
        },
        "sliding_window": null, "tie_word_embeddings": true, "vocab_size": 131072
    },
    "vision_config": {"model_type": "pixtral", "hidden_size": 1024}
}""")


def read(folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(Source(folder))


def without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def scaled(**scaling: object) -> dict[str, Any]:
    return {"rope_scaling": scaling}


RATIO: dict[str, Any] = {"factor": 4.0, "original_window": 1024}
LLAMA_3_2 = LLAMA_3 | {"head_dim": 64, "hidden_size": 2048, "num_hidden_layers": 16, "tie_word_embeddings": True}
MILLION = QWEN_2_5 | {"max_position_embeddings": 1010000, "rope_theta": 1e7}
MILLION["dual_chunk_attention_config"] = {"chunk_size": 262144, "original_max_position_embeddings": 262144}
OF_LLAMA_2 = {"architecture": "LlamaForCausalLM", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
OF_LLAMA_2 |= {"window": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "head_dim": 128, "norm_eps": 1e-5}
LINEAR: dict[str, Any] = {"type": "linear", "factor": 2}
# Keys of other families, with values that change nothing.
NEUTRAL = {"num_experts": 0, "final_logit_softcapping": None, "logit_scale": 1.0, "no_rope_layers": []}
NEUTRAL |= {"use_mrope": False, "layer_types": ["full_attention"] * 32}
READ: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA_2, OF_LLAMA_2 | {"dtype": "float16", "bos_id": 1, "eos_ids": (2,), "rope": RopeConfig(), "tied": False}),
    (LLAMA_2 | NEUTRAL, OF_LLAMA_2),
    (LLAMA_2 | {"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    (LLAMA_2 | {"torch_dtype": "torch.bfloat16"}, {"dtype": "bfloat16"}),
    (LLAMA_3, {"window": 131072, "n_kv_heads": 8, "bos_id": 128000, "eos_ids": (128001, 128008, 128009)}),
    (LLAMA_3, {"rope": RopeConfig("llama3", theta=500000.0, factor=8.0, original_window=8192)}),
    (LLAMA_2 | scaled(type="ntk", factor=8, rope_theta=1e6), {"rope": RopeConfig("ntk", theta=1e6, factor=8.0)}),
    # Without a factor, YaRN takes the ratio of the windows.
    (LLAMA_2 | scaled(rope_type="yarn", original_max_position_embeddings=1024), {"rope": RopeConfig("yarn", **RATIO)}),
    (LLAMA_2 | scaled(**LINEAR), {"rope": RopeConfig("linear", factor=2.0)}),
    (
        LLAMA_2 | scaled(**LINEAR) | {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5}},
        {"rope": RopeConfig("linear", theta=5e5, factor=2.0)},
    ),
    (LLAMA_3_2, {"tied": True, "head_dim": 64, "n_layers": 16}),
    (MISTRAL, {"sliding_window": 4096}),
    (MISTRAL | {"sliding_window": None, "num_key_value_heads": None}, {"sliding_window": None, "n_kv_heads": 32}),
    (LLAMA_2 | {"sliding_window": 4096}, {"sliding_window": None}),
    (NEMO, {"head_dim": 128, "n_heads": 32, "hidden_size": 5120, "rope": RopeConfig(theta=1e6), "window": 1024000}),
    (QWEN_2_5, {"biases": ("q", "k", "v"), "sliding_window": None, "head_dim": 128, "window": 32768}),
    (QWEN_2_5, {"rope": RopeConfig(theta=1e6), "eos_ids": (151645,)}),
    (MILLION, {"window": 262144}),
    (QWEN_3, {"head_dim": 128, "n_heads": 16, "biases": (), "sliding_window": None, "tied": True}),
    (QWEN_3 | {"attention_bias": True}, {"biases": ("q", "k", "v", "o")}),
    (MINISTRAL_3, {"architecture": "Ministral3ForCausalLM", "weight_prefix": "language_model.", "tied": True}),
    (MINISTRAL_3, {"extra": {"query_beta": 0.1, "query_length": 16384}, "dtype": "bfloat16", "eos_ids": (2,)}),
    (MINISTRAL_3, {"rope": RopeConfig("yarn", 1e6, 16.0, 16384, mscale=1.0, mscale_all_dim=1.0), "window": 262144}),
]


@pytest.mark.parametrize(("published", "expected"), READ)
def test_published_configs(tmp_path: Path, published: dict[str, Any], expected: dict[str, Any]) -> None:
    config = read(tmp_path, published)
    assert {name: getattr(config, name) for name in expected} == expected


OPTIONAL = (
    *("architectures", "max_position_embeddings", "rms_norm_eps", "num_key_value_heads", "rope_theta", "hidden_act"),
    *("sliding_window", "bos_token_id", "eos_token_id", "torch_dtype", "tie_word_embeddings", "rope_scaling"),
)


def named(config: Mapping[str, Any], model_type: str, architecture: str) -> dict[str, Any]:
    return {**config, "model_type": model_type, "architectures": [architecture]}


FAMILIES = [
    *(LLAMA_2, MISTRAL, named(LLAMA_2, "qwen2", "Qwen2ForCausalLM"), named(LLAMA_2, "qwen3", "Qwen3ForCausalLM")),
    named(LLAMA_2, "ministral3", "Ministral3ForCausalLM"),
    named(LLAMA_2 | {"vocab_size": 100352}, "olmo2", "Olmo2ForCausalLM"),
    named(LLAMA_2 | {"vocab_size": 32064}, "phi3", "Phi3ForCausalLM"),
]


@pytest.mark.parametrize("published", FAMILIES, ids=lambda published: published["model_type"])
def test_missing_keys_take_the_defaults_of_transformers(tmp_path: Path, published: dict[str, Any]) -> None:
    least = without(published, *OPTIONAL)
    config, expected = read(tmp_path, least), CONFIG_MAPPING[published["model_type"]](**least)
    assert config.n_kv_heads == expected.num_key_value_heads
    assert config.head_dim == getattr(expected, "head_dim", 4096 // 32)
    assert (config.window, config.norm_eps) == (expected.max_position_embeddings, expected.rms_norm_eps)
    scaling = expected.rope_parameters
    assert config.rope.theta == scaling["rope_theta"]
    assert config.rope.kind == scaling["rope_type"].replace("default", "none")
    for name in {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"} & set(scaling):
        assert getattr(config.rope, name) == scaling[name], name
    assert config.rope.original_window == scaling.get("original_max_position_embeddings")
    assert config.extra.get("query_beta") == scaling.get("llama_4_scaling_beta")
    assert config.extra.get("query_length") == scaling.get("original_max_position_embeddings")
    assert config.sliding_window == getattr(expected, "sliding_window", None)
    ends = () if expected.eos_token_id is None else (expected.eos_token_id,)
    assert (config.bos_id, config.eos_ids) == (expected.bos_token_id, ends)
    assert (config.tied, config.dtype) == (expected.tie_word_embeddings, None)


@pytest.mark.parametrize("name", ["gemma3_text", "olmo3", "smollm3"])
def test_missing_keys_of_families_whose_layers_differ(tmp_path: Path, name: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 12, "vocab_size": 260000}
    sizes |= {} if name == "gemma3_text" else {"num_attention_heads": 16}
    config, expected = read(tmp_path, sizes | {"model_type": name}), CONFIG_MAPPING[name](**sizes)
    assert (config.n_heads, config.n_kv_heads) == (expected.num_attention_heads, expected.num_key_value_heads)
    assert config.head_dim == getattr(expected, "head_dim", 64 // 16)
    assert (config.window, config.norm_eps) == (expected.max_position_embeddings, expected.rms_norm_eps)
    assert (config.bos_id, config.eos_ids) == (expected.bos_token_id, (expected.eos_token_id,))
    assert config.tied == expected.tie_word_embeddings
    ropes, rotated = expected.rope_parameters, getattr(expected, "no_rope_layers", [1] * 12)
    assert config.rope == RopeConfig(theta=ropes.get("full_attention", ropes)["rope_theta"])
    for kind, attention, rotates in zip(config.layer_kinds, expected.layer_types, rotated, strict=True):
        is_full = attention == "full_attention"
        assert kind.sliding_window == (None if is_full else expected.sliding_window)
        assert kind.rope == (None if is_full else RopeConfig(theta=ropes[attention]["rope_theta"]))
        assert kind.rotated == bool(rotates)


TINY: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
TINY |= {"num_hidden_layers": 1, "num_attention_heads": 4}
LLAMA_3_1: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
SCALINGS: list[tuple[dict[str, Any], RopeConfig]] = [
    ({"rope_type": "default", "rope_theta": 5e5}, RopeConfig(theta=5e5)),
    ({"rope_type": "linear", "factor": 4.0}, RopeConfig("linear", factor=4.0)),
    ({"rope_type": "dynamic", "factor": 2.0}, RopeConfig("dynamic", factor=2.0)),
    (
        {**YARN, "original_max_position_embeddings": 512, "beta_fast": 16, "truncate": False},
        RopeConfig("yarn", factor=4.0, original_window=512, beta_fast=16.0, truncate=False),
    ),
    (
        {**YARN, "attention_factor": 1.2, "mscale": 1.0, "mscale_all_dim": 0.7},
        RopeConfig("yarn", factor=4.0, original_window=2048, attention_factor=1.2, mscale=1.0, mscale_all_dim=0.7),
    ),
    (
        LLAMA_3_1 | {"original_max_position_embeddings": 256},
        RopeConfig("llama3", factor=8.0, original_window=256, high_freq_factor=2.0),
    ),
]


@pytest.mark.parametrize(("scaling", "expected"), SCALINGS)
def test_both_layouts_of_every_scaling(tmp_path: Path, scaling: dict[str, Any], expected: RopeConfig) -> None:
    LlamaConfig(**TINY, max_position_embeddings=2048, rope_parameters=dict(scaling)).save_pretrained(tmp_path)
    assert read_config(Source(tmp_path)).rope == expected  # transformers fills in original_window

    older = {"type": scaling["rope_type"]} | without(scaling, "rope_type", "rope_theta")
    older |= {} if expected.original_window is None else {"original_max_position_embeddings": expected.original_window}
    theta = scaling.get("rope_theta", 10000)
    assert read(tmp_path, LLAMA_2 | {"rope_scaling": older, "rope_theta": theta}).rope == expected


def test_missing_keys_are_named_with_their_defaults(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="num_key_value_heads is missing, which means 32; expected a divisor of num_a"):
        read(tmp_path, without(QWEN_3, "num_key_value_heads"))
    with pytest.raises(ModelError, match="hidden_size is missing; expected"):
        read(tmp_path, without(LLAMA_2, "hidden_size"))


def test_the_identity_covers_what_changes_results(tmp_path: Path) -> None:
    """Every size and number, and nothing that only a text's ends or the files' layout depend on."""
    base = read(tmp_path, NEMO)
    changes: list[dict[str, Any]] = [
        *(
            {"rms_norm_eps": 1e-6},
            {"rope_theta": 5e5},
            {"sliding_window": 4096},
            {"head_dim": 64, "vocab_size": 131073},
        ),
        *(
            {"num_attention_heads": 64},
            {"num_key_value_heads": 16},
            {"max_position_embeddings": 4096},
            scaled(**LINEAR),
        ),
    ]
    others = [read(tmp_path, NEMO | change).identity("w") for change in changes]
    assert len({base.identity("w"), base.identity("v"), *others}) == len(changes) + 2
    same = read(tmp_path, NEMO | {"eos_token_id": 7, "bos_token_id": 9, "torch_dtype": "float16", "comment": 1})
    assert same.identity("w") == base.identity("w")
    betas = [{"llama_4_scaling_beta": beta} for beta in (0.1, 0.2)]
    text: dict[str, Any] = MINISTRAL_3["text_config"]
    ministrals = [text | {"rope_parameters": text["rope_parameters"] | beta} for beta in betas]
    assert len({read(tmp_path, MINISTRAL_3 | {"text_config": config}).identity("w") for config in ministrals}) == 2


def test_the_ends_of_text_of_both_files(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA_2, {"eos_token_id": [7, 9], "bos_token_id": 3})
    assert (config.bos_id, config.eos_ids) == (1, (7, 9, 2))
    config = read(tmp_path, LLAMA_2 | {"eos_token_id": None, "bos_token_id": None}, {"eos_token_id": 7})
    assert (config.bos_id, config.eos_ids) == (None, (7,))
    assert read(tmp_path, without(LLAMA_2, "eos_token_id"), {"eos_token_id": 7}).eos_ids == (7,)
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id is 99999; expected token ids"):
        read(tmp_path, LLAMA_2, {"eos_token_id": 99999})


NUMBERS = [0, -1, 1.5, 4096.0, True, "4096", [4096], float("nan"), float("inf"), 10**400, 2**40]
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window"),
)


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", NUMBERS)
def test_bad_sizes_are_refused(tmp_path: Path, key: str, value: object) -> None:
    expected = rf"config\.json: {key} is .*; expected a whole number from 1 to \d+; "
    with pytest.raises(ModelError, match=expected) as caught:
        read(tmp_path, MISTRAL | {key: value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


LLAMA_3_ROPE: dict[str, Any] = LLAMA_3["rope_scaling"]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": None}, "vocab_size is None; expected a whole number"),
    ({"num_key_value_heads": 5}, "num_key_value_heads is 5; expected a divisor of num_attention_heads, which is 32"),
    ({"hidden_size": 4100}, "hidden_size is 4100; expected a multiple of num_attention_heads, 32"),
    ({"head_dim": 127}, "head_dim is 127; expected an even number"),
    ({"hidden_size": 96}, "head_dim is missing; expected an even number"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0; expected a number"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; expected true or false"),
    ({"architectures": ["LlamaForCausalML"]}, "architectures is .*; expected a supported one: Gemma3ForConditi"),
    ({"architectures": "LlamaForCausalLM"}, "architectures is .*; expected a list of names"),
    ({"architectures": ["MistralForCausalLM"]}, "model_type is 'llama'; expected 'mistral'"),
    ({"architectures": None, "model_type": None}, "architectures is None; expected a supported one: Gemma3F"),
    ({"model_type": "gpt2"}, "model_type is 'gpt2'; expected a supported one: gemma3, gemma3_text"),
    ({"model_type": 3}, "model_type is 3; expected a string"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is .*gptq.*before its quantization"),
    ({"layer_types": ["full_attention", "sliding_attention"] * 16}, "expected one kind of attention in all layers"),
    ({"layer_types": ["linear_attention"] * 32}, "expected one kind of attention in all layers, full_attention or"),
    ({"layer_types": ["full_attention"] * 31}, "expected one for each of the 32 layers"),
    ({"layer_types": ["sliding_attention"] * 32}, "expected full_attention in all layers, as the sliding window says"),
    ({"num_local_experts": 8}, "num_local_experts is 8; expected null or 0: lce does not implement it"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; expected null: lce does not implement it"),
    ({"logits_scaling": 8.0}, "logits_scaling is 8.0; expected null or 1"),
    ({"no_rope_layers": [1, 1, 1, 0]}, r"no_rope_layers is \[1, 1, 1, 0\]; expected null or \[\]"),
    ({"rope_local_base_freq": 10000.0}, "rope_local_base_freq is 10000.0; expected null: lce does not implement it"),
    ({"norms_plus_one": True}, "norms_plus_one is True; expected null or 0"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True; expected null or 0"),
    ({"hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation is 'gelu_pytorch_tanh'; expected 'silu'"),
    ({"sliding_window_pattern": 6}, "sliding_window_pattern is 6; expected null"),
    ({"qk_norm": True}, "qk_norm is True; expected null or 0"),
    ({"layer_types": [3]}, "layer_types is .*; expected a list of names"),
    ({"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "yarn"}}, "the same rope_type as in rope_scaling, {'f"),
    ({"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 4}}, "expected the same factor as in rope_scal"),
    ({"torch_dtype": "float64"}, "torch_dtype is 'float64'; expected one of float32, bfloat16, float16"),
    ({"dtype": 16}, "dtype is 16; expected a string"),
    ({"bos_token_id": 32000}, "bos_token_id is 32000; expected token ids below the vocab_size of 32000"),
    ({"eos_token_id": [2, -1]}, r"eos_token_id is \[2, -1\]; expected token ids"),
    ({"eos_token_id": True}, "eos_token_id is True; expected token ids"),
    ({"rope_theta": 0}, "rope_theta is 0; expected a number from 2"),
    ({"rope_theta": float("nan")}, "rope_theta is nan; expected a number"),
    ({"rope_theta": 10**400}, "rope_theta is 1000.*; expected a number"),
    ({"rope_parameters": {"rope_theta": 0.0}}, "rope_parameters: rope_theta is 0.0; expected a number"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected null or one flat object"),
    ({"rope_parameters": {"full_attention": {}}}, "expected null or one flat object for all layers"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; expected 1.0"),
    (scaled(type="linear", factor=0), "rope_scaling: factor is 0; expected a number from 1"),
    (scaled(type="linear", factor=float("nan")), "factor is nan; expected a number from 1"),
    (scaled(type="linear"), "factor is missing; expected a number from 1"),
    (scaled(factor=2.0), "rope_type is missing; expected the kind of scaling"),
    (scaled(type="linear", rope_type="yarn", factor=2.0), "rope_type is 'yarn'; expected the same as type"),
    (scaled(rope_type="longrope", factor=2.0), "rope_type is 'longrope'; expected a supported scaling: none, linear"),
    (scaled(type="proportional", factor=2.0), "type is 'proportional'; expected a supported scaling"),
    (scaled(rope_type=["yarn"], factor=2.0), "rope_type is .*; expected a string"),
    (scaled(**LLAMA_3_ROPE | {"high_freq_factor": 1.0}), "high_freq_factor is 1.0; expected more than low_freq_factor"),
    (scaled(rope_type="yarn", factor=2, beta_fast=0.5), "beta_fast is 0.5; expected at least beta_slow"),
    (scaled(rope_type="yarn", factor=2, truncate=0), "truncate is 0; expected true or false"),
    (scaled(rope_type="dynamic", factor=2.0) | {"head_dim": 2}, "head_dim is 2; expected 4 or more"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_lce_cannot_run_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path, LLAMA_2 | change)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON: Expecting value"),
        (b"{", "not valid JSON: Expecting"),
        (b"[1, 2]", "holds a list; expected a JSON object"),
        (b"null", "holds a NoneType; expected a JSON object"),
        (b'{"model_type": "\xff"}', "not valid JSON: byte 16 is not UTF-8"),
        (b"[" * 200_000, "not valid JSON: nested too deeply"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON: a number of thousands of digits"),
        (b'{"a":[0' + b",0" * 2_000_000 + b"]}", "more than 1000000 JSON values"),
        (b" " * (17 << 20), "is larger than 16777216 bytes"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_files_that_are_no_json_objects(tmp_path: Path, name: str, raw: bytes, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2))
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ModelError, match=f"{name}:? {message}"):
        read_config(Source(tmp_path))


def test_folders_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist; expected a checkpoint's folder"):
        read_config(Source(tmp_path / "missing"))
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match="is not a folder; expected a checkpoint's folder"):
        read_config(Source(tmp_path / "weights.bin"))
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_config(Source(tmp_path))
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"config\.json is a FIFO; expected a regular file"):
        read_config(Source(tmp_path))
    with pytest.raises(ModelError, match="does not exist"):
        read_config(Source(tmp_path / ("long" * 1000)))


TEXT = st.text(alphabet='a"\\\n\ud800é', max_size=4)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
ANY_KEY = sorted({*NEMO, "rope_parameters", "layer_types", "max_window_layers", "use_sliding_window"})
SCALING_KEYS = ("llama_4_scaling_beta", "original_max_position_embeddings", "beta_fast", "low_freq_factor")
SCALING_KEYS += ("rope_type", "type", "factor")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    base=st.sampled_from([NEMO, *FAMILIES]),
    inside=st.booleans(),
    change=st.dictionaries(st.sampled_from(ANY_KEY), ANYTHING, max_size=3),
    scaling=st.dictionaries(st.sampled_from(SCALING_KEYS), ANYTHING | st.sampled_from(["yarn", "llama3", "ntk", 2.0])),
)
def test_any_value_is_read_or_refused(
    folder: Path, base: dict[str, Any], inside: bool, change: dict[str, Any], scaling: dict[str, Any]
) -> None:
    message = ""
    published = base | {"rope_scaling": scaling} | change
    if inside:
        published = named({"text_config": published}, "mistral3", "Mistral3ForConditionalGeneration")
    try:
        config = read(folder, published)
        assert config.n_heads % config.n_kv_heads == 0
        assert config.rope.factor >= 1
    except ModelError as error:
        message = str(error)
    assert "\n" not in message
    message.encode()
