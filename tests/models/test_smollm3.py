"""SmolLM3 against transformers: layers without rotation, and a sliding window in them."""

from transformers import SmolLM3Config

from tests.parity import FamilyTests, Kind, rope

SMOLLM_3 = {"pad_token_id": 0, "no_rope_layer_interval": 2, **rope("default", 2e6)}
SLIDING = {"use_sliding_window": True, "sliding_window": 24}
# With layers that do not rotate, biases of keys may shift them all alike.
BIASED = SMOLLM_3 | {"attention_bias": True, "mlp_bias": True, "no_rope_layers": [1, 1]}
KINDS = {
    "smollm3": Kind(SmolLM3Config, SMOLLM_3 | {"tie_word_embeddings": True}, {"no_rope_layers": [1, 1]}),
    "multi-head": Kind(SmolLM3Config, SMOLLM_3 | {"num_key_value_heads": 4}, rope("default", 1e4)),
    "sliding-window": Kind(SmolLM3Config, SMOLLM_3 | SLIDING, {"sliding_window": 23}),
    "all-rotated": Kind(SmolLM3Config, SMOLLM_3 | {"no_rope_layers": [1, 1, 0]}, {"no_rope_layers": [0, 1]}),
}


class TestSmolLM3(FamilyTests):
    kinds = KINDS
    greedy = ("smollm3", "sliding-window")
    weights = ((Kind(SmolLM3Config, BIASED, {}), r".*\.bias", 2 * 7),)
    older = ((KINDS["smollm3"], {"no_rope_layers": None, "layer_types": None}),)  # the interval says which rotate
    refused = (
        ({"no_rope_layers": [1]}, r"no_rope_layers is \[1\]; expected a 0 or a 1 for each of the 2 layers"),
        ({"no_rope_layers": [1, 2]}, "expected a 0 or a 1 for each"),
        ({"no_rope_layers": "10"}, "expected a 0 or a 1 for each"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0; expected a whole number from 1"),
        ({"layer_types": ["sliding_attention"] * 2}, "expected full_attention in all layers, as use_sliding_window a"),
        ({"layer_types": ["full_attention"]}, "expected one for each of the 2 layers"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "expected full_attention or sliding_attention;"),
        ({"query_pre_attn_scalar": 16}, "query_pre_attn_scalar is 16; expected null: lce does not implement it"),
    )
