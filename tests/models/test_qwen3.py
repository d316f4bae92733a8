"""Qwen3 against transformers: the norm of queries and keys, explicit head_dim, biases, YaRN."""

from transformers import Qwen3Config

from tests.parity import PLAIN, FamilyTests, Kind, rope

QWEN_3 = {"head_dim": 24, **rope("default", 1e6)}
YARN = rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=64)
SLIDING = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}
KINDS = {
    "qwen3": Kind(Qwen3Config, QWEN_3, PLAIN),
    "multi-head": Kind(Qwen3Config, {"num_key_value_heads": 4, **QWEN_3}, PLAIN),
    "qwen3-0.6b": Kind(Qwen3Config, {"tie_word_embeddings": True, **QWEN_3}, {"rms_norm_eps": 0.5}),
    "attention-bias": Kind(Qwen3Config, {"attention_bias": True, **QWEN_3}, PLAIN),
    "yarn": Kind(Qwen3Config, QWEN_3 | YARN, rope("default", 1e6)),
    "sliding-window": Kind(Qwen3Config, QWEN_3 | SLIDING, {"sliding_window": 23}),
}


class TestQwen3(FamilyTests):
    kinds = KINDS
    greedy = ("qwen3", "yarn")
    weights = ((KINDS["attention-bias"], r".*\.bias", 2 * 4), (KINDS["qwen3"], r".*\.1\..*[qk]_norm\.weight", 2))
