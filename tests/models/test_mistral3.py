"""Mistral 3 against transformers: the text model of an image-and-text checkpoint, with both kinds of text model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Ministral3Config, Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig

import lce
from lce.errors import ModelError
from tests.checkpoints import VOCAB, randomise, save_tokenizer
from tests.parity import SIZES, N, difference, edited, logits_of, rope

VISION = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 16}
WINDOW = {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
YARN = rope("yarn", 1e6, factor=4.0, mscale=1.0, mscale_all_dim=1.0, **WINDOW)
TEXTS: dict[str, Any] = {
    "small-3.1": MistralConfig(**SIZES | {"head_dim": 24, "sliding_window": None, **rope("default", 1e6)}),
    "ministral-3": Ministral3Config(**SIZES | {"head_dim": 24, **YARN}),
}
# None is the image token, 10.
IDS: list[int] = torch.randint(20, VOCAB, (N,), generator=torch.Generator().manual_seed(1)).tolist()


def save(folder: Path, text: Any, tied: bool) -> Any:
    torch.manual_seed(0)
    config = Mistral3Config(vision_config=VISION, text_config=text, tie_word_embeddings=tied)
    model = Mistral3ForConditionalGeneration(config).eval()
    randomise(model)
    if tied:
        model.tie_weights()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", TEXTS)
def test_same_logits_as_transformers(name: str, tied: bool, tmp_path: Path) -> None:
    truth = logits_of(save(tmp_path, TEXTS[name], tied), IDS)
    names = load_file(tmp_path / "model.safetensors")
    assert ("language_model.lm_head.weight" in names) == (not tied)
    assert any(name.startswith("vision_tower.") for name in names)
    for block in (None, 1, 7, 64):
        engine = lce.load(tmp_path, block=block)
        assert difference(engine.logits(IDS), truth) <= 1e-4
    assert engine.setup.model.config.architecture == type(TEXTS[name]).__name__.replace("Config", "ForCausalLM")
    assert engine.setup.model.config.dtype == "float32"


def test_a_stored_head_is_used_where_nothing_says_that_it_is_not_tied(tmp_path: Path) -> None:
    """Mistral Small 3.1 leaves `tie_word_embeddings` out, for which transformers 5 takes true, and stores a head."""
    truth = logits_of(save(tmp_path, TEXTS["small-3.1"], tied=False), IDS)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    bare = {key: value for key, value in config["text_config"].items() if key != "tie_word_embeddings"}
    for text in (config["text_config"], bare):
        (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text}))
        engine = lce.load(tmp_path)
        assert engine.setup.model.config.tied == ("tie_word_embeddings" not in text)
        assert difference(engine.logits(IDS), truth) <= 1e-4


def test_what_it_cannot_be(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(folder, TEXTS["ministral-3"], tied=True)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"text_config": None}, "text_config is None; expected an object"),
        ({"text_config": text | {"model_type": "mixtral"}}, "text_config: model_type is 'mixtral'; expected"),
        ({"text_config": {"model_type": "mistral3", "text_config": text}}, "text_config: model_type is 'mistral3'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is .*; expected plain weights"),
    ]
    for number, (change, message) in enumerate(changes):
        with pytest.raises(ModelError, match=message):
            lce.load(edited(folder, tmp_path / str(number), change))
    weights: dict[str, Tensor] = load_file(folder / "model.safetensors")
    save_file(weights | {"language_model.other": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 unexpected \('language_model.other'\)"):
        lce.load(folder)
