"""Mistral 7B and Nemo (Jiang et al., 2023): Llama's architecture without biases; some models have a sliding window."""

from dataclasses import replace

from lce.models.config import Fields, ModelConfig
from lce.models.layers import family
from lce.models.llama import Llama


@family("mistral", "MistralForCausalLM")
class Mistral(Llama):
    """Llama with the config's `sliding_window`: 4096 tokens if the key is missing, no window if its value is null."""

    defaults = Llama.defaults | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}

    @classmethod
    def configure(cls, config: ModelConfig, fields: Fields) -> ModelConfig:
        return replace(config, sliding_window=fields.optional_integer("sliding_window"))
