"""Tokenizers made from every kind of file, and Llama 2's own vocabulary where shared/ has it."""

from pathlib import Path

import pytest
import sentencepiece

from lce.tokenizer.tokenizer import Tokenizer
from lce.weights.source import Source
from tests import vocabularies
from tests.vocabularies import KINDS, LLAMA2, write_json


@pytest.fixture(scope="session")
def tiny_sentencepiece() -> bytes:
    return vocabularies.sentencepiece_model()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_sentencepiece: bytes) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("byte_level", "llama", "unigram", "sentencepiece")}
    vocabularies.byte_level_library().save(str(made["byte_level"] / "tokenizer.json"))
    write_json(made["byte_level"], "tokenizer_config.json", {"bos_token": "<|begin|>", "eos_token": "<|end|>"})
    model = sentencepiece.SentencePieceProcessor(model_proto=tiny_sentencepiece)
    vocabularies.llama_library(model).save(str(made["llama"] / "tokenizer.json"))
    write_json(made["llama"], "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    vocabularies.unigram_library().save(str(made["unigram"] / "tokenizer.json"))
    (made["sentencepiece"] / "tokenizer.model").write_bytes(tiny_sentencepiece)
    return made


@pytest.fixture(scope="session")
def made(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Source(folder).tokenizer() for name, folder in folders.items()}


@pytest.fixture(scope="session")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if not LLAMA2.exists():
        pytest.skip("Llama 2's vocabulary is not at ../shared/data/llama2_tokenizer.model")
    folder = tmp_path_factory.mktemp("llama2")
    (folder / "tokenizer.model").symlink_to(LLAMA2)
    return Source(folder).tokenizer(vocab_size=32000)


@pytest.fixture(params=[*KINDS, "llama2"])
def tokenizer(request: pytest.FixtureRequest, made: dict[str, Tokenizer]) -> Tokenizer:
    if request.param == "llama2":
        request.getfixturevalue("llama2")
    return made[request.param] if request.param in made else request.getfixturevalue("llama2")
