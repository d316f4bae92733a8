"""What a GGUF file says of its model: the config and tensors of the checkpoint that it was made of, and refusals."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from lce.models.config import Fields
from lce.models.registry import family_of, read_config
from lce.weights.gguf_file import read_gguf
from lce.weights.gguf_model import config_of, tensors_of
from lce.weights.safetensors_file import TensorInfo
from lce.weights.source import Source
from tests.gguf_models import save_gguf
from tests.models import test_llama, test_ministral3, test_mistral, test_qwen2, test_qwen3
from tests.parity import save_kind

KINDS = {
    name: module.KINDS[name]
    for module, names in (
        (test_llama, ("llama-2", "llama-3.1", "llama-3.2", "attention-bias", "mlp-bias", "linear", "yarn")),
        (test_mistral, ("mistral-0.3", "nemo")),
        (test_ministral3, ("multi-head", "ministral-3-3b", "strong", "yarn-scale")),
        (test_qwen2, ("qwen2.5", "qwen2.5-0.5b", "narrow-heads")),
        (test_qwen3, ("qwen3", "qwen3-0.6b")),
    )
    for name in names
}
KINDS["qwen3-bias"] = test_qwen3.KINDS["attention-bias"]


def stored(info: TensorInfo) -> np.ndarray:
    assert info.dtype == "F32"
    return np.frombuffer(info.file.read_bytes()[info.start : info.stop], "<f4").reshape(info.shape)


@pytest.mark.parametrize("name", KINDS)
def test_config_and_tensors_of_the_published_checkpoint(name: str, tmp_path: Path) -> None:
    saved = save_kind(tmp_path, KINDS[name])
    file = read_gguf(save_gguf(tmp_path / "model.gguf", saved.model))
    fields = Fields("model.gguf", config_of(file))
    read, truth = family_of(fields).read(fields, Fields("none", {})), read_config(Source(tmp_path))
    if file.metadata["general.architecture"] == "llama":  # Mistral's name is not in the file
        truth = replace(truth, architecture="LlamaForCausalLM")
    assert read == truth
    tensors, orders = tensors_of(file)
    published = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == published.keys()
    for key, info in tensors.items():
        rows = stored(info)
        assert (rows[orders.get(key, slice(None))] == published[key].numpy()).all(), key
