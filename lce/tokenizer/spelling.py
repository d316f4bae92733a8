"""Decodes tokens to bytes, one token at a time.

A tokenizer.json describes its decoder as a chain of steps over a whole list of tokens. For Llama, Mistral and Qwen
models, every chain is equivalent to a `Spelling`, which decodes each token of a stream alone.

    Replace("▁" -> " "), ByteFallback, Fuse, Strip(" ", 1)        Llama 2, Mistral
    ByteLevel                                                     Llama 3, Mistral Nemo, Qwen
"""

import codecs
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lce.errors import ModelError, shown

MOST_STEPS = 64  # The most steps of a decoder, normalizer or pretokenizer. Published ones have up to six.
MOST_GROWTH = 64  # The largest factor by which all steps may lengthen a text. Published ones replace one letter by one.
MOST_INSERTED = 64  # The most characters that a step may insert at once.
MOST_PATTERN = 4096  # The most characters of a regular expression. Published ones have some 400.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# `_ESCAPES` finds a regular expression's escapes and conditions. `_RECALLS` has all that refer to earlier matches.
_ESCAPES, _RECALLS = re.compile(r"\\.|\(\?\(", re.DOTALL), {*(rf"\{c}" for c in "123456789kg"), "(?("}
# GPT-2's table from characters to bytes. Printable bytes are written as themselves, other bytes as the characters
# from U+0100 on: a space is `Ġ`.
_PRINTING = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTING}
_BYTE_LEVEL |= {chr(0x100 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_PRINTING}))}
_CHARACTERS = {byte: char for char, byte in _BYTE_LEVEL.items()}


def characters_of(raw: bytes) -> str:
    """Return the name of a byte-level token: a character for each byte."""
    return raw.decode("latin-1").translate(_CHARACTERS)


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Handle a codec error: return U+FFFD for each byte that is not UTF-8. (Python's `replace` joins some bytes.)"""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("lce.replace_each_byte", _replace_each_byte)


@dataclass(frozen=True)
class Spelling:
    """The rules by which a decoder turns each token into bytes.

    Bytes that are not UTF-8 are shown as U+FFFD. A byte-level decoder shows one U+FFFD for each broken character, as
    the tokenizers library does. A byte-fallback decoder shows one for each broken byte, as sentencepiece does. (The
    tokenizers library shows a whole run of byte tokens as U+FFFD, valid characters included. A stream cannot do this,
    because it has already returned the valid characters.)
    """

    replacements: tuple[tuple[str, str], ...] = ()
    first_drops: str = ""  # the character that is removed from the first token
    separator: str = ""  # the text between two tokens
    form: Literal["text", "byte_fallback", "byte_level"] = "text"
    strip: str = ""  # the character that is stripped from the front of the whole text, at most `strip_count` times
    strip_count: int = 0
    fused: bool = False  # whether the steps read so far join the tokens into one text

    @classmethod
    def of_decoder(cls, decoder: Mapping[str, Any] | None) -> "Spelling":
        """Return the spelling of tokenizer.json's decoder. Raises ModelError if a step needs several tokens at once."""
        if decoder is None:
            return cls(separator=" ")
        check_steps(decoder, "decoder")
        return functools.reduce(cls._then, _steps(decoder, "decoders"), cls())

    def _then(self, step: Mapping[str, Any]) -> "Spelling":
        match step, self.fused:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}, False:
                return replace(self, replacements=(*self.replacements, (old, new)))
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": scheme}, False:
                drops = "" if scheme == "never" else mark
                return replace(self, replacements=(*self.replacements, (mark, " ")), first_drops=drops)
            case {"type": "ByteFallback"}, False if self.form == "text":
                return replace(self, form="byte_fallback")
            case {"type": "ByteLevel"}, False if self.form == "text":
                return replace(self, form="byte_level", fused=True)
            case {"type": "Fuse"}, _:
                return replace(self, fused=True)
            case {"type": "Strip", "content": str(char), "start": int(count), "stop": 0}, True if not self.strip:
                return replace(self, strip=char, strip_count=count)
        expected = "ByteLevel, or Replace, ByteFallback, Metaspace, Fuse and Strip in the order Llama uses them"
        fault = "the tokenizer's decoder has a step that cannot be read token by token"
        raise ModelError(f"{fault}: {shown(dict(step))}; expected {expected}")

    def bytes_of(self, token: str, first: bool) -> bytes:
        """Return the bytes that `token` adds to a text; `first`: as the first token. Byte-level `Ġé` adds b' \\xe9'."""
        if not first:
            token = self.separator + token
        elif self.first_drops:
            token = token.replace(self.first_drops, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.form == "byte_fallback" and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if self.form == "byte_level" and all(char in _BYTE_LEVEL for char in token):
            return bytes(_BYTE_LEVEL[char] for char in token)
        return token.encode()


def check_steps(chain: object, what: str) -> None:
    """Raise ModelError if a chain of steps could write gigabytes of text, or match a regular expression for hours.

    The chain is a tokenizer's "decoder", "normalizer" or "pretokenizer", as `what` says. It is not trusted. A malformed
    step is left to the tokenizers library, which refuses it. The library limits how often a regular expression is
    tried, but not the time of one try: with a reference to an earlier match, a text of 20,000 letters may take hours.
    """
    times = 1.0
    for number, step in enumerate(_steps(chain, f"{what}s")):
        pattern, new = step.get("pattern"), step.get("content", step.get("prepend"))
        old, regex = (pattern.get(kind) if isinstance(pattern, dict) else None for kind in ("String", "Regex"))
        new = new if isinstance(new, str) else ""
        if step.get("type") == "Replace":
            times *= max(1.0, len(new) / len(old) if isinstance(old, str) and old else len(new) + 1.0)
        if step.get("type") == "ByteLevel":  # writes a non-ASCII letter as two or more letters
            times *= 2
        fault = ""
        if number == MOST_STEPS:
            fault = f"has more than {MOST_STEPS} steps"
        elif times > MOST_GROWTH:
            fault = f"makes a text more than {MOST_GROWTH} times longer"
        elif len(new) > MOST_INSERTED:
            fault = f"adds more than {MOST_INSERTED} characters at once"
        elif isinstance(regex, str) and (len(regex) > MOST_PATTERN or not _RECALLS.isdisjoint(_ESCAPES.findall(regex))):
            long = f"has more than {MOST_PATTERN} characters"
            fault = f"has the regular expression {shown(regex)}, which refers to an earlier match, or {long}"
        if fault:
            raise ModelError(f"the tokenizer's {what} {fault}; use the tokenizer files of a published checkpoint")


def _steps(chain: object, inner: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a chain. A step of type Sequence is replaced by the steps listed under its key `inner`."""
    if isinstance(chain, dict) and chain.get("type") == "Sequence":
        parts = chain.get(inner)
        for part in parts if isinstance(parts, list) else []:
            yield from _steps(part, inner)
    elif isinstance(chain, dict):
        yield chain
