"""Qwen3 (Yang et al., 2025), dense: Llama's architecture with a norm on each head's queries and keys."""

from dataclasses import replace

from torch import Tensor

from lce.models.config import Fields, ModelConfig
from lce.models.layers import family
from lce.models.llama import Llama, LlamaLayer
from lce.models.products import norm_heads
from lce.models.qwen2 import Qwen2, sliding_window


class Qwen3Layer(LlamaLayer):
    def attended(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.heads(x, norm="attention_norm")
        q, k = norm_heads(q, self.w["q_norm"], k, self.w["k_norm"], self.eps)
        return q, k, v


@family("qwen3", "Qwen3ForCausalLM")
class Qwen3(Llama):
    """Llama with norms of queries and keys, over a head's D channels, before RoPE. All heads share the norm weights."""

    defaults = Qwen2.defaults | {"head_dim": 128}
    layer = Qwen3Layer
    layer_weights = Llama.layer_weights | {
        "q_norm": ("self_attn.q_norm.weight", "head_dim"),
        "k_norm": ("self_attn.k_norm.weight", "head_dim"),
    }

    @classmethod
    def configure(cls, config: ModelConfig, fields: Fields) -> ModelConfig:
        biases = ("q", "k", "v", "o") if fields.flag("attention_bias") else ()
        return replace(config, biases=biases, sliding_window=sliding_window(fields))
