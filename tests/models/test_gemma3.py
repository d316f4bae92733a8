"""Gemma 3 with images against transformers: the text model of the published layout."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

import lce
from lce.errors import ModelError
from tests.checkpoints import VOCAB, randomise, save_tokenizer, tokens
from tests.models.test_gemma3_text import KINDS
from tests.parity import difference, edited, logits_of

VISION = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 16}


@pytest.mark.parametrize("name", ["gemma3", "untied"])
def test_same_logits_as_transformers(name: str, tmp_path: Path) -> None:
    folder, text = tmp_path / "saved", KINDS[name].build()
    torch.manual_seed(0)
    more = {"image_token_index": VOCAB - 1, "boi_token_index": 5, "eoi_token_index": 6, "mm_tokens_per_image": 4}
    config = Gemma3Config(vision_config=VISION, text_config=text, tie_word_embeddings=text.tie_word_embeddings, **more)
    model = Gemma3ForConditionalGeneration(config).eval()
    randomise(model)
    model.tie_weights()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    ids = [token for token in tokens(150) if token < VOCAB - 1]
    truth = logits_of(model, ids)
    assert any("vision_tower" in name for name in load_file(folder / "model.safetensors"))
    for block in (None, 7):
        assert difference(lce.load(folder, block=block).logits(ids), truth) <= 1e-4
    written = json.loads((folder / "config.json").read_text())
    with pytest.raises(ModelError, match="text_config: model_type is 'gemma3'; expected the name of a text model's"):
        lce.load(edited(folder, tmp_path / "nested", {"text_config": {"model_type": "gemma3", "text_config": written}}))
