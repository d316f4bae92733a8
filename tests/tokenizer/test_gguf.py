"""Tokenizers made from GGUF metadata, beside the files they were converted from."""

import json
from pathlib import Path
from typing import Any

import pytest

from lce.errors import ModelError
from lce.tokenizer.gguf import end_ids, tokenizer_files
from lce.tokenizer.tokenizer import Tokenizer
from tests.vocabularies import TEXTS, byte_level_library, one_line

WHERE = Path("model.gguf")


def byte_level_metadata() -> dict[str, Any]:
    """The metadata of `byte_level_library`, as llama.cpp's conversion writes them."""
    library = byte_level_library()
    vocab = library.get_vocab(with_added_tokens=True)
    added = library.get_added_tokens_decoder()
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = {i: 3 if token.special else 4 for i, token in added.items()}
    model = json.loads(library.to_str())["model"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(i, 1) for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
    }


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_files(lambda name, most: tokenizer_files(metadata, WHERE).get(name), WHERE)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_ids_are_those_of_the_library(text: str) -> None:
    tokenizer, library = tokenizer_of(byte_level_metadata()), byte_level_library()
    assert tokenizer.encode(text) == library.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == library.decode(library.encode(text).ids)


def test_ends_are_named_or_known() -> None:
    metadata = byte_level_metadata()
    assert end_ids(metadata) == [1]
    metadata["tokenizer.ggml.tokens"][2] = "<|eot_id|>"
    assert end_ids(metadata) == [1, 2]


def test_an_unknown_name_of_rules_is_refused_with_the_list() -> None:
    with pytest.raises(ModelError) as error:
        tokenizer_files(byte_level_metadata() | {"tokenizer.ggml.pre": "smolm"}, WHERE)
    assert "did you mean 'smollm'? valid: command-r" in one_line(error)
