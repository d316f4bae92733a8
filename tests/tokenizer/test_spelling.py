"""Tokens as bytes: each kind of decoder, broken bytes, and the decoders that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from lce.errors import ModelError
from lce.tokenizer.tokenizer import Tokenizer
from tests.vocabularies import KINDS, byte_ids, byte_level_library, one_line

fixtures_are_shared = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.mark.parametrize("kind", ["llama", "unigram", "sentencepiece"])
def test_a_broken_byte_leaves_its_neighbours_whole(made: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = made[kind]
    assert tokenizer.decode(byte_ids("é€😀".encode())) == "é€😀"
    assert tokenizer.decode(byte_ids("é".encode() + b"\xff" + "€".encode())) == "é\ufffd€"
    assert tokenizer.decode(byte_ids(b"\xe2\x82A\xf0\x9f")) == "\ufffd\ufffdA\ufffd\ufffd"


@fixtures_are_shared
@given(raw=st.lists(st.integers(0, 255) | st.integers(0x80, 0xFF), max_size=16))
def test_broken_bytes_read_as_in_sentencepiece(
    made: dict[str, Tokenizer], tiny_sentencepiece: bytes, raw: list[int]
) -> None:
    ids = byte_ids(bytes(raw))
    model = sentencepiece.SentencePieceProcessor(model_proto=tiny_sentencepiece)
    space = " " if raw[:1] == [0x20] else ""  # a byte is never sentencepiece's own space, but is for the JSON decoder
    assert space + made["sentencepiece"].decode(ids) == model.decode(ids)


@pytest.mark.parametrize("byte", [0x80, 0xC3, 0xE2, 0xF0, 0xFF])
def test_broken_bytes_come_out_within_a_few_tokens(made: dict[str, Tokenizer], byte: int) -> None:
    char = {0x80: "Ģ"}.get(byte, chr(byte))  # how a byte-level vocabulary writes the byte
    for kind in KINDS:
        tokenizer = made[kind]
        token_id = byte_level_library().get_vocab()[char] if kind == "byte_level" else 3 + byte
        stream = tokenizer.stream()
        seen = ""
        for count in range(1, 50):
            seen += stream.push(token_id)
            assert len(seen) >= count - 3
        assert len(seen + stream.finish()) == 49


def test_without_a_decoder_tokens_are_joined_by_spaces(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "fox": 1, "?": 2}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a fox dog")) == "a fox ?"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.WordPiece(),
        decoders.Replace(tokenizers.Regex("a+"), "b"),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_a_decoder_that_cannot_be_streamed(decoder: decoders.Decoder, folders: dict[str, Path], tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(folders["byte_level"] / "tokenizer.json"))
    library.decoder = decoder
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError) as error:
        Tokenizer.from_folder(tmp_path)
    assert "token by token" in one_line(error)
