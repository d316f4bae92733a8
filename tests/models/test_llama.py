"""The model against transformers: one random checkpoint for each kind of Llama that is published."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

import lce
from tests.checkpoints import save_tiny, tokens
from tests.parity import PLAIN, FamilyTests, Kind, rope

LLAMA_3_1 = rope(
    "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)

KINDS = {
    "llama-2": Kind(LlamaConfig, {"num_key_value_heads": 4, **PLAIN}, {"rms_norm_eps": 0.5}),
    "llama-3": Kind(LlamaConfig, rope("default", 500000.0), PLAIN),
    "llama-3.1": Kind(LlamaConfig, {"max_position_embeddings": 512, **LLAMA_3_1}, rope("default", 500000.0)),
    "llama-3.2": Kind(LlamaConfig, {"tie_word_embeddings": True, **LLAMA_3_1}, rope("default", 500000.0)),
    "attention-bias": Kind(LlamaConfig, {"attention_bias": True, **PLAIN}, rope("linear", factor=4.0)),
    "mlp-bias": Kind(LlamaConfig, {"mlp_bias": True, **PLAIN}, rope("linear", factor=4.0)),
    "linear": Kind(LlamaConfig, rope("linear", factor=4.0), PLAIN),
    "dynamic-ntk": Kind(LlamaConfig, rope("dynamic", factor=2.0), PLAIN),
    "yarn": Kind(LlamaConfig, {"max_position_embeddings": 256, **YARN}, PLAIN),
}
BIASED = Kind(LlamaConfig, KINDS["llama-2"].values | {"attention_bias": True, "mlp_bias": True}, {})


class TestLlama(FamilyTests):
    kinds = KINDS
    greedy = ("llama-2", "llama-3.1", "llama-3.2")
    weights = ((BIASED, r".*\.bias", 2 * 7),)


DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("wanted", [*DTYPES, "auto"])
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.covering("stored")
def test_any_dtype_is_read_as_any_other(stored: str, wanted: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, torch_dtype=stored)
    engine = lce.load(folder, dtype=wanted)
    dtype = getattr(torch, stored if wanted == "auto" else wanted)
    assert engine.setup.dtype == dtype
    weight = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert weight.dtype == getattr(torch, stored)
    assert torch.equal(engine.setup.model.head, weight.to(dtype))
    ids = list(range(10, 70))
    logits = engine.logits(ids)
    assert logits.dtype == torch.float32
    assert (logits - lce.load(folder, dtype="float32").logits(ids)).abs().mean() < 0.1
    assert len(engine.generate(ids, max_tokens=3).token_ids) <= 3


@pytest.mark.parametrize("n", [1, 5, 60])
def test_what_layers_add_to_large_hidden_states_is_not_lost(n: int, tmp_path: Path) -> None:
    """In half precision, as in float32: sums rounded to bfloat16 would be 4e-3 off."""
    folder, logits = save_tiny(tmp_path, torch_dtype="bfloat16"), []
    for dtype in ("bfloat16", "float32"):
        engine = lce.load(folder, dtype=dtype)
        engine.setup.model.embed.mul_(1024)
        logits.append(engine.logits(tokens(n)))
    assert (logits[0] - logits[1]).abs().mean() < 5e-4


def test_a_model_that_is_overwritten_or_cut_short_answers_as_before(tmp_path: Path) -> None:
    folder, ids = save_tiny(tmp_path), list(range(2, 60))
    engine, file = lce.load(folder), folder / "model.safetensors"
    logits, fingerprint, size = engine.logits(ids), engine.setup.fingerprint, file.stat().st_size
    for raw in (bytes(size), b""):
        with file.open("r+b") as opened:
            opened.truncate(len(raw))
            opened.write(raw)
        assert torch.equal(engine.logits(ids), logits)
    assert engine.setup.fingerprint == fingerprint
