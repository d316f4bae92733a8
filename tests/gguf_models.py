"""Writes models of transformers as GGUF files, in the layout that llama.cpp's conversion gives them.

Names are those of the `gguf` package. Rows of q and k are permuted, Gemma's norms have 1 added, and the divisors of
llama3 scaling are a tensor, each as conversion does it.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.gguf_files import write_gguf

ARCHITECTURES = {"mistral": "llama", "ministral3": "mistral3", "gemma3_text": "gemma3", "olmo3": "olmo2"}
PERMUTED = ("llama", "mistral3", "smollm3")


def save_gguf(path: Path, model: Any, types: Any = "F32", arch: str = "", **changes: Any) -> Path:
    """Write a model and the tokenizer of `save_tokenizer`; `changes` are over the metadata, None leaves a key out."""
    config = model.config
    arch = arch or ARCHITECTURES.get(config.model_type, config.model_type)
    metadata = {"general.architecture": arch} | {f"{arch}.{key}": x for key, x in sizes(config).items()}
    metadata |= vocabulary(path.parent) | {key.replace("ARCH", arch): value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return write_gguf(path, tensors(model, arch), types, metadata)[0]


def as_saved(folder: Path) -> SimpleNamespace:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    weights = load_file(folder / "model.safetensors")
    return SimpleNamespace(config=SimpleNamespace(**config), state_dict=lambda: weights)


def tensors(model: Any, arch: str) -> dict[str, np.ndarray]:
    config = model.config
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch in PERMUTED and ".q_proj." in name:
            weight = permuted(weight, config.num_attention_heads)
        if arch in PERMUTED and ".k_proj." in name:
            weight = permuted(weight, config.num_key_value_heads)
        if arch == "gemma3" and name.endswith("norm.weight"):
            weight = weight + 1
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored, name
        found[stored] = weight.float().numpy()
    if scaling(config)["rope_type"] == "llama3":
        found["rope_freqs.weight"] = divisors(scaling(config), head_dim(config))
    return found


def permuted(weight: Tensor, n_heads: int) -> Tensor:
    """Rows of a head: the first half and the second alternate."""
    return torch.cat([torch.stack(head.chunk(2), dim=1).flatten(0, 1) for head in weight.chunk(n_heads)])


def divisors(rope: dict[str, Any], dim: int) -> np.ndarray:
    """Of the frequencies, by llama3 scaling."""
    low, high, window = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    found = []
    for i in range(dim // 2):
        turns = window * rope["rope_theta"] ** (-2 * i / dim) / (2 * math.pi)
        kept = (turns - low) / (high - low)
        whole = 1.0 if turns > high else rope["factor"]
        found.append(1 / ((1 - kept) / rope["factor"] + kept) if low <= turns <= high else whole)
    return np.array(found, np.float32)


def sizes(config: Any) -> dict[str, Any]:
    """The metadata under the architecture's name."""
    rope, dim = scaling(config), head_dim(config)
    found = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        **dict.fromkeys(("rope.dimension_count", "attention.key_length", "attention.value_length"), dim),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        names = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}
        for key, stored in (names | {"mscale_all_dim": "log_multiplier"}).items():
            if rope.get(key) is not None:
                found[f"rope.scaling.yarn_{stored}"] = float(rope[key])
    if config.model_type == "ministral3":
        found["attention.temperature_scale"] = float(rope["llama_4_scaling_beta"])
    if config.model_type in ("gemma3_text", "olmo3"):
        found["attention.sliding_window"] = config.sliding_window
    sixth = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(config.num_hidden_layers)]
    if config.model_type == "olmo3" or (config.model_type == "gemma3_text" and config.layer_types != sixth):
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    return found


def vocabulary(folder: Path) -> dict[str, Any]:
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types, merges = [3, 3] + [1] * (len(tokens) - 2), [" ".join(pair) for pair in model["merges"]]
    found = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": merges}
    found |= {"bos_token_id": 0, "eos_token_id": 1, "add_bos_token": True}
    return {f"tokenizer.ggml.{name}": value for name, value in found.items()}


def head_dim(config: Any) -> int:
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dim


def scaling(config: Any) -> dict[str, Any]:
    rope: dict[str, Any] = config.rope_parameters
    return rope.get("full_attention", rope)
