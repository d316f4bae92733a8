"""OLMo 2 against transformers: norms behind attention and MLP, and of queries and keys over all heads."""

from transformers import Olmo2Config

from tests.parity import PLAIN, FamilyTests, Kind, rope

OLMO_2 = {"pad_token_id": 0, **rope("default", 5e5)}
KINDS = {
    "olmo2": Kind(Olmo2Config, OLMO_2 | {"num_key_value_heads": 4}, PLAIN),
    "olmo2-32b": Kind(Olmo2Config, OLMO_2, {"rms_norm_eps": 0.5}),
    "attention-bias": Kind(Olmo2Config, OLMO_2 | {"attention_bias": True, "tie_word_embeddings": True}, PLAIN),
}


class TestOlmo2(FamilyTests):
    kinds = KINDS
    greedy = ("olmo2-32b",)
    weights = ((KINDS["attention-bias"], r".*\.bias", 2 * 4), (KINDS["olmo2-32b"], r".*\.1\..*[qk]_norm\.weight", 2))
