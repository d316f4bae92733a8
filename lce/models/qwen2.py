"""Qwen2 and Qwen2.5 (Yang et al., 2024), dense: Llama's architecture with a bias on queries, keys and values."""

from dataclasses import replace

from lce.models.config import Fields, ModelConfig
from lce.models.layers import family
from lce.models.llama import Llama


@family("qwen2", "Qwen2ForCausalLM")
class Qwen2(Llama):
    """Llama with biases on queries, keys and values. The sliding window is off unless `use_sliding_window` is true."""

    defaults = {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    @classmethod
    def configure(cls, config: ModelConfig, fields: Fields) -> ModelConfig:
        return replace(config, biases=("q", "k", "v"), sliding_window=sliding_window(fields))


def sliding_window(fields: Fields) -> int | None:
    """Return the sliding window of all layers, or None. Raises ModelError if only some layers have a window.

    In the published models the first `max_window_layers` layers attend all tokens. If config.json has a list
    `layer_types`, the list decides.
    """
    window = fields.optional_integer("sliding_window")
    if window is None or not fields.flag("use_sliding_window"):
        return None
    if kinds := fields.names("layer_types"):
        return window if kinds[0] == "sliding_attention" else None
    n_layers = fields.integer("num_hidden_layers")
    n_full = fields.integer("max_window_layers", within=(0, 2**20))
    if 0 < n_full < n_layers:
        expected = f"0 or at least num_hidden_layers, {n_layers}: one kind of attention in all layers"
        remedy = "set use_sliding_window to false, or use another checkpoint"
        raise fields.refusal("max_window_layers", expected, remedy)
    return window if n_full == 0 else None
