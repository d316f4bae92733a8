"""Phi 3 and 4 against transformers: joined matrices, heads rotated in part, and LongRoPE's divisors."""

from pathlib import Path

import pytest
from transformers import Phi3Config

import lce
from lce.errors import UsageError
from tests.checkpoints import save_by_transformers, tokens
from tests.parity import PLAIN, FamilyTests, Kind, difference, logits_of, rope

PHI_3 = {"pad_token_id": 0, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 2.0], "long_factor": [1.0, 2.0, 3.0, 5.0, 9.0, 30.0]}
LONG = rope("longrope", original_max_position_embeddings=64, partial_rotary_factor=0.75, **FACTORS)
WIDE_FACTORS = {key: [*x, 3.0, 3.0] for key, x in FACTORS.items()}
WIDE = rope("longrope", original_max_position_embeddings=64, **WIDE_FACTORS)
EXTENDED = {"max_position_embeddings": 512}
KINDS = {
    "phi-3-mini-4k": Kind(Phi3Config, PHI_3 | {"num_key_value_heads": 4, "sliding_window": 24}, {"sliding_window": 23}),
    "phi-3-mini-128k": Kind(Phi3Config, PHI_3 | EXTENDED | WIDE, {"max_position_embeddings": 128}),
    "phi-4": Kind(Phi3Config, PHI_3 | rope("default", 250000.0), PLAIN),
    "phi-4-mini": Kind(Phi3Config, PHI_3 | EXTENDED | LONG | {"tie_word_embeddings": True}, {"rope_parameters": None}),
}


class TestPhi3(FamilyTests):
    kinds = KINDS
    greedy = ("phi-4-mini",)
    older = ((KINDS["phi-3-mini-128k"], {"rope_parameters": None, "rope_scaling": {"type": "su", **WIDE_FACTORS}}),)
    refused = (
        ({"rope_scaling": {"type": "longrope"}}, "short_factor is missing; expected 8 numbers from 0.001"),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0] * 7}}, "short_factor is .*; expected 8 numbers"),
        ({"rope_scaling": {"type": "su", "short_factor": [True] * 8}}, "short_factor is .*; expected 8 numbers"),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "partial_rotary_factor": 0.5}, "type is .*expected longrop"),
        ({"partial_rotary_factor": 0.7}, "partial_rotary_factor is 0.7; expected an even number of the 16 channels"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "expected one kind of attention in all layers"),
    )


def test_the_announced_length_chooses_the_divisors(tmp_path: Path) -> None:
    model = save_by_transformers(tmp_path, KINDS["phi-4-mini"].build())
    engine, ids = lce.load(tmp_path, block=16), tokens(64)
    short = logits_of(model, ids)
    assert difference(engine.logits(ids), short) <= 1e-4
    assert difference(engine.prefill(ids).logits, short[-1]) <= 1e-4
    announced = engine.prefill(ids, length=65)
    long = logits_of(model, [*ids, 9])
    assert difference(announced.logits, long[-2]) <= 1e-4
    assert difference(long[-2], short[-1]) > 0.05
    engine.prefill([9], context=announced)
    assert difference(announced.logits, long[-1]) <= 1e-4


@pytest.mark.parametrize("method", ["dca", "longheads", "streaming"])
def test_a_method_writes_the_same_in_any_blocks(method: str, tmp_path: Path) -> None:
    save_by_transformers(tmp_path, KINDS["phi-4-mini"].build())
    engines = [lce.load(tmp_path, method, block=block, window=64) for block in (7, 64)]
    first, second = (engine.logits(tokens(150)) for engine in engines)
    assert difference(first, second) <= 1e-4


def test_another_scaling_is_refused(tmp_path: Path) -> None:
    save_by_transformers(tmp_path, KINDS["phi-3-mini-128k"].build())
    with pytest.raises(UsageError, match="LongRoPE; leave rope and rope_factor out"):
        lce.load(tmp_path, rope="linear", rope_factor=2.0)
