"""Converts text to token ids, and token ids to text, at once or as a stream.

A `Tokenizer` reads a checkpoint's tokenizer.json, else its tokenizer.model, else its tekken.json, and the small files
that name the special tokens. A `Detokenizer` turns a stream of ids into text; `decode` uses one for all its ids. A
token is a run of bytes (see spelling.py), and a stream keeps only the bytes of an unfinished character, at most three.
Bytes that cannot become a character are shown as U+FFFD at once.

    ids         <0xF0>  <0x9F>  <0x98>  <0x80>  ▁Hi             the JSON or sentencepiece vocabulary of Llama 2
    push        ''      ''      ''      '😀'    ' Hi'
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import index
from pathlib import Path
from typing import Any, NoReturn

from lce.errors import DataError, ModelError, UsageError, shown
from lce.files import MAX_FILE_BYTES, Reader, named, object_of
from lce.tokenizer.chat import ChatText, render_chat
from lce.tokenizer.files import REMEDY, JsonVocabulary, SentencePieceVocabulary, TokenizerConfig, Vocabulary
from lce.tokenizer.spelling import Spelling
from lce.tokenizer.tekken import tekken_files
from lce.tokenizer.thinking import MARKS

LARGEST_FILE = 64 << 20  # The most bytes of a tokenizer.json or tokenizer.model. Gemma 3's has 33 MB.
BYTES_A_TOKEN = 1024  # The most bytes of such a file per token of the vocabulary. Published files have about 130.
_CALLS = (  # the marks of lce_serve/forms.py, which many vocabularies call special
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>", "<|tool_call>"),
    *("<tool_call|>", '<|"|>', "<start_function_call>", "<end_function_call>", "<escape>"),
)
_SAID = "This is what was said before."  # stands for the text of a given context, whose messages are unknown


class Detokenizer:
    """A decoder of a growing list of ids, which returns the text piece by piece. `Tokenizer.stream` makes one."""

    def __init__(self, spell: Callable[[int, bool], bytes | None], spelling: Spelling) -> None:
        self._spell, self._first = spell, True
        errors = "replace" if spelling.form == "byte_level" else "lce.replace_each_byte"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._strip, self._strip_left = spelling.strip, spelling.strip_count

    def push(self, token_id: int) -> str:
        """Return the text that this token completes: '' for an unfinished character or a skipped special token."""
        if (spelled := self._spell(token_id, self._first)) is None:
            return ""
        self._first = False
        return self._stripped(self._utf8.decode(spelled))

    def finish(self) -> str:
        """Return the end of the text: U+FFFD for a character that was never completed, else ''."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        n = min(self._strip_left, len(text) - len(text.lstrip(self._strip)))
        self._strip_left = self._strip_left - n if n == len(text) else 0
        return text[n:]


class Tokenizer:
    """A checkpoint's tokenizer, which `from_files` makes. It never changes, and threads may share it.

    `vocab_size` is the highest id + 1, without added tokens for which the embedding has no row; it may have more rows.
    `bos_token` is the string of `bos_id`, `eos_token` that of the first of `eos_ids`, which end a text or a turn. The
    model's config may name more of these.
    """

    def __init__(self, vocabulary: Vocabulary, config: TokenizerConfig, vocab_size: int | None) -> None:
        self._vocabulary, self._path = vocabulary, vocabulary.path
        self._id_limit = vocabulary.size if vocab_size is None else vocab_size
        self.vocab_size = min(vocabulary.size, self._id_limit)
        if (own := vocabulary.own_size) > self._id_limit:
            has = f"has {own} tokens (ids up to {own - 1})"
            raise ModelError(f"{named(self._path)} {has} but the model's embedding has {vocab_size} rows; {REMEDY}")
        token, spelled = vocabulary.token, vocabulary.spelling.bytes_of
        self._bytes_of = cache(lambda i, first: None if (name := token(i)) is None else spelled(name, first))
        self.bos_token, self.bos_id = self._find("bos_token", config.bos_token, vocabulary.bos_id)
        self.eos_token, eos_id = self._find("eos_token", config.eos_token, vocabulary.eos_id)
        ends = (eos_id, *vocabulary.ends)
        self.eos_ids = tuple(dict.fromkeys(i for i in ends if i is not None and i < self._id_limit))
        self._special = vocabulary.special | {i for i in (self.bos_id, eos_id) if i is not None}
        self._prefix = _with_or_without(vocabulary.prefix, self.bos_id, config.add_bos, at_end=False)
        self._suffix = _with_or_without(vocabulary.suffix, eos_id, config.add_eos, at_end=True)
        self.chat_template, self.tool_template = config.chat_template, config.tool_template
        if (wrong := max(self._prefix + self._suffix, default=0)) >= self._id_limit:
            around = f"{named(self._path)} puts the id {wrong} around every text"
            raise ModelError(f"{around}, but there are only ids 0 to {self._id_limit - 1}; {REMEDY}")
        self._controls = tuple(name for i in sorted(self._special) if (name := vocabulary.token(i)))
        self._special -= {vocabulary.id_of(mark) for mark in (*_CALLS, *chain(*MARKS))}  # a text shows what these mark

    @classmethod
    def from_files(cls, read: Reader, where: Path, vocab_size: int | None = None) -> "Tokenizer":
        """Read a checkpoint's tokenizer, or return a `NoTokenizer` if there is no vocabulary.

        `vocab_size` is the number of rows of the model's embedding. `read` gives the files, whose names errors put
        after `where`. Raises ModelError for files that are broken, too large for `vocab_size` tokens, or inconsistent.
        """
        config = TokenizerConfig.read(read, where)
        most = LARGEST_FILE if vocab_size is None else min(LARGEST_FILE, (4 << 20) + BYTES_A_TOKEN * vocab_size)
        if (raw := read("tokenizer.json", most)) is not None:
            return cls(JsonVocabulary(raw, where / "tokenizer.json", config), config, vocab_size)
        if (raw := read("tokenizer.model", most)) is not None:
            return cls(SentencePieceVocabulary(raw, where / "tokenizer.model", config), config, vocab_size)
        if (raw := read("tekken.json", most)) is not None:
            own = object_of(read("tokenizer_config.json", MAX_FILE_BYTES), where / "tokenizer_config.json")
            path, made = where / "tekken.json", tekken_files(raw, where / "tekken.json", own)
            return cls.from_files(lambda name, most: made.get(name) or read(name, most), path, vocab_size)
        return NoTokenizer(where, vocab_size or 0)

    def _find(self, key: str, name: str | None, default: int | None) -> tuple[str | None, int | None]:
        """Return a special token's string and id: those of `name`, or, if `name` is None, those of the id `default`."""
        if name is None:
            return (None if default is None else self._vocabulary.token(default)), default
        if (token_id := self._vocabulary.id_of(name)) is None:
            files = "tokenizer_config.json or special_tokens_map.json"
            raise ModelError(f"the {key} {shown(name)} of {files} is not in {named(self._path)}; {REMEDY}")
        return name, token_id

    def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
        """Return the ids of `text`. Special tokens that are written in the text are recognised.

        `bos` says whether a BOS comes first, unless the text has it already; None follows the tokenizer's rule.
        """
        content = self._encode(text)
        if bos and self.bos_id is None:
            raise UsageError(f"{named(self._path)} has no BOS token to add; leave bos at None or False")
        if self.bos_id is not None and content[:1] == [self.bos_id]:
            bos = False
        return _with_or_without(self._prefix, self.bos_id, bos, at_end=False) + content + self._suffix

    def _encode(self, text: str) -> list[int]:
        """Return the ids of `text` without added special tokens. Raises DataError if `text` is not Unicode text."""
        if not isinstance(text, str):
            raise DataError(f"a text to encode is a str, not {type(text).__name__}; decode bytes as UTF-8 first")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            fault = f"half a surrogate pair, U+{ord(text[error.start]):04X}, at character {error.start}"
            remedy = "expected Unicode text, as decoding with errors='replace' gives"
            raise DataError(f"the text has {fault}; {remedy}") from error
        ids = self._vocabulary.encode(text)
        if self._vocabulary.size > self._id_limit and (wrong := max(ids, default=0)) >= self._id_limit:
            added = f"the text has {shown(self._vocabulary.token(wrong))}, a token that {named(self._path)} adds"
            raise DataError(f"{added} as id {wrong}, but the model has ids 0 to {self._id_limit - 1}; leave it out")
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`. Ids that only pad the embedding have no text. Ids out of range raise UsageError."""
        stream = self.stream(skip_special=skip_special)
        return "".join([stream.push(token_id) for token_id in ids]) + stream.finish()

    def stream(self, *, skip_special: bool = True) -> Detokenizer:
        """Return a new `Detokenizer`. Its pieces of text, joined, are exactly `decode` of the same ids."""

        def spell(token_id: int, first: bool) -> bytes | None:
            try:
                token_id = index(token_id)
            except TypeError:
                kind = type(token_id).__name__
                raise UsageError(f"a token id is an int, not {kind}; decode takes a list of ids") from None
            if not 0 <= token_id < self._id_limit:
                ids = f"{named(self._path)} and its model have ids 0 to {self._id_limit - 1}"
                remedy = "decode ids with the tokenizer that made them"
                raise UsageError(f"token id {token_id} is out of range: {ids}; {remedy}")
            return None if skip_special and token_id in self._special else self._bytes_of(token_id, first)

        return Detokenizer(spell, self._vocabulary.spelling)

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation in this model's chat format; see `render_chat`."""
        return self.render_chat(messages, add_generation_prompt).text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        variables: Mapping[str, Any] | None = None,
        following: bool = False,
        continue_final_message: bool = False,
    ) -> ChatText:
        """Return the chat's text, and where it is split to encode control tokens in messages as plain text.

        `variables` has what else the template may read, such as `tools`. With `following`, the text is what comes
        behind an answer that is already there. With `continue_final_message`, the last message is an answer that has
        begun, and the text ends with it, white space included. Raises ModelError if there is no template, or it is
        broken or leaves out earlier answers, and DataError for messages that it refuses.
        """
        special = {"bos_token": self.bos_token or "", "eos_token": self.eos_token or ""}
        given: dict[str, str | bool] = {**special, "add_generation_prompt": add_generation_prompt}
        before = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _SAID}] if following else []
        template = (self.tool_template if variables and variables.get("tools") else None) or self.require_chat()
        said, begun = [*before, *messages], continue_final_message
        chat = render_chat(template, said, given, self._controls, variables, len(before), continues=begun)
        if not following:
            return chat
        at = chat.text.find(_SAID) + len(_SAID)
        if at < len(_SAID):
            why = "because the chat template leaves out earlier answers; begin a new conversation"
            raise ModelError(f"nothing can be asked behind this context, {why}")
        return ChatText(chat.text[at:], tuple(cut - at for cut in chat.cuts if cut > at), chat.thinking)

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes that a token adds to a text; None for a control token, and for an id without a token."""
        return None if token_id in self._special else self._bytes_of(token_id, False)

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token that is exactly `text`, if there is one: no decoded text has it."""
        return self._vocabulary.id_of(text) if text in self._controls else None

    def has_control(self, text: str) -> bool:
        """Return whether `text` has a control token written out, as a prompt in the chat format has."""
        return any(name in text for name in self._controls)

    def require_chat(self) -> str:
        """Return the chat template. Raises ModelError if the model has none."""
        if self.chat_template is None:
            remedy = "use generate with a prompt alone, or put the chat_template.jinja of a model trained to chat there"
            fault = f"the model in {named(self._path.parent)} has no chat template: it continues text"
            raise ModelError(f"{fault}; {remedy}")
        return self.chat_template

    def encode_parts(self, chat: ChatText, start: int = 0) -> list[int]:
        """Return the ids of a rendered conversation from character `start` on; no BOS is added."""
        parts = chat.parts(start)
        ids = self._encode(parts[0]) if not start else self._encode_after(parts[0])
        return [*ids, *(token_id for part in parts[1:] for token_id in self._encode_after(part))]

    def _encode_after(self, text: str) -> list[int]:
        """Encode a text that continues another text: without the space that some tokenizers put before every text."""
        if not self._vocabulary.spelling.strip_count:
            return self._encode(text)
        before, ids = self._encode("."), self._encode(f".{text}")
        return ids[len(before) :] if ids[: len(before)] == before else self._encode(text)


class NoTokenizer(Tokenizer):
    """A stand-in for a missing tokenizer: a text raises ModelError, and generated ids have an empty text."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.bos_token = self.bos_id = self.eos_token = self.chat_template = self.tool_template = None
        self.eos_ids = self._controls = ()
        self._folder = folder

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        expected = "expected tokenizer.json, tokenizer.model or tekken.json"
        remedy = "give token ids, or copy the checkpoint's tokenizer files there"
        raise ModelError(f"no tokenizer in {named(self._folder)}: {expected}; {remedy}")

    encode = decode = require_chat = _refuse

    def stream(self, *, skip_special: bool = True) -> Detokenizer:
        return Detokenizer(lambda token_id, first: None, Spelling())


def _with_or_without(ids: Sequence[int], token_id: int | None, wanted: bool | None, *, at_end: bool) -> list[int]:
    """Return ids before or after a text: with `token_id` (True), without it (False), or unchanged (None)."""
    if wanted is None or token_id is None or wanted == (token_id in ids):
        return list(ids)
    if not wanted:
        return [i for i in ids if i != token_id]
    return [*ids, token_id] if at_end else [token_id, *ids]


def checked_ids(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Return a prompt of token ids as a list of ints. Raises `UsageError` for other values and ids out of range."""
    try:
        ids = [index(i) for i in token_ids]
    except TypeError:
        expected = "expected text or token ids; engine.chat takes messages"
        raise UsageError(f"the prompt is a {type(token_ids).__name__}; {expected}") from None
    if (wrong := next((i for i in ids if not 0 <= i < vocab_size), None)) is not None:
        raise UsageError(f"token id {wrong} is not in the model's vocabulary; expected 0 to {vocab_size - 1}")
    return ids
