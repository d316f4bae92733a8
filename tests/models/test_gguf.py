"""Models in GGUF files against transformers: the logits of every architecture, and the bits of the same safetensors."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, SmolLM3Config

import lce
from tests.gguf_models import save_gguf
from tests.models import (
    test_gemma3_text,
    test_llama,
    test_ministral3,
    test_mistral,
    test_olmo2,
    test_olmo3,
    test_qwen2,
    test_qwen3,
)
from tests.parity import Kind, difference, logits_of, rope, save_kind

# Layers of the kinds that files mean but do not say.
FOURTH = rope("default", 2e6) | {"num_hidden_layers": 5, "pad_token_id": 0, "tie_word_embeddings": True}
SIXTH = test_gemma3_text.GEMMA_3 | {"num_hidden_layers": 7, "layer_types": None}
QUICK = {
    "llama-3.2": test_llama.KINDS["llama-3.2"],
    "llama, biases": test_llama.KINDS["attention-bias"],
    "nemo": test_mistral.KINDS["nemo"],
    "ministral-3": test_ministral3.KINDS["strong"],
    "qwen2.5": test_qwen2.KINDS["qwen2.5"],
    "qwen3": test_qwen3.KINDS["qwen3"],
    "smollm3": Kind(SmolLM3Config, FOURTH, {}),
    "gemma3": test_gemma3_text.KINDS["gemma3"],
    "gemma3, 7 layers": Kind(Gemma3TextConfig, SIXTH, {}),
    "olmo2": test_olmo2.KINDS["olmo2-32b"],
    "olmo3": test_olmo3.KINDS["yarn"],
}
# The other kinds that conversion can write: no dynamic scaling, no sliding window of Mistral or Qwen.
SLOW = {
    f"{module.__name__} {name}": module.KINDS[name]
    for module, names in (
        (test_llama, ("llama-2", "llama-3", "llama-3.1", "mlp-bias", "linear", "yarn")),
        (test_mistral, ("mistral-0.3",)),
        (test_ministral3, ("ministral-3", "multi-head", "ministral-3-3b", "yarn-scale")),
        (test_qwen2, ("qwen2-multi-head", "qwen2.5-0.5b", "narrow-heads", "yarn")),
        (test_qwen3, ("multi-head", "qwen3-0.6b", "attention-bias", "yarn")),
        (test_gemma3_text, ("multi-head", "untied", "linear")),
        (test_olmo2, ("olmo2",)),
        (test_olmo3, ("olmo3", "tied", "every-fourth")),
    )
    for name in names
} | {"smollm3, biases": Kind(SmolLM3Config, FOURTH | {"attention_bias": True, "num_key_value_heads": 4}, {})}


def check(folder: Path, kind: Kind, blocks: tuple[int | None, ...]) -> None:
    """In 7 layers of Gemma, transformers' float32 is 5e-4 from its float64."""
    most = 1e-3 if kind.values.get("num_hidden_layers") == 7 else 1e-4
    saved = save_kind(folder, kind)
    file, truth = save_gguf(folder / "m.gguf", saved.model), saved.logits
    for block in blocks:
        logits = lce.load(file, block=block).logits(saved.ids)
        assert difference(logits, truth) <= most, block
    assert torch.equal(logits, lce.load(saved.folder, block=blocks[-1]).logits(saved.ids))


@pytest.mark.parametrize("name", QUICK)
def test_same_logits_as_transformers(name: str, tmp_path: Path) -> None:
    check(tmp_path, QUICK[name], (None,))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_same_logits_as_transformers_in_blocks(name: str, tmp_path: Path) -> None:
    check(tmp_path, (QUICK | SLOW)[name], (1, 7, 64))


@pytest.mark.parametrize("types", ["Q8_0", *(pytest.param(x, marks=pytest.mark.slow) for x in ("Q4_1", "Q5_0", "F16"))])
def test_rows_of_quantised_heads_are_put_in_order(types: str, tmp_path: Path) -> None:
    """As transformers reads the same file. Products of quantised matrices round their inputs."""
    saved = save_kind(tmp_path, test_llama.KINDS["llama-3"])
    file = save_gguf(tmp_path / "m.gguf", saved.model, types)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    truth = logits_of(model, saved.ids)
    assert difference(truth, saved.logits) > 1e-3, "nothing was rounded"
    assert difference(lce.load(file, dtype="float32").logits(saved.ids), truth) <= 1e-3
