"""Gemma 3 (Gemma Team, 2025), text: five of six layers have a sliding window, with a RoPE of their own."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lce.models.config import SLIDING_KEYS, Fields, ModelConfig, sliding_kinds
from lce.models.layers import Attend, family
from lce.models.llama import Llama, LlamaLayer
from lce.models.products import merge_heads
from lce.models.qwen3 import Qwen3


class Gemma3Layer(LlamaLayer):
    """A decoder layer: attention, then an MLP with a GELU gate. Norms stand before and behind both.

    The weights of norms are float32, because bfloat16 would round the sum of 1 and what is stored.
    """

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        out = merge_heads(attend(self.index, *self.attended(x)))
        self.normed(self.project("o", out), "after_attention_norm", onto=x)
        inner = self.project("gate_up", self.normed(x, "mlp_norm"), gate="gelu_tanh")
        return self.normed(self.project("down", inner), "after_mlp_norm", onto=x)

    def attended(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.heads(self.normed(x, "attention_norm"))
        return self.normed(q, "q_norm"), self.normed(k, "k_norm"), v


@family("gemma3_text", "Gemma3ForCausalLM")
class Gemma3Text(Llama):
    """A model with layers of two kinds, norms of queries and keys, and an embedding that is multiplied by √hidden.

    A norm multiplies by 1 plus the stored weight, or by the stored weight if the config says `norms_plus_one`, as for
    GGUF files. Queries are divided by √`query_pre_attn_scalar` in place of √D: their norm makes up the difference.
    """

    defaults = {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    }
    implements = (
        *SLIDING_KEYS,
        *("query_pre_attn_scalar", "rope_local_base_freq", "sliding_window_pattern", "norms_plus_one"),
    )
    activation = "gelu_pytorch_tanh"
    layer = Gemma3Layer
    wide = ("attention_norm", "q_norm", "k_norm", "after_attention_norm", "mlp_norm", "after_mlp_norm")
    layer_weights = Qwen3.layer_weights | {
        "after_attention_norm": ("post_attention_layernorm.weight", "hidden"),
        "mlp_norm": ("pre_feedforward_layernorm.weight", "hidden"),
        "after_mlp_norm": ("post_feedforward_layernorm.weight", "hidden"),
    }

    @classmethod
    def configure(cls, config: ModelConfig, fields: Fields) -> ModelConfig:
        interval = fields.integer("sliding_window_pattern", within=(1, 1024))
        extra = {
            "norm_offset": 0.0 if fields.flag("norms_plus_one") else 1.0,
            "query_scalar": fields.number("query_pre_attn_scalar", within=(1e-6, 1e6)),
        }
        kinds = sliding_kinds(fields, config, interval, theta=fields.number("rope_local_base_freq"))
        biases = ("q", "k", "v", "o") if fields.flag("attention_bias") else ()
        rope = config.rope
        if rope.kind == "linear":  # the window that a config announces is the scaled one
            rope = replace(rope, original_window=max(1, int(config.window / float(rope.factor))))
        return replace(config, biases=biases, rope=rope, layer_kinds=kinds, extra=extra)

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any]) -> None:
        offset, to_query = config.extra["norm_offset"], math.sqrt(config.head_dim / config.extra["query_scalar"])
        norms = {name: w.float() + offset for name, w in weights.items() if name.endswith("norm")}
        norms |= {name: w * to_query for name, w in norms.items() if name.endswith("q_norm")}
        super().__init__(config, {**weights, **{name: w.to(weights[name].dtype) for name, w in norms.items()}})
        self.embedding_scale = float(torch.tensor(math.sqrt(config.hidden_size), dtype=self.final_norm.dtype))

    def embedded(self, ids: Tensor) -> Tensor:
        return super().embedded(ids).mul_(self.embedding_scale)
