"""The two kinds of tokenizer file, behind one interface.

`JsonVocabulary` is tokenizer.json, read by the tokenizers library; `SentencePieceVocabulary` is tokenizer.model, read
by sentencepiece. Both turn text into ids, recognising special tokens written in it, and ids into token strings, None in
a gap of the vocabulary; `Tokenizer` does the rest, the same for both. `size` is the highest id + 1, `special` the ids
that decoding skips, `prefix` and `suffix` the ids that the file puts before and after every text. Every error of the
libraries becomes an error of one line: a ModelError where the file is read, a DataError where a text is encoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import sentencepiece
import tokenizers

from lce.errors import DataError, LceError, ModelError, shown
from lce.files import named, parse_json
from lce.tokenizer.spelling import MOST_STEPS, Spelling, growth

# A field written after a protobuf message overrides the one in it. This one sets normalizer_spec.add_dummy_prefix = 0.
_NO_SPACE_BEFORE = b"\x1a\x02\x18\x00"


# The type of a step that can make a text longer, as the value of a key; or a value that is escaped.
_LENGTHENS = re.compile(rb':\s*"(?:Replace"|Prepend"|[^"\\]*\\u)')
MOST_BYTE_LEVEL = 6  # steps that make two letters of one; published files have three, in three chains
MOST_PATTERN = 4096  # characters of a regular expression; published ones have some 400
MOST_WORD = 1000  # characters of a word under WordPiece; published files say 100
MOST_VALUES = 8_000_000  # in a tokenizer.json; a vocabulary of 256,000 tokens has 2 million
# Encoded when a file is read: a library that panics on them would panic on prompts.
_PROBES = ("", "a", "The fox: 12 dogs\n\tin code();", "é 日本語 नमस्ते 😀 \u200d", " " * 40)
_ESCAPES, _RECALLS = re.compile(r"\\.|\(\?\(", re.DOTALL), {*(rf"\{c}" for c in "123456789kg"), "(?("}
MOST_AROUND = 64  # ids that a post-processor may add; published ones add three at most


@contextmanager
def _one_line(kind: type[LceError], what: str, remedy: str) -> Iterator[None]:
    """Turn every error of a library into one of `kind`, of one line; a Rust panic is a BaseException."""
    try:
        yield
    except (LceError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200]
        reason = reason if reason.isprintable() else shown(reason)
        raise kind(f"{what}: {reason}; {remedy}") from error


def _check_normalizer(raw: bytes, path: Path) -> None:
    """Refuse a normalizer that makes a text many times longer, or takes too long.

    That is before the library applies it to the added tokens. The file is parsed only if it has a step that can do so:
    parsing takes as long as the library does.
    """
    if _LENGTHENS.search(raw) or raw.count(b'ByteLevel"') > MOST_BYTE_LEVEL or raw.count(b'"type"') > MOST_STEPS:
        content = parse_json(raw, MOST_VALUES)
        normalizer = content.get("normalizer") if isinstance(content, dict) else None
        growth(normalizer, "normalizer")
        _check_patterns(normalizer, path)


def _check_patterns(step: object, path: Path) -> None:
    """Refuse regular expressions that look back at what they matched, call themselves, or are long, below a step.

    The library bounds how often a match is tried anew, not what one try compares: 20,000 letters may take hours.
    """
    left = [step]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
            pattern = value.get("Regex")
            if not isinstance(pattern, str):
                continue
            if len(pattern) > MOST_PATTERN or any(found in _RECALLS for found in _ESCAPES.findall(pattern)):
                raise ModelError(
                    f"{named(path)}: its regular expression {shown(pattern)} refers to an earlier match, or has more "
                    f"than {MOST_PATTERN} characters; use the tokenizer files of a published checkpoint"
                )
        elif isinstance(value, list):
            left += value


class JsonVocabulary:
    """tokenizer.json. Those of `special_names` that it has become special tokens too."""

    def __init__(self, raw: bytes, path: Path, special_names: Iterable[str]) -> None:
        self._path = path
        what = f"{named(path)} is not a tokenizer the tokenizers library accepts"
        with _one_line(ModelError, what, "download the file again"):
            _check_normalizer(raw, path)
            self._library = tokenizers.Tokenizer.from_buffer(raw)
            if self._library.pre_tokenizer is not None:
                steps = json.loads(self._library.pre_tokenizer.__getstate__())
                growth(steps, "pretokenizer")
                _check_patterns(steps, path)
            self._library.no_truncation()  # a file may turn on either; encoding must not cut or pad
            self._library.no_padding()
            self._check_words()
            if isinstance(self._library.model, tokenizers.models.BPE):
                self._library.model.dropout = None  # of merges, at random: for training alone
            self._library.add_special_tokens([name for name in special_names if self.id_of(name) is not None])
            self.size = max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
            added = self._library.get_added_tokens_decoder()
            self.special = {token_id for token_id, token in added.items() if token.special}
            decoder = self._library.decoder
            self.spelling = Spelling.of_decoder(json.loads(decoder.__getstate__()) if decoder else None)
            self.prefix, self.suffix = self._around(next((token.content for token in added.values()), "a"))
            self._probe()
        self.bos_id = self.prefix[0] if self.prefix else None
        self.eos_id = self.suffix[-1] if self.suffix else None

    def _check_words(self) -> None:
        """Refuse words of any length where the time for one is more than linear in its length."""
        model = self._library.model
        if isinstance(model, tokenizers.models.WordPiece) and model.max_input_chars_per_word > MOST_WORD:
            raise ModelError(
                f"max_input_chars_per_word is {model.max_input_chars_per_word}; expected at most {MOST_WORD}"
            )

    def _around(self, probe: str) -> tuple[list[int], list[int]]:
        """Return the ids that the post-processor puts before and after a text, found by encoding one token.

        The post-processor is then dropped: it has no other effect on ids.
        """
        processor = self._library.post_processor
        if processor is None:
            return [], []
        if (n_added := processor.num_special_tokens_to_add(False)) > MOST_AROUND:
            raise ModelError(
                f"{named(self._path)}: its post-processor adds {n_added} tokens to every text; expected at most "
                f"{MOST_AROUND}"
            )
        encoding = self._library.encode(probe)
        self._library.post_processor = None
        ids, mask, bare = encoding.ids, encoding.special_tokens_mask, self._library.encode(probe).ids
        inside = [index for index, added in enumerate(mask) if not added] or [len(ids), len(ids) - 1]
        prefix, suffix = ids[: inside[0]], ids[inside[-1] + 1 :]
        if ids[inside[0] : inside[-1] + 1] != bare:
            raise ModelError(f"{named(self._path)}: its post-processor changes the text itself; use another tokenizer")
        return prefix, suffix

    def _probe(self) -> None:
        for text in _PROBES:
            with suppress(Exception):  # a small vocabulary may lack this text; a panic is no Exception
                self._library.encode(text)

    def encode(self, text: str) -> list[int]:
        remedy = "its vocabulary lacks an unknown token or bytes; change the text, or use another tokenizer"
        with _one_line(DataError, f"{named(self._path)} cannot encode this text", remedy):
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def token(self, token_id: int) -> str | None:
        token: str | None = self._library.id_to_token(token_id)
        return token

    def id_of(self, token: str) -> int | None:
        token_id: int | None = self._library.token_to_id(token)
        return token_id


class SentencePieceVocabulary:
    """tokenizer.model, with `added` tokens of other files over its own.

    Sentencepiece never finds a control token such as `<s>` in a text, so the text is split at special and added tokens
    first and each stretch between them is encoded alone. Llama 2 puts a space before every stretch. With
    `space_before_all=False` (transformers' `legacy: false`) only a stretch that begins the text gets one.
    """

    def __init__(
        self, raw: bytes, path: Path, special_names: Iterable[str], added: Mapping[str, int], space_before_all: bool
    ) -> None:
        self._path = path
        remedy = "expected a sentencepiece model (Llama 3's own tokenizer.model is not one: use its tokenizer.json)"
        with _one_line(ModelError, f"{named(path)} cannot be read", remedy):
            if not raw:
                raise ModelError(f"{named(path)} is empty; {remedy}")
            self._opening = sentencepiece.SentencePieceProcessor(model_proto=raw)
            bare = sentencepiece.SentencePieceProcessor(model_proto=raw + _NO_SPACE_BEFORE)
            ids = list(range(len(self._opening)))
            pieces: list[str] = self._opening.id_to_piece(ids)
            controls = {i for i, control in enumerate(self._opening.is_control(ids)) if control}
            spaced = self._opening.encode("a") != bare.encode("a")
        controls.add(self._opening.unk_id())
        self._inner = self._opening if space_before_all else bare
        self._tokens = dict(enumerate(pieces)) | {token_id: token for token, token_id in added.items()}
        self._ids = {token: token_id for token_id, token in self._tokens.items()}
        self.size = max(self._tokens) + 1
        self.special = controls | {self._ids[name] for name in special_names if name in self._ids}
        whole = {self._tokens[token_id] for token_id in self.special} | set(added)
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(whole, key=len, reverse=True))) + ")")
        self.spelling = Spelling((("▁", " "),), form="byte_fallback", strip=" ", strip_count=int(spaced))
        bos_id, eos_id = self._opening.bos_id(), self._opening.eos_id()
        self.bos_id = bos_id if bos_id >= 0 else None
        self.eos_id = eos_id if eos_id >= 0 else None
        self.prefix = [] if self.bos_id is None else [self.bos_id]
        self.suffix: list[int] = []

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        with _one_line(DataError, f"{named(self._path)} cannot encode this text", "please report it with the text"):
            for index, stretch in enumerate(self._split.split(text)):
                if index % 2:
                    ids.append(self._ids[stretch])
                else:
                    ids += (self._inner if index else self._opening).encode(stretch)
        return ids

    def token(self, token_id: int) -> str | None:
        return self._tokens.get(token_id)

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)


Vocabulary = JsonVocabulary | SentencePieceVocabulary
