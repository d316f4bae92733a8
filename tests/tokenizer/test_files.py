"""The files beside a vocabulary: what they set, which one wins, and that broken ones are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lce.errors import ModelError
from lce.files import MAX_FILE_BYTES, read_file
from lce.tokenizer.files import read_config
from lce.tokenizer.tokenizer import Tokenizer
from tests.vocabularies import one_line, write_json


def test_a_folder_without_files_sets_nothing(tmp_path: Path) -> None:
    config = read_config(tmp_path)
    assert (config.bos_token, config.eos_token, config.add_bos, config.chat_template) == (None, None, None, None)
    assert (config.special_names, config.added, config.eos_ids) == ((), {}, ())
    assert config.space_before_all


def test_tokenizer_config_takes_precedence(tmp_path: Path) -> None:
    write_json(tmp_path, "special_tokens_map.json", {"bos_token": "<old>", "eos_token": {"content": "</s>"}})
    write_json(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": None, "legacy": False})
    config = read_config(tmp_path)
    assert (config.bos_token, config.eos_token, config.space_before_all) == ("<s>", "</s>", False)
    assert config.special_names == ("<s>", "</s>")


def test_added_tokens_of_both_places(tmp_path: Path) -> None:
    write_json(tmp_path, "added_tokens.json", {"<a>": 7, "<b>": 8})
    decoder = {"9": {"content": "<b>", "special": True}, "10": {"content": "<c>", "special": False}}
    write_json(
        tmp_path, "tokenizer_config.json", {"added_tokens_decoder": decoder, "extra_special_tokens": {"x": "<x>"}}
    )
    config = read_config(tmp_path)
    assert config.added == {"<a>": 7, "<b>": 9, "<c>": 10}
    assert set(config.special_names) == {"<b>", "<x>"}


@pytest.mark.parametrize(("value", "eos_ids"), [(2, (2,)), ([2, 3], (2, 3)), (None, ()), ([2, "3", True], (2,))])
def test_the_ids_of_generation_config(tmp_path: Path, value: object, eos_ids: tuple[int, ...]) -> None:
    write_json(tmp_path, "generation_config.json", {"eos_token_id": value})
    assert read_config(tmp_path).eos_ids == eos_ids


def test_the_place_of_the_chat_template(tmp_path: Path) -> None:
    write_json(tmp_path, "tokenizer_config.json", {"chat_template": "config"})
    assert read_config(tmp_path).chat_template == "config"
    write_json(tmp_path, "chat_template.json", {"chat_template": "json"})
    assert read_config(tmp_path).chat_template == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja é", encoding="utf-8")
    assert read_config(tmp_path).chat_template == "jinja é"


def test_a_file_is_its_bytes_or_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\x00bytes")
    assert read_file(tmp_path / "file") == b"\x00bytes"
    assert read_file(tmp_path / "none") is None
    (tmp_path / "folder").mkdir()
    for name in ("folder", "fifo", "broken"):
        if name == "fifo":
            os.mkfifo(tmp_path / name)
        elif name == "broken":
            (tmp_path / name).symlink_to("nowhere")
        with pytest.raises(ModelError, match=r"expected a regular file|No such file"):
            read_file(tmp_path / name)


WRONG_FILES: list[tuple[str, bytes]] = [
    ("tokenizer.json", b""),
    ("tokenizer.json", b"{"),
    ("tokenizer.json", b"[]"),
    ("tokenizer.json", b'{"version": "1.0"}'),
    ("tokenizer.json", b"\xff\xfe"),
    ("tokenizer.model", b""),
    ("tokenizer.model", b"IQ== 0\nIg== 1\n"),
    ("tokenizer.model", b"\x0a\xff\xff\xff\xff\x0f"),
    ("tokenizer_config.json", b"{"),
    ("tokenizer_config.json", b"[1]"),
    ("tokenizer_config.json", b"[" * 100_000),
    ("tokenizer_config.json", b'{"bos_token": 3}'),
    ("tokenizer_config.json", b'{"bos_token": {"content": 3}}'),
    ("tokenizer_config.json", b'{"bos_token": "<nowhere>"}'),
    ("tokenizer_config.json", b'{"add_bos_token": "yes"}'),
    ("tokenizer_config.json", b'{"additional_special_tokens": 3}'),
    ("tokenizer_config.json", b'{"added_tokens_decoder": [3]}'),
    ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "a"}}}'),
    ("tokenizer_config.json", b'{"added_tokens_decoder": {"3": {}}}'),
    ("tokenizer_config.json", b'{"chat_template": 3}'),
    ("special_tokens_map.json", b"\x00"),
    ("added_tokens.json", b'{"a": "b"}'),
    ("added_tokens.json", b'{"a": -1}'),
    ("generation_config.json", b"nonsense"),
    ("chat_template.json", b"nonsense"),
    ("chat_template.jinja", b"\xff"),
]


@pytest.mark.parametrize(("name", "content"), WRONG_FILES)
def test_broken_files(folders: dict[str, Path], tmp_path: Path, name: str, content: bytes) -> None:
    model = folders["sentencepiece"] / "tokenizer.model"
    (tmp_path / "tokenizer.model").write_bytes(model.read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError) as error:
        Tokenizer.from_folder(tmp_path)
    assert len(one_line(error)) < 600


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ModelError) as error:
        Tokenizer.from_folder(tmp_path)
    assert str(MAX_FILE_BYTES) in one_line(error)
