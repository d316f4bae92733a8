"""Mistral against transformers: sliding window, none, and Nemo's narrow heads."""

from transformers import MistralConfig

from tests.parity import PLAIN, FamilyTests, Kind, rope

MISTRAL = {"sliding_window": None, **rope("default", 1e6)}
KINDS = {
    "mistral-0.1": Kind(MistralConfig, {"sliding_window": 24, **PLAIN}, {"sliding_window": 23}),
    "mistral-0.3": Kind(MistralConfig, MISTRAL, {"sliding_window": 60}),
    "nemo": Kind(MistralConfig, {"head_dim": 24, **MISTRAL}, PLAIN),
}


class TestMistral(FamilyTests):
    kinds = KINDS
    greedy = ("mistral-0.1", "nemo")
