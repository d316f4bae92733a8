"""The two kinds of tokenizer file, behind one interface.

`JsonVocabulary` is tokenizer.json, read by the tokenizers library; `SentencePieceVocabulary` is tokenizer.model, read
by sentencepiece. Both turn text into ids, recognising special tokens written in it, and ids into token strings, None in
a gap of the vocabulary; `Tokenizer` does the rest, the same for both. `size` is the highest id + 1, `special` the ids
that decoding skips, `prefix` and `suffix` the ids that the file puts before and after every text. Every error of the
libraries becomes a ModelError of one line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import sentencepiece
import tokenizers

from lce.errors import ModelError
from lce.tokenizer.spelling import Spelling

# A field written after a protobuf message overrides the one in it. This one sets normalizer_spec.add_dummy_prefix = 0.
_NO_SPACE_BEFORE = b"\x1a\x02\x18\x00"


@contextmanager
def _model_errors(what: str, remedy: str) -> Iterator[None]:
    """Turn every error of a library into a ModelError of one line; a Rust panic is a BaseException."""
    try:
        yield
    except (ModelError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{what}: {reason}; {remedy}") from error


class JsonVocabulary:
    """tokenizer.json. Those of `special_names` that it has become special tokens too."""

    def __init__(self, raw: bytes, path: Path, special_names: Iterable[str]) -> None:
        self._path = path
        with _model_errors(f"{path} is not a tokenizer the tokenizers library accepts", "download the file again"):
            self._library = tokenizers.Tokenizer.from_buffer(raw)
            self._library.no_truncation()  # a file may turn on either; encoding must not cut or pad
            self._library.no_padding()
            self._library.add_special_tokens([name for name in special_names if self.id_of(name) is not None])
            self.size = max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
            added = self._library.get_added_tokens_decoder()
            self.special = {token_id for token_id, token in added.items() if token.special}
            decoder = self._library.decoder
            self.spelling = Spelling.of_decoder(json.loads(decoder.__getstate__()) if decoder else None)
            self.prefix, self.suffix = self._around(next((token.content for token in added.values()), "a"))
        self.bos_id = self.prefix[0] if self.prefix else None
        self.eos_id = self.suffix[-1] if self.suffix else None

    def _around(self, probe: str) -> tuple[list[int], list[int]]:
        """The ids that the post-processor puts before and after a text, found by encoding one token."""
        if self._library.post_processor is None:
            return [], []
        encoding = self._library.encode(probe)
        inside = [index for index, added in enumerate(encoding.special_tokens_mask) if not added]
        if not inside:
            return encoding.ids, []
        return encoding.ids[: inside[0]], encoding.ids[inside[-1] + 1 :]

    def encode(self, text: str) -> list[int]:
        with _model_errors(f"{self._path} cannot encode this text", "its vocabulary lacks an unknown token or bytes"):
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
        with _model_errors(f"{path} cannot be read", remedy):
            if not raw:
                raise ModelError(f"{path} is empty; {remedy}")
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
        with _model_errors(f"{self._path} cannot encode this text", "please report it with the text"):
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
