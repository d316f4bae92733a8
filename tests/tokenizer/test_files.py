"""The files beside a vocabulary: what they set, which one wins, and that broken ones are refused."""

import os
from pathlib import Path

import pytest

from lce.errors import ModelError
from lce.files import MAX_FILE_BYTES
from lce.tokenizer.files import TokenizerConfig
from lce.tokenizer.tokenizer import BYTES_A_TOKEN
from lce.weights.folder import BESIDE
from lce.weights.source import Source
from tests.vocabularies import refused, write_json


def read(folder: Path) -> TokenizerConfig:
    return TokenizerConfig.read(Source(folder).read, folder)


def test_a_folder_without_files_sets_nothing(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.bos_token, config.eos_token, config.add_bos, config.chat_template) == (None, None, None, None)
    assert (config.special_names, config.added) == ((), {})
    assert config.space_before_all


def test_tokenizer_config_takes_precedence(tmp_path: Path) -> None:
    write_json(tmp_path, "special_tokens_map.json", {"bos_token": "<old>", "eos_token": {"content": "</s>"}})
    write_json(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": None, "legacy": False})
    config = read(tmp_path)
    assert (config.bos_token, config.eos_token, config.space_before_all) == ("<s>", "</s>", False)
    assert config.special_names == ("<s>", "</s>")


def test_added_tokens_of_both_places(tmp_path: Path) -> None:
    write_json(tmp_path, "added_tokens.json", {"<a>": 7, "<b>": 8})
    decoder = {"9": {"content": "<b>", "special": True}, "10": {"content": "<c>", "special": False}}
    own = {"added_tokens_decoder": decoder, "extra_special_tokens": {"x": "<x>"}}
    write_json(tmp_path, "tokenizer_config.json", own)
    config = read(tmp_path)
    assert (config.added, set(config.special_names)) == ({"<a>": 7, "<b>": 9, "<c>": 10}, {"<b>", "<x>"})


def test_the_place_of_the_chat_template(tmp_path: Path) -> None:
    listed = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for value, chosen in ((listed, "D"), (listed[:1], None), ("config", "config")):
        write_json(tmp_path, "tokenizer_config.json", {"chat_template": value})
        assert read(tmp_path).chat_template == chosen
    write_json(tmp_path, "chat_template.json", {"chat_template": "json"})
    assert read(tmp_path).chat_template == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja é", encoding="utf-8")
    assert read(tmp_path).chat_template == "jinja é"


WRONG_FILES: dict[str, list[bytes]] = {
    "tokenizer.json": [b"", b"{", b"[]", b'{"version": "1.0"}', b"\xff\xfe"],
    "tokenizer.model": [b"", b"IQ== 0\nIg== 1\n", b"\x0a\xff\xff\xff\xff\x0f"],
    "tokenizer_config.json": [
        *(b"{", b"[1]", b"[" * 100_000, b'{"bos_token": 3}', b'{"bos_token": {"content": 3}}'),
        *(b'{"bos_token": "<nowhere>"}', b'{"add_bos_token": "yes"}', b'{"additional_special_tokens": 3}'),
        *(b'{"added_tokens_decoder": [3]}', b'{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        *(b'{"added_tokens_decoder": {"3": {}}}', b'{"chat_template": 3}', b'{"chat_template": {"default": "D"}}'),
        *(b'{"chat_template": [3]}', b'{"chat_template": [{"name": "default", "template": 3}]}'),
        *(b'{"bos_token": "\\ud800"}', b'{"bos_token": "' + b"x\\n" * 1000 + b'"}', b'{"add_bos_token": 1e999}'),
        b'{"added_tokens_decoder": {"' + b"9" * 5000 + b'": {"content": "a"}}}',
        b'{"a": [0' + b",0" * 2_000_000 + b"]}",
    ],
    "special_tokens_map.json": [b"\x00"],
    "added_tokens.json": [
        *(b'{"a": "b"}', b'{"a": -1}', b'{"\\ud800": 5}', b'{"a": ' + b"9" * 4000 + b"}", b'{"a": 4294967296}')
    ],
    "chat_template.json": [b"nonsense"],
    "chat_template.jinja": [b"\xff"],
}


@pytest.mark.parametrize(("name", "content"), [(name, raw) for name, wrong in WRONG_FILES.items() for raw in wrong])
def test_broken_files(folders: dict[str, Path], tmp_path: Path, name: str, content: bytes) -> None:
    model = folders["sentencepiece"] / "tokenizer.model"
    (tmp_path / "tokenizer.model").write_bytes(model.read_bytes())
    (tmp_path / name).write_bytes(content)
    with refused(ModelError):
        Source(tmp_path).tokenizer()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_too_large_is_not_read(tmp_path: Path, name: str) -> None:
    most = (4 << 20) + 300 * BYTES_A_TOKEN if name == "tokenizer.json" else MAX_FILE_BYTES
    with (tmp_path / name).open("wb") as file:
        file.truncate(most + 1)
    with refused(ModelError, f"{name} is larger than {most} bytes"):
        Source(tmp_path).tokenizer(300)


@pytest.mark.parametrize("name", BESIDE[1:])
def test_what_is_no_regular_file_is_refused_and_does_not_block(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=f"{name} is a FIFO; expected a regular file"):
        Source(tmp_path).tokenizer()
