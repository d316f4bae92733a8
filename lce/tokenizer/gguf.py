"""Makes the files of a tokenizer from the metadata of a GGUF file.

`tokenizer.ggml.model` is one of two kinds that lce reads. The readers of a folder's files read the files made here.

    gpt2     byte-level BPE: `tokens`, `merges`, and `pre`, the name of the rules that     tokenizer.json
             cut a text into words
    llama    sentencepiece's BPE: `tokens`, and `scores`, the order of the merges          tokenizer.model

A GGUF file has less than a tokenizer.json. The rest comes from the tokenizers that were published with the models a
name of `pre` stands for: the regular expressions, the normalizer, and whether a word that is a token may be cut.
So the ids are those with which a model was trained; llama.cpp gives other ids for a few texts.
"""

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lce.errors import ModelError, nearest, shown
from lce.files import MAX_FILE_BYTES, named

MOST_CHARS = 16 << 20  # The most characters of all tokens and merges. Published vocabularies have up to 5 million.
MOST_ADDED = 1 << 20  # The most characters of all tokens that are found in a text as they stand. Gemma 3's have 80,000.
MOST_ADDED_TOKEN = 256  # The most characters of one such token. Published ones have up to some 50.
MOST_TEMPLATE = MAX_FILE_BYTES // 4  # The most characters of a chat template. Published ones have up to 20,000.
_FOLDER = "use the model's safetensors in a folder with its own tokenizer files"
_AGAIN = "download the file again, or another conversion of the model"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # types of tokens, as in sentencepiece
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LLAMA_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # special ids of the kind "llama", if the metadata has none
# Control and added tokens that end a text or a turn, whichever ids a file or a config names.
ENDS = {
    *("</s>", "<EOT>", "_<EOT>", "[EOS]", "[EOT]", "<eos>", "<end_of_turn>", "<end_of_utterance>", "<|end_of_text|>"),
    *("<|endoftext|>", "<|end|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<｜end▁of▁sentence｜>"),
}


@dataclass(frozen=True)
class _Rules:
    """The rules of a byte-level tokenizer. Each of `splits` cuts the pieces that the one before left."""

    splits: tuple[str, ...]
    normalizer: str | None = None
    ignore_merges: bool = False  # whether a word that is a token is never cut
    add_bos: bool = False  # if the metadata does not say


_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT, _SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD, _SYMBOLS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = "|".join((_SHORT, _WORD, r"\p{N}{1,3}", _SYMBOLS, _SPACES))
_QWEN2 = "|".join((_SHORT, _WORD, r"\p{N}", _SYMBOLS, _SPACES))
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_QWEN35 = "|".join((_SHORT, *_MARKED, _SPACES))
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+", r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = "|".join((*_CASED, r"\p{N}", _PATHS, _SPACES))
_GPT4O = "|".join((*(f"{word}{_SHORT}?" for word in _CASED), r"\p{N}{1,3}", _PATHS, _SPACES))

RULES = {  # by the names of `tokenizer.ggml.pre`
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _Rules((_LLAMA3,), ignore_merges=True, add_bos=True)),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _Rules((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Rules((_QWEN2,), "NFC")),
    "qwen35": _Rules((_QWEN35,), "NFC"),
    "tekken": _Rules((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Rules((_GPT4O,))),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _Rules((_DIGIT, _GPT2))),
    "command-r": _Rules((_DIGIT, _GPT2), "NFC"),
    "gpt-2": _Rules((_GPT2,)),
    "olmo": _Rules((_GPT2,), "NFC"),
}


def tokenizer_files(metadata: Mapping[str, Any], where: Path) -> dict[str, bytes]:
    """Return a tokenizer's files, by name, made of a file's metadata. Raises ModelError if it is wrong or unknown."""
    kind = metadata.get(key := "tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{named(where)}: {key} is {shown(kind)}; expected 'gpt2' or 'llama'; {_FOLDER}")
    vocabulary = _Vocabulary(metadata, where)
    files = _byte_level(vocabulary) if kind == "gpt2" else _sentencepiece(vocabulary)
    if (template := metadata.get("tokenizer.chat_template")) is None:
        return files
    if not isinstance(template, str) or len(template) > MOST_TEMPLATE or _SURROGATE.search(template):
        raise vocabulary.wrong("tokenizer.chat_template", template, f"a text of at most {MOST_TEMPLATE} characters")
    return files | {"chat_template.jinja": template.encode()}


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return all ids that end a text or a turn, such as `<|im_end|>`. `tokenizer_files` refuses wrong values."""
    tokens, types = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(types, list):
        tokens, types = [], []
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    if ids[0] is None and metadata.get("tokenizer.ggml.model") == "llama":
        ids[0] = _LLAMA_IDS["eos"]
    found = [token_id for token_id in ids if type(token_id) is int and 0 <= token_id < len(tokens)]
    pairs = zip(tokens, types, strict=False)
    found += [i for i, (token, kind) in enumerate(pairs) if token in ENDS and kind in (_CONTROL, _USER_DEFINED)]
    return list(dict.fromkeys(found))


class _Vocabulary:
    """The part of a GGUF file's metadata that every tokenizer has, checked."""

    def __init__(self, metadata: Mapping[str, Any], where: Path) -> None:
        self.metadata, self._where = metadata, where
        self.tokens = self.strings("tokens")
        if not self.tokens:
            raise self.wrong("tokens", [], "a list of strings")
        self.types = self.numbers("token_type", int)
        if (wrong := next((kind for kind in self.types if not 0 <= kind <= _BYTE), None)) is not None:
            raise self.wrong("token_type", wrong, "types from 1 to 6")
        self.id_of: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            if token and (first := self.id_of.setdefault(token, token_id)) != token_id:
                raise self.wrong("tokens", token, f"each token once, but ids {first} and {token_id} have it")
        kinds = ((token, self.types[token_id]) for token, token_id in self.id_of.items())
        added = {token: kind for token, kind in kinds if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)}
        self.added = {token: kind != _USER_DEFINED for token, kind in added.items()}  # and whether special
        if sum(map(len, added)) > MOST_ADDED or max(map(len, added), default=0) > MOST_ADDED_TOKEN:
            most = f"at most {MOST_ADDED_TOKEN} characters in each control or user-defined token"
            raise self.wrong("tokens", max(added, key=len), f"{most}, and {MOST_ADDED} in all")
        default = _LLAMA_IDS if metadata.get("tokenizer.ggml.model") == "llama" else {}
        self.ids = {name: self._id(name, default.get(name)) for name in ("unknown", "bos", "eos", "eot", "eom")}

    def strings(self, name: str) -> list[str]:
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list) or {*map(type, value)} - {str}:
            raise self.wrong(name, value, "a list of strings")
        if sum(map(len, value)) > MOST_CHARS:
            raise self.wrong(name, value, f"at most {MOST_CHARS} characters in all")
        if wrong := _SURROGATE.search("".join(value)):
            raise self.wrong(name, next(text for text in value if wrong[0] in text), "Unicode text")
        return value

    def numbers(self, name: str, *kinds: type) -> list[Any]:
        """Return a list with a number for each token."""
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list) or not {*map(type, value)} <= {*kinds}:
            raise self.wrong(name, value, "a list with a number for each token")
        if len(value) != len(self.tokens):
            raise self.wrong(name, value, f"{len(self.tokens)} numbers, one for each token, and there are {len(value)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def _id(self, name: str, default: int | None) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id", default)
        if value is None or (type(value) is int and 0 <= value < len(self.tokens) and self.tokens[value]):
            return value
        raise self.wrong(f"{name}_token_id", value, f"the id of a token, below {len(self.tokens)}")

    def settings(self, add_bos: bool) -> bytes:
        """Return tokenizer_config.json. `add_bos` says whether a BOS comes first if the metadata does not."""
        ends = {f"{name}_token": self.tokens[i] for name in ("bos", "eos") if (i := self.ids[name]) is not None}
        defaults = {"add_bos_token": add_bos, "add_eos_token": False}
        flags = {key: self.flag(key, default) for key, default in defaults.items()}
        return json.dumps(flags | ends).encode()

    def wrong(self, name: str, value: object, expected: str, remedy: str = _AGAIN) -> ModelError:
        """Return the error for a value of the metadata."""
        key = name if name.startswith("tokenizer.") else f"tokenizer.ggml.{name}"
        return ModelError(f"{named(self._where)}: {key} is {shown(value)}; expected {expected}; {remedy}")


def _byte_level(vocabulary: _Vocabulary) -> dict[str, bytes]:
    """Return the files of a byte-level BPE. Unused tokens, which pad the embedding, are left out."""
    pre = vocabulary.metadata.get("tokenizer.ggml.pre")
    rules = RULES.get(pre) if isinstance(pre, str) else None
    if rules is None:
        raise vocabulary.wrong("pre", pre, f"rules that lce knows ({nearest(str(pre), RULES)})", _FOLDER)
    ids = {token: i for token, i in vocabulary.id_of.items() if vocabulary.types[i] != _UNUSED}
    added, merges = vocabulary.added, vocabulary.strings("merges")
    normalizer = {"type": rules.normalizer} if rules.normalizer else None
    raw = byte_level_json(ids, added, rules.splits, merges, normalizer=normalizer, ignore_merges=rules.ignore_merges)
    return {"tokenizer.json": raw, "tokenizer_config.json": vocabulary.settings(rules.add_bos)}


def byte_level_json(
    ids: Mapping[str, int],
    added: Mapping[str, bool],
    splits: Sequence[str],
    merges: Sequence[str],
    *,
    normalizer: Mapping[str, str] | None = None,
    ignore_merges: bool,
) -> bytes:
    """Return the tokenizer.json of a byte-level BPE. `added` are the tokens found in a text, and whether special."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    step = {"type": "Split", "behavior": "Isolated", "invert": False}
    words = [{**step, "pattern": {"Regex": regex}} for regex in splits]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": ids[token], "content": token, "special": x, **flags} for token, x in added.items()],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*words, byte_level]},
        "decoder": byte_level,
        "model": {"type": "BPE", "ignore_merges": ignore_merges, "vocab": ids, "merges": merges},
    }
    return json.dumps(content, ensure_ascii=False).encode()


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, bytes]:
    """Return the files of a sentencepiece BPE. Its tokenizer.model is a protobuf message, written here by hand."""
    unknown, tokens, types = vocabulary.ids["unknown"], vocabulary.tokens, vocabulary.types
    scores = vocabulary.numbers("scores", float, int)
    if (wrong := next((score for score in scores if not -1e38 < score < 1e38), None)) is not None:
        raise vocabulary.wrong("scores", wrong, "finite numbers")
    model, added, has_bytes = bytearray(), {}, False
    for token_id, (token, kind, score) in enumerate(zip(tokens, types, scores, strict=True)):
        if _BYTE_TOKEN.fullmatch(token):
            kind, has_bytes = _BYTE, True
        elif kind == _BYTE:
            raise vocabulary.wrong("tokens", token, "<0x00> to <0xFF> for tokens of type 6")
        elif kind == _UNKNOWN or token_id == unknown:  # sentencepiece has exactly one
            kind = _UNKNOWN if token_id == unknown else _CONTROL
        elif kind == _USER_DEFINED:
            added[token] = token_id
        text = token.encode() or b"[EMPTY_%d]" % token_id
        piece = b"\x0a%b%b\x15%b\x18%c" % (_varint(len(text)), text, struct.pack("<f", score), kind or _NORMAL)
        model += b"\x0a%b%b" % (_varint(len(piece)), piece)
    trainer = _number(3, 2) + _number(35, has_bytes)  # a BPE, with byte fallback
    for field, special in zip((45, 46, 47), vocabulary.ids.values(), strict=False):  # unknown, bos and eos
        trainer += b"" if special is None else _length(field, tokens[special].encode())
    normalizer = _length(1, b"identity") + _number(3, vocabulary.flag("add_space_prefix", True))
    normalizer += _number(4, vocabulary.flag("remove_extra_whitespaces", False)) + _number(5, True)  # escapes spaces
    model += _length(2, trainer) + _length(3, normalizer)
    files = {"tokenizer.model": bytes(model), "added_tokens.json": json.dumps(added).encode()}
    return files | {"tokenizer_config.json": vocabulary.settings(add_bos=True)}


def _varint(value: int) -> bytes:
    """Return a number of a protobuf message: groups of seven bits, the lowest first."""
    return bytes((value,)) if value < 128 else bytes((value & 127 | 128,)) + _varint(value >> 7)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _length(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value
