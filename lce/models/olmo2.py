"""OLMo 2 (Walsh et al., 2024): Llama's architecture with norms behind attention and MLP instead of before them."""

from torch import Tensor

from lce.models.config import Fields, ModelConfig
from lce.models.layers import Attend, family
from lce.models.llama import Llama, LlamaLayer
from lce.models.products import cast, merge_heads


class Olmo2Layer(LlamaLayer):
    """A decoder layer: attention, then a gated MLP. The results are normalised and added to the hidden states."""

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        self.normed(self.project("o", merge_heads(attend(self.index, *self.attended(x)))), "attention_norm", onto=x)
        inner = self.project("gate_up", cast(x, self.dtype), gate="silu")
        return self.normed(self.project("down", inner), "mlp_norm", onto=x)

    def attended(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config, dim = self.config, self.config.head_dim
        widths = config.n_heads * dim, config.n_kv_heads * dim, config.n_kv_heads * dim
        q, k, v = self.project("qkv", cast(x, self.dtype)).split_with_sizes(widths, dim=-1)
        q, k = self.normed(q, "q_norm"), self.normed(k, "k_norm")
        q, k, v = (rows.unflatten(-1, (-1, dim)).transpose(0, 1) for rows in (q, k, v))
        return q, k, v


@family("olmo2", "Olmo2ForCausalLM")
class Olmo2(Llama):
    """Llama with norms of the results of attention and MLP, and norms of queries and of keys, over all their heads."""

    defaults = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
    layer = Olmo2Layer
    layer_weights = Llama.layer_weights | {
        "q_norm": ("self_attn.q_norm.weight", "query"),
        "k_norm": ("self_attn.k_norm.weight", "key"),
        "attention_norm": ("post_attention_layernorm.weight", "hidden"),
        "mlp_norm": ("post_feedforward_layernorm.weight", "hidden"),
    }

    @classmethod
    def configure(cls, config: ModelConfig, fields: Fields) -> ModelConfig:
        if fields.flag("mlp_bias"):
            raise fields.refusal("mlp_bias", "false")
        return super().configure(config, fields)
