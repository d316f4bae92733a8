"""Folders and files as they lie: what stands beside a model, and files that are no model and say what they are."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import lce
from lce.errors import ModelError
from tests.checkpoints import tokens
from tests.gguf_files import write_gguf
from tests.gguf_models import as_saved, save_gguf, vocabulary

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 17209961\n"
IDS = tokens(9)
OTHERS = {  # the names of files beside a model, and what their metadata says
    "mmproj-model-f16.gguf": {"general.architecture": "clip", "general.type": "mmproj"},
    "tiny-mmproj.gguf": {"general.architecture": "clip"},
    "imatrix.gguf": {"general.architecture": "", "general.type": "imatrix"},
    "tiny-lora-f16.gguf": {"general.type": "adapter"},
}


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """A folder with a model in one GGUF file."""
    shutil.copy(tiny_model / "tokenizer.json", tmp_path)
    save_gguf(tmp_path / "model.gguf", as_saved(tiny_model))
    (tmp_path / "tokenizer.json").unlink()
    return tmp_path


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_is_found_beside_files_of_other_purposes(
    folder: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    before = lce.load(folder).generate(IDS, max_tokens=3).token_ids
    write_gguf(folder / name, {"x": [1.0]}, metadata=OTHERS[name])
    assert lce.load(folder).generate(IDS, max_tokens=3).token_ids == before
    assert f"{name} is left out" in capsys.readouterr().err


def test_a_model_whose_name_is_like_an_adapters_is_one_of_several(folder: Path) -> None:
    shutil.copy(folder / "model.gguf", folder / "model-lora-merged.gguf")
    with pytest.raises(ModelError, match=r"several GGUF files: 'model-lora-merged.gguf', 'model.gguf'"):
        lce.load(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny-lora-f16.gguf", "is a LoRA adapter, not a model; merge"),
        ("mmproj-model-f16.gguf", "is the part of a model that reads images, not a model; name the file of"),
        ("imatrix.gguf", "is an importance matrix, .*, not a model; name"),
    ],
)
def test_what_is_no_model_is_named(tmp_path: Path, name: str, words: str) -> None:
    for path in (write_gguf(tmp_path / name, {"x": [1.0]}, metadata=OTHERS[name])[0], tmp_path):
        with pytest.raises(ModelError, match=f"{name} {words}"):
            lce.load(path)


def test_a_vocabulary_alone_is_named(tmp_path: Path, tiny_model: Path) -> None:
    path = write_gguf(tmp_path / "vocab.gguf", {}, metadata=vocabulary(tiny_model))[0]
    with pytest.raises(ModelError, match=r"vocab.gguf is a vocabulary without weights, not a model; "):
        lce.load(path)


def test_an_adapter_in_a_folder_is_named(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture) -> None:
    save_file({"lora_A": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    config = json.dumps({"base_model_name_or_path": "owner/base"})
    (tmp_path / "adapter_config.json").write_text(config, encoding="utf-8")
    with pytest.raises(ModelError, match=r"is a LoRA adapter of 'owner/base', not a model; merge it into its base"):
        lce.load(tmp_path)
    shutil.copy(tiny_model / "config.json", tmp_path)
    with pytest.raises(ModelError, match=r"has the weights of an adapter alone \(.*\), not of a model; merge"):
        lce.load(tmp_path)
    assert "left out" not in capsys.readouterr().err
    shutil.copy(tiny_model / "model.safetensors", tmp_path)
    assert lce.load(tmp_path).generate(IDS, max_tokens=3).token_ids
    assert "adapter of 'owner/base' is left out" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "tokenizer_config.json"])
def test_pointers_are_named(tmp_path: Path, tiny_model: Path, name: str) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(POINTER, encoding="utf-8")
    with pytest.raises(ModelError, match=rf"{name} is a Git LFS pointer, not the .*; fetch .* `git lfs pull`$"):
        lce.load(tmp_path)


def test_a_byte_order_mark_is_no_text(tmp_path: Path, tiny_model: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("\ufeff{{ messages[0].content }}!", encoding="utf-8")
    assert lce.load(tmp_path).tokenizer.chat([{"role": "user", "content": "Hi"}]) == "Hi!"
    (tmp_path / "chat_template.jinja").unlink()
    settings = {"bos_token": "<s>", "chat_template": [{"name": "default", "template": "\ufeff{{ bos_token }}"}]}
    (tmp_path / "tokenizer_config.json").write_text("\ufeff" + json.dumps(settings), encoding="utf-8")
    assert lce.load(tmp_path).tokenizer.chat([{"role": "user", "content": "Hi"}]) == "<s>"
