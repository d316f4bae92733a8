"""Models with layers of two types: full attention, and a sliding window with a RoPE of its own."""

from __future__ import annotations

from lce.models.config import LAYER_TYPES, Fields, LayerKind, ModelConfig, layer_types, read_rope

# The keys of config.json that a family implements whose layers have the kinds of `sliding_kinds`.
KEYS = ("layer_types", "rope_parameters")


def sliding_kinds(fields: Fields, config: ModelConfig, interval: int, theta: float) -> tuple[LayerKind, ...]:
    """Return the kind of each layer: a sliding window with its own RoPE, or full attention with the model's RoPE.

    `layer_types` says which layers are which; without it, one of `interval` layers has full attention, the last one.
    `theta` is the base of the RoPE of sliding windows, unless `rope_parameters` has one. `rope_scaling` does not apply.
    """
    full, sliding = LAYER_TYPES
    types = layer_types(fields, [full if (i + 1) % interval == 0 else sliding for i in range(config.n_layers)])
    window = fields.optional_integer("sliding_window")
    if window is None and sliding in types:
        raise fields.refusal("sliding_window", f"a number of tokens, as some layers have {sliding}")
    rope = read_rope(fields, config.head_dim, fields.section("rope_parameters", sliding), theta)
    return tuple(LayerKind(window, rope) if kind == sliding else LayerKind() for kind in types)
