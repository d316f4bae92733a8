"""Llama 1 to 3.3 (Touvron et al., 2023; Grattafiori et al., 2024)."""

from dataclasses import replace

from torch import Tensor

from lce.models.config import Fields, ModelConfig
from lce.models.layers import Attend, Layer, Model, family
from lce.models.products import merge_heads


class LlamaLayer(Layer):
    """A decoder layer: attention, then a gated MLP. Both normalise the hidden states and add their result to them."""

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        self.project("o", merge_heads(attend(self.index, *self.attended(x))), onto=x)
        return self.project("down", self.project("gate_up", x, norm="mlp_norm", gate="silu"), onto=x)

    def attended(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what attention takes: unrotated `q [H, T, D]` and `k v [G, T, D]`."""
        return self.heads(x, norm="attention_norm")


@family("llama", "LlamaForCausalLM")
class Llama(Model):
    """A model with root-mean-square norms, RoPE, grouped-query attention and a gated MLP; the config may add biases."""

    defaults = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
    layer = LlamaLayer
    model_weights = {
        "embed": ("model.embed_tokens.weight", "vocab hidden"),
        "norm": ("model.norm.weight", "hidden"),
        "head": ("lm_head.weight", "vocab hidden"),
    }
    layer_weights = {
        "attention_norm": ("input_layernorm.weight", "hidden"),
        "q": ("self_attn.q_proj.weight", "query hidden"),
        "k": ("self_attn.k_proj.weight", "key hidden"),
        "v": ("self_attn.v_proj.weight", "key hidden"),
        "o": ("self_attn.o_proj.weight", "hidden query"),
        "mlp_norm": ("post_attention_layernorm.weight", "hidden"),
        "gate": ("mlp.gate_proj.weight", "inner hidden"),
        "up": ("mlp.up_proj.weight", "inner hidden"),
        "down": ("mlp.down_proj.weight", "hidden inner"),
    }
    joins = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
    unused = ("*.rotary_emb.inv_freq",)  # RoPE frequencies in old checkpoints; lce computes them

    @classmethod
    def configure(cls, config: ModelConfig, fields: Fields) -> ModelConfig:
        attention = ("q", "k", "v", "o") if fields.flag("attention_bias") else ()
        mlp = ("gate", "up", "down") if fields.flag("mlp_bias") else ()
        return replace(config, biases=attention + mlp)
