"""The files of a tokenizer: the two kinds of vocabulary behind one interface, and the small files beside them.

`JsonVocabulary` is tokenizer.json, read by the tokenizers library. `SentencePieceVocabulary` is tokenizer.model, read
by sentencepiece. Both encode a text with special tokens in it. `token` maps an id to the token's string (None for an id
that no token has), and `id_of` a string to the id. `size` is the highest id + 1, `own_size` that without added tokens,
`special` are the ids that decoding skips, `ends` those of well-known tokens that end a text or a turn, `prefix` and
`suffix` are the ids that the file puts before and after every text. An error of either library becomes one of lce.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import sentencepiece
import tokenizers

from lce.errors import DataError, LceError, ModelError, shown
from lce.files import MAX_FILE_BYTES, Reader, named, object_of, parse_json
from lce.tokenizer.gguf import ENDS
from lce.tokenizer.spelling import MOST_STEPS, Spelling, check_steps

REMEDY = "use the tokenizer files that came with this checkpoint"
LONG_TEXT = 1 << 14  # characters from which on a text is encoded without Python's lock, so that other threads go on
# The protobuf field normalizer_spec.add_dummy_prefix = 0. Appended to a model's bytes, it overrides the model's field.
_NO_SPACE_BEFORE = b"\x1a\x02\x18\x00"
# Matches the JSON type of a step that can make a text longer, and any value with an escape, which may be such a type.
_LENGTHENS = re.compile(rb':\s*"(?:Replace"|Prepend"|[^"\\]*\\u)')
MOST_BYTE_LEVEL = 6  # The most ByteLevel steps, each of which may double a text. Published files have three.
MOST_WORD = 1000  # The most characters of a word for WordPiece, which takes quadratic time. Published files say 100.
MOST_VALUES = 8_000_000  # The most JSON values in a tokenizer.json. A vocabulary of 256,000 tokens has 2 million.
MOST_AROUND = 64  # The most ids that a post-processor may add to a text. Published ones add up to three.
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_TEXT = re.compile("[^\ud800-\udfff]+")  # what a token may be: JSON can contain halves of surrogate pairs
_LISTED = ("additional_special_tokens", "extra_special_tokens")


@contextmanager
def one_line(kind: type[LceError], what: str, remedy: str) -> Iterator[None]:
    """Turn every error of a library into a one-line error of class `kind`. A Rust panic raises a BaseException."""
    try:
        yield
    except (LceError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200]
        reason = reason if reason.isprintable() else shown(reason)
        raise kind(f"{what}: {reason}; {remedy}") from error


@dataclass(frozen=True)
class TokenizerConfig:
    """The settings in a tokenizer's small files, all of them optional. A setting that no file has is None."""

    bos_token: str | None
    eos_token: str | None
    add_bos: bool | None
    add_eos: bool | None
    space_before_all: bool  # whether sentencepiece puts a space before every stretch of text after a special token
    special_names: tuple[str, ...]  # the tokens that the files call special
    added: dict[str, int]  # tokens and their ids, which take precedence over the vocabulary's
    chat_template: str | None
    tool_template: str | None = None  # the named template `tool_use`, for chats with tools

    @classmethod
    def read(cls, read: Reader, where: Path) -> Self:
        """Read a tokenizer's files, all except the vocabulary. Raises ModelError, naming `where`, for a broken one."""
        names = "special_tokens_map.json", "tokenizer_config.json", "added_tokens.json"
        config, own, older = (object_of(read(name, MAX_FILE_BYTES), where / name) for name in names)
        config |= {key: value for key, value in own.items() if value is not None}
        added, special_names = _tokens(config, older)  # older checkpoints have added tokens in a file of their own
        bos, eos = (_content(config.get(key), key) for key in ("bos_token", "eos_token"))
        add_bos, add_eos, legacy = (_flag(config, key) for key in ("add_bos_token", "add_eos_token", "legacy"))
        found = _chat_template(read, where, config), _named_template(config.get("chat_template"), "tool_use")
        templates = ((template and template.removeprefix("\ufeff")) or None for template in found)
        return cls(bos, eos, add_bos, add_eos, legacy is not False, special_names, added, *templates)


class JsonVocabulary:
    """The vocabulary in a tokenizer.json. Tokens that the small files call special become special."""

    def __init__(self, raw: bytes, path: Path, config: TokenizerConfig) -> None:
        self.path = path
        what = f"{named(path)} is not a tokenizer the tokenizers library accepts"
        with one_line(ModelError, what, "download the file again"):
            # Checked before the library applies the normalizer to added tokens; only what may be refused is parsed.
            n_doubling, n_steps = raw.count(b'ByteLevel"'), raw.count(b'"type"')
            if _LENGTHENS.search(raw) or n_doubling > MOST_BYTE_LEVEL or n_steps > MOST_STEPS:
                content = parse_json(raw, MOST_VALUES)
                check_steps(content.get("normalizer") if isinstance(content, dict) else None, "normalizer")
            self._library = library = tokenizers.Tokenizer.from_buffer(raw)
            if library.pre_tokenizer is not None:
                check_steps(json.loads(library.pre_tokenizer.__getstate__()), "pretokenizer")
            most = getattr(library.model, "max_input_chars_per_word", 0)
            if most > MOST_WORD:
                raise ModelError(f"max_input_chars_per_word is {most}; expected at most {MOST_WORD}")
            if isinstance(library.model, tokenizers.models.BPE):
                library.model.dropout = None  # in training, dropout skips merges at random
            library.no_truncation()  # a file may ask for truncation or padding; encoding must do neither
            library.no_padding()
            self.token: Callable[[int], str | None] = library.id_to_token
            self.id_of: Callable[[str], int | None] = library.token_to_id
            library.add_special_tokens([name for name in config.special_names if self.id_of(name) is not None])
            self.size = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
            added = library.get_added_tokens_decoder()
            self.own_size = max({*library.get_vocab().values()} - added.keys(), default=-1) + 1
            self.special = {token_id for token_id, token in added.items() if token.special}
            self.ends = sorted(token_id for token_id, token in added.items() if token.content in ENDS)
            decoder = library.decoder
            self.spelling = Spelling.of_decoder(json.loads(decoder.__getstate__()) if decoder else None)
            self.prefix, self.suffix = self._around(next((token.content for token in added.values()), "a"))
        self.bos_id = self.prefix[0] if self.prefix else None
        self.eos_id = self.suffix[-1] if self.suffix else None

    def _around(self, probe: str) -> tuple[list[int], list[int]]:
        """Return the ids that the post-processor puts around a text; remove it, as it must do nothing else to ids."""
        if (processor := self._library.post_processor) is None:
            return [], []
        if (n_added := processor.num_special_tokens_to_add(False)) > MOST_AROUND:
            adds = f"its post-processor adds {n_added} tokens to every text; expected at most {MOST_AROUND}"
            raise ModelError(f"{named(self.path)}: {adds}")
        encoding = self._library.encode(probe)
        self._library.post_processor = None
        ids, bare = encoding.ids, self._library.encode(probe).ids
        inside = [index for index, added in enumerate(encoding.special_tokens_mask) if not added]
        start, stop = (inside[0], inside[-1] + 1) if inside else (len(ids), len(ids))
        if ids[start:stop] != bare:
            raise ModelError(f"{named(self.path)}: its post-processor changes the text itself; use another tokenizer")
        return ids[:start], ids[stop:]

    def encode(self, text: str) -> list[int]:
        remedy = "its vocabulary lacks an unknown token or bytes; change the text, or use another tokenizer"
        with one_line(DataError, f"{named(self.path)} cannot encode this text", remedy):
            if len(text) < LONG_TEXT:
                found = self._library.encode(text, add_special_tokens=False)
            else:  # the library holds Python's lock in `encode`, but not here
                (found,) = self._library.encode_batch_fast([text], add_special_tokens=False)
            ids: list[int] = found.ids
        return ids


class SentencePieceVocabulary:
    """The vocabulary in a tokenizer.model. Tokens that the small files add take precedence over the model's own.

    Sentencepiece never finds a control token such as `<s>` in a text. So a text is split at special and added tokens
    first, and each stretch between these tokens is encoded alone. Llama 2 puts a space before every stretch. Without
    `config.space_before_all` (transformers' `legacy: false`) only a stretch that begins the text gets a space.
    """

    def __init__(self, raw: bytes, path: Path, config: TokenizerConfig) -> None:
        self.path = path
        remedy = "expected a sentencepiece model (Llama 3's own tokenizer.model is not one: use its tokenizer.json)"
        with one_line(ModelError, f"{named(path)} cannot be read", remedy):
            if not raw:
                raise ModelError(f"{named(path)} is empty; {remedy}")
            self._opening = sentencepiece.SentencePieceProcessor(model_proto=raw)
            bare = sentencepiece.SentencePieceProcessor(model_proto=raw + _NO_SPACE_BEFORE)
            ids = list(range(len(self._opening)))
            pieces: list[str] = self._opening.id_to_piece(ids)
            controls = {i for i, control in enumerate(self._opening.is_control(ids)) if control}
            spaced = self._opening.encode("a") != bare.encode("a")
        controls |= {self._opening.unk_id()} - {-1}  # -1: no piece is unknown
        self._inner = self._opening if config.space_before_all else bare
        self._tokens = dict(enumerate(pieces)) | {token_id: token for token, token_id in config.added.items()}
        self._ids = {token: token_id for token_id, token in self._tokens.items()}
        self.token: Callable[[int], str | None] = self._tokens.get
        self.id_of: Callable[[str], int | None] = self._ids.get
        self.size = max(self._tokens) + 1
        self.own_size = max(self._tokens.keys() - {*config.added.values()}, default=-1) + 1
        self.special = controls | {self._ids[name] for name in config.special_names if name in self._ids}
        self.ends = sorted(i for i in {*self.special, *config.added.values()} if self._tokens[i] in ENDS)
        whole = {self._tokens[token_id] for token_id in self.special} | set(config.added)
        self._split = re.compile(f"({_longest_of(whole)})")
        self.spelling = Spelling((("▁", " "),), form="byte_fallback", strip=" ", strip_count=int(spaced))
        ends = self._opening.bos_id(), self._opening.eos_id()
        self.bos_id, self.eos_id = (token_id if token_id >= 0 else None for token_id in ends)
        self.prefix = [] if self.bos_id is None else [self.bos_id]
        self.suffix: list[int] = []

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        with one_line(DataError, f"{named(self.path)} cannot encode this text", "please report it with the text"):
            for index, stretch in enumerate(self._split.split(text)):
                if index % 2:
                    ids.append(self._ids[stretch])
                else:
                    ids += (self._inner if index else self._opening).encode(stretch)
        return ids


def _longest_of(tokens: Iterable[str]) -> str:
    """Return a regular expression that matches the longest of `tokens`, grouped by two characters, for speed."""
    groups: dict[str, list[str]] = {}
    for token in sorted(tokens, key=len, reverse=True):
        groups.setdefault(token[:2], []).append(re.escape(token[2:]))
    ordered = sorted(groups.items(), key=lambda group: len(group[0]), reverse=True)
    return "|".join(f"{re.escape(start)}(?:{'|'.join(ends)})" for start, ends in ordered)


Vocabulary = JsonVocabulary | SentencePieceVocabulary


def _content(value: object, key: str) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    if value is None:
        return None
    if isinstance(content, str) and _TEXT.fullmatch(content):
        return content
    raise _unusable(key, value, 'a string or {"content": a string}')


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
        if type(token_id) is not int or not 0 <= token_id < 2**32 or not _TEXT.fullmatch(token):
            raise _unusable("added_tokens.json", {token: token_id}, "a token and its id")
    for key in _LISTED:
        listed = config.get(key, [])
        if not isinstance(listed, list | dict):
            raise _unusable(key, listed, "a list of tokens")
        special += [_content(value, key) for value in (listed.values() if isinstance(listed, dict) else listed)]
    return added, tuple(dict.fromkeys(token for token in special if token is not None))


def _chat_template(read: Reader, where: Path, config: dict[str, Any]) -> str | None:
    """Return the default chat template: of chat_template.jinja, else chat_template.json, else tokenizer_config.json."""
    name, older = "chat_template.jinja", "chat_template.json"
    if (raw := read(name, MAX_FILE_BYTES)) is not None:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{named(where / name)} is not UTF-8 text: {error}; download the file again") from error
    value = object_of(read(older, MAX_FILE_BYTES), where / older).get("chat_template", config.get("chat_template"))
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = next((entry.get("template") for entry in value if entry.get("name") == "default"), None)
    if value is None or isinstance(value, str):
        return value
    raise _unusable("chat_template", value, 'a string, or a list of {"name": a string, "template": a string}')


def _named_template(value: object, name: str) -> str | None:
    """Return a template of a list of named templates; None if there is none."""
    entries = [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
    found = next((each.get("template") for each in entries if each.get("name") == name), None)
    return found if isinstance(found, str) else None


def _unusable(key: str, value: object, expected: str) -> ModelError:
    return ModelError(f"{key} of the tokenizer is {shown(value)}; expected {expected}; {REMEDY}")
