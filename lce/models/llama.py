"""The Llama architecture, which Mistral shares: what the weights are called, and what is done with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from lce.models.config import ModelConfig
from lce.models.layers import linear, rms_norm
from lce.weights.checkpoint import WeightSpec

# The attention hook: (layer, q [H, T, D], k [G, T, D], v [G, T, D]), all unrotated, to [H, T, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

# Ours to the published name.
_MODEL_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
IGNORED = ("*.rotary_emb.inv_freq",)  # old checkpoints carry the frequencies; ours come from the config


def weight_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    """Every weight of the model: our name to the published name and shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "q": (q_dim, hidden),
        "k": (kv_dim, hidden),
        "v": (kv_dim, hidden),
        "o": (hidden, q_dim),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if config.attention_bias:
        shapes |= {"q_bias": (q_dim,), "k_bias": (kv_dim,), "v_bias": (kv_dim,), "o_bias": (hidden,)}
    if config.mlp_bias:
        shapes |= {"gate_bias": (inner,), "up_bias": (inner,), "down_bias": (hidden,)}
    specs = {"embed": WeightSpec(_MODEL_NAMES["embed"], (config.vocab_size, hidden))}
    for i in range(config.n_layers):
        for name, shape in shapes.items():
            specs[f"{i}.{name}"] = WeightSpec(f"model.layers.{i}.{_LAYER_NAMES[name]}", shape)
    specs["norm"] = WeightSpec(_MODEL_NAMES["norm"], (hidden,))
    if not config.tied:
        specs["head"] = WeightSpec(_MODEL_NAMES["head"], (config.vocab_size, hidden))
    return specs


class Layer:
    """One decoder layer: attention, then the gated MLP, each on the normalised stream and added back to it."""

    def __init__(self, index: int, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.index = index
        self.config = config
        self.w = {name: weights.get(f"{index}.{name}") for name in _LAYER_NAMES}

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        """Hidden states `[T, hidden]` to the next layer's, in place."""
        x += self.attention(self.norm(x, "attention_norm"), attend)
        x += self.mlp(self.norm(x, "mlp_norm"))
        return x

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.w[name]
        assert weight is not None, name
        return rms_norm(x, weight, self.config.norm_eps)

    def attention(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = (self.project(x, name).unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1) for name in "qkv")
        out = attend(self.index, q, k, v)  # [H, T, D]
        return self.project(out.transpose(0, 1).flatten(1), "o")

    def mlp(self, x: Tensor) -> Tensor:
        return self.project(F.silu(self.project(x, "gate"), inplace=True).mul_(self.project(x, "up")), "down")

    def project(self, x: Tensor, name: str) -> Tensor:
        weight = self.w[name]
        assert weight is not None, name
        return linear(x, weight, self.w.get(f"{name}_bias"))


class Llama:
    """Embedding, layers, norm, head; the weights are views of the checkpoint and are never written."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.embed = weights["embed"]
        self.layers = [Layer(i, config, weights) for i in range(config.n_layers)]
        self.final_norm = weights["norm"]
        self.head = weights["embed"] if config.tied else weights["head"]

    def __call__(self, ids: Tensor, attend: Attend) -> Tensor:
        """Token ids `[T]` to the last layer's hidden states `[T, hidden]`; `attend` is the hook."""
        x = F.embedding(ids, self.embed)
        for layer in self.layers:
            x = layer(x, attend)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states `[T, hidden]` to logits `[T, vocab]`, float32."""
        return linear(rms_norm(x, self.final_norm, self.config.norm_eps), self.head).to(torch.float32)
