"""Reads the small files beside a tokenizer's vocabulary into one `TokenizerConfig`.

tokenizer_config.json takes precedence over special_tokens_map.json. Older checkpoints have their added tokens in
added_tokens.json. The chat template may have a file of its own. Every file is optional; a broken one raises ModelError.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lce.errors import ModelError, shown
from lce.files import MAX_FILE_BYTES, Reader, named, object_of

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True)
class TokenizerConfig:
    """The settings in a tokenizer's small files. A setting that no file has is None."""

    bos_token: str | None
    eos_token: str | None
    add_bos: bool | None
    add_eos: bool | None
    space_before_all: bool  # whether sentencepiece puts a space before every stretch of text after a special token
    special_names: tuple[str, ...]  # the tokens that the files call special
    added: dict[str, int]  # tokens and their ids, which take precedence over the vocabulary's
    chat_template: str | None

    @classmethod
    def read(cls, read: Reader, where: Path) -> Self:
        """Read a tokenizer's files, all except the vocabulary. `where` is named in errors."""
        config = _object(read, where, "special_tokens_map.json")
        own = _object(read, where, "tokenizer_config.json")
        config |= {key: value for key, value in own.items() if value is not None}
        added, special_names = _tokens(config, _object(read, where, "added_tokens.json"))
        return cls(
            bos_token=_content(config.get("bos_token"), "bos_token"),
            eos_token=_content(config.get("eos_token"), "eos_token"),
            add_bos=_flag(config, "add_bos_token"),
            add_eos=_flag(config, "add_eos_token"),
            space_before_all=_flag(config, "legacy") is not False,
            special_names=special_names,
            added=added,
            chat_template=_chat_template(read, where, config),
        )


def _object(read: Reader, where: Path, name: str) -> dict[str, Any]:
    return object_of(read(name, MAX_FILE_BYTES), where / name)


def _content(value: object, key: str) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    if value is None:
        return None
    if isinstance(content, str) and _is_text(content):
        return content
    raise _unusable(key, value, 'a string or {"content": a string}')


def _is_text(value: str) -> bool:
    """Return whether a token is text: not empty, and without halves of surrogate pairs, which JSON can contain."""
    return value != "" and not any("\ud800" <= char <= "\udfff" for char in value)


def _flag(config: dict[str, Any], key: str) -> bool | None:
    value = config.get(key)
    if value is None or isinstance(value, bool):
        return value
    raise _unusable(key, value, "true or false")


def _tokens(config: dict[str, Any], older: dict[str, Any]) -> tuple[dict[str, int], tuple[str, ...]]:
    added, special = dict(older), [_content(config.get(key), key) for key in _NAMED]
    decoder = config.get("added_tokens_decoder", {})
    for token_id, entry in decoder.items() if isinstance(decoder, dict) else [("", decoder)]:
        token = _content(entry, "an entry of added_tokens_decoder")
        if token is None or not token_id.isdecimal() or len(token_id) > 10:
            raise _unusable("added_tokens_decoder", {token_id: entry}, "an id and its token")
        added[token] = int(token_id)
        if isinstance(entry, dict) and entry.get("special") is True:
            special.append(token)
    for token, token_id in added.items():
        if type(token_id) is not int or not 0 <= token_id < 2**32 or not _is_text(token):
            raise _unusable("added_tokens.json", {token: token_id}, "a token and its id")
    for key in _LISTED:
        listed = config.get(key, [])
        if not isinstance(listed, list | dict):
            raise _unusable(key, listed, "a list of tokens")
        special += [_content(value, key) for value in (listed.values() if isinstance(listed, dict) else listed)]
    return added, tuple(dict.fromkeys(token for token in special if token is not None))


def _chat_template(read: Reader, where: Path, config: dict[str, Any]) -> str | None:
    """Return the default chat template: of chat_template.jinja, else chat_template.json, else tokenizer_config.json."""
    if (raw := read(name := "chat_template.jinja", MAX_FILE_BYTES)) is not None:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{named(where / name)} is not UTF-8 text: {error}; download the file again") from error
    value = _object(read, where, "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = next((entry.get("template") for entry in value if entry.get("name") == "default"), None)
    if value is None or isinstance(value, str):
        return value
    raise _unusable("chat_template", value, 'a string, or a list of {"name": a string, "template": a string}')


def _unusable(key: str, value: object, expected: str) -> ModelError:
    remedy = "use the tokenizer files that came with this checkpoint"
    return ModelError(f"{key} of the tokenizer is {shown(value)}; expected {expected}; {remedy}")
