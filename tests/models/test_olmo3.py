"""OLMo 3 against transformers: sliding windows with plain RoPE, full attention with YaRN."""

from typing import Any

from transformers import Olmo3Config

from tests.parity import FamilyTests, Kind

PLAIN = {"rope_type": "default", "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 16}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
OLMO_3: dict[str, Any] = {"pad_token_id": 0, "sliding_window": 24, "num_hidden_layers": 3, "layer_types": TYPES}
ALL = {"full_attention": YARN, "sliding_attention": PLAIN}
KINDS = {
    "olmo3": Kind(Olmo3Config, OLMO_3 | {"num_key_value_heads": 4}, {"sliding_window": 23}),
    "yarn": Kind(Olmo3Config, OLMO_3 | {"rope_parameters": ALL}, {"rope_parameters": ALL | {"full_attention": PLAIN}}),
    "tied": Kind(Olmo3Config, OLMO_3 | {"tie_word_embeddings": True}, {"layer_types": TYPES[::-1][1:] + TYPES[1:2]}),
    "every-fourth": Kind(Olmo3Config, OLMO_3 | {"num_hidden_layers": 4, "layer_types": None}, {"sliding_window": 5}),
}


class TestOlmo3(FamilyTests):
    kinds = KINDS
    greedy = ("olmo3", "yarn")
    # As published with the model: the scaling is for layers with full attention, the base for all.
    older = (
        (KINDS["yarn"], {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {**YARN, "rope_theta": None}}),
    )
    refused = (
        ({"rope_parameters": PLAIN}, "expected null or an object for each of full_attention, sliding_attention"),
        ({"rope_parameters": {"sliding_attention": [1]}}, "sliding_attention is .*; expected null or one flat object"),
        ({"sliding_window": None}, "sliding_window is None; expected a number of tokens, as some layers have sliding"),
        ({"layer_types": ["sliding_attention", "linear_attention"]}, "expected full_attention or sliding_attention;"),
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0; expected null"),
        ({"mlp_bias": True}, "mlp_bias is True; expected false"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is .*: lce does not implement it"),
    )
