"""Ministral 3 (Mistral AI, 2025): Mistral's architecture with YaRN, and queries that grow with their index."""

from dataclasses import replace

import torch
from torch import Tensor

from lce.models.config import Fields, ModelConfig, rope_section
from lce.models.layers import Attend, family
from lce.models.mistral import Mistral


@family("ministral3", "Ministral3ForCausalLM")
class Ministral3(Mistral):
    """A Mistral model that multiplies query i by `1 + beta * ln(1 + floor(i / L))`.

    L is the window before YaRN's scaling. As in Llama 4, the factor keeps softmax sharp over long texts. `i` is the
    query's index in the text. The factor does not depend on the position at which a method places the query, nor on the
    RoPE scaling that a user chooses. `beta` is `llama_4_scaling_beta` in config.json.
    """

    defaults = {
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    }

    @classmethod
    def configure(cls, config: ModelConfig, fields: Fields) -> ModelConfig:
        scaling = rope_section(fields)
        beta = scaling.number("llama_4_scaling_beta", within=(0, 100))
        length = scaling.integer("original_max_position_embeddings")
        config = super().configure(config, fields)
        return replace(config, extra={"query_beta": beta, "query_length": length})

    def attending(self, attend: Attend, indices: Tensor) -> Attend:
        scale = self.query_scale(indices).to(self.final_norm.dtype)

        def attend_scaled(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(layer, q * scale.to(q.device), k, v)

        return attend_scaled

    def query_scale(self, indices: Tensor) -> Tensor:
        """Return the factors `[T, 1]`, float64, by which queries at `indices [T]` in the text are multiplied."""
        spans = indices // int(self.config.extra["query_length"])
        return 1 + self.config.extra["query_beta"] * (1 + spans).to(torch.float64).log()[:, None]
