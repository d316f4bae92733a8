"""SmolLM3 (Hugging Face, 2025): Llama's architecture with layers that do not rotate queries and keys."""

from dataclasses import replace

from lce.models.config import LAYER_TYPES, Fields, LayerKind, ModelConfig, layer_types
from lce.models.layers import family
from lce.models.llama import Llama


@family("smollm3", "SmolLM3ForCausalLM")
class SmolLM3(Llama):
    """Llama without RoPE in every fourth layer (NoPE, Kazemnejad et al., 2023); layers without may have a window.

    `no_rope_layers` in config.json has a 1 for each layer with RoPE, a 0 for each without. If the list is missing, one
    of `no_rope_layer_interval` layers has no RoPE, the last one. With `use_sliding_window`, `layer_types` says which
    layers have the sliding window: by default those without RoPE.
    """

    defaults = {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    }
    implements = ("no_rope_layers", "no_rope_layer_interval", "layer_types")

    @classmethod
    def configure(cls, config: ModelConfig, fields: Fields) -> ModelConfig:
        config = super().configure(config, fields)
        full, sliding = LAYER_TYPES
        window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None
        rotated = _rotated(fields, config.n_layers)
        types = layer_types(fields, [full if window is None or rotates else sliding for rotates in rotated])
        if window is None and sliding in types:
            raise fields.refusal("layer_types", f"{full} in all layers, as use_sliding_window and sliding_window say")
        windows = [window if kind == sliding else None for kind in types]
        kinds = (LayerKind(own, rotated=rotates) for own, rotates in zip(windows, rotated, strict=True))
        return replace(config, layer_kinds=tuple(kinds))


def _rotated(fields: Fields, n_layers: int) -> list[bool]:
    """Return which layers rotate queries and keys."""
    listed = fields.values.get("no_rope_layers")
    if listed is None:
        interval = fields.integer("no_rope_layer_interval", within=(1, 1024))
        return [(i + 1) % interval != 0 for i in range(n_layers)]
    found = listed[:n_layers] if isinstance(listed, list) else []
    if len(found) < n_layers or not all(type(rotates) is int and rotates in (0, 1) for rotates in found):
        raise fields.refusal("no_rope_layers", f"a 0 or a 1 for each of the {n_layers} layers")
    return [rotates == 1 for rotates in found]
