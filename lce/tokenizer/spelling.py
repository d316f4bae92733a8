"""How tokens are written as bytes, one token at a time.

A tokenizer describes its decoder as a chain of steps over a whole list of tokens. Every chain of Llama, Mistral and
Qwen models comes down to four facts: the bytes of each token, what is removed from the first token, what is stripped
from the front of the text, and how bytes that are not UTF-8 are shown. A `Spelling` holds these four, so that a text
can grow token by token without being decoded again.

    Replace("▁" -> " "), ByteFallback, Fuse, Strip(" ", 1)        Llama 2, Mistral
    ByteLevel                                                     Llama 3, Mistral Nemo, Qwen
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lce.errors import ModelError, shown

MOST_GROWTH, MOST_INSERTED = 64, 64  # published chains replace one character by one
MOST_STEPS = 64  # of a chain; published ones have up to six
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte behind each character of a byte-level vocabulary: GPT-2's table, in which `Ġ` is a space.

    Bytes that print stand for themselves; the others take the characters from U+0100 on, in order.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_BYTE_LEVEL = _byte_level_alphabet()


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Return a codec error handler: U+FFFD for each byte that is not UTF-8 (Python's own `replace` joins some)."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("lce.replace_each_byte", _replace_each_byte)


@dataclass(frozen=True)
class Spelling:
    """The rules by which a decoder turns each token of a list into bytes.

    Bytes that are not UTF-8 become U+FFFD. Byte-level decoders show one for each longest broken character, as the
    tokenizers library does. Byte-fallback decoders show one for each broken byte, as sentencepiece does. (There the
    tokenizers library replaces a whole run of byte tokens if one of them is broken, valid characters included. Such a
    run could not be streamed before its end.) On valid UTF-8 all of them agree.
    """

    replacements: tuple[tuple[str, str], ...] = ()
    first_drops: str = ""  # a character that is removed from the first token
    separator: str = ""  # stands between tokens
    form: Literal["text", "byte_fallback", "byte_level"] = "text"
    strip: str = ""  # the character stripped from the front of the whole text, at most strip_count times
    strip_count: int = 0
    fused: bool = False  # the steps so far join the tokens into one text

    @classmethod
    def of_decoder(cls, decoder: Mapping[str, Any] | None) -> Spelling:
        """Return the spelling of tokenizer.json's decoder. Raises ModelError if it does not work token by token."""
        if decoder is None:
            return cls(separator=" ")
        spelling = cls()
        growth(decoder, "decoder")
        for step in _steps(decoder, "decoders"):
            spelling = spelling._then(step)
        return spelling

    def _then(self, step: Mapping[str, Any]) -> Spelling:
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
        raise ModelError(
            f"the tokenizer's decoder has a step that cannot be read token by token: {shown(dict(step))}; "
            "expected ByteLevel, or Replace, ByteFallback, Metaspace, Fuse and Strip in the order Llama uses them"
        )

    @property
    def errors(self) -> str:
        """Return the name of the codec error handler that shows broken bytes as this decoder does."""
        return "replace" if self.form == "byte_level" else "lce.replace_each_byte"

    def bytes_of(self, token: str, first: bool) -> bytes:
        """Return the bytes that `token` adds to the text: `Ġé` of a byte-level vocabulary is b' \\xe9'."""
        if first:
            token = token.replace(self.first_drops, "") if self.first_drops else token
        else:
            token = self.separator + token
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.form == "byte_fallback" and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if self.form == "byte_level" and all(char in _BYTE_LEVEL for char in token):
            return bytes(_BYTE_LEVEL[char] for char in token)
        return token.encode()


def growth(chain: object, what: str) -> float:
    """Return how many times longer the steps of a decoder, normalizer or pre-tokenizer make a text, at most.

    Raises ModelError for more than `MOST_GROWTH`, and for more than `MOST_STEPS` steps: a few steps could make a text
    of any length of one letter. `chain` is not trusted; a step that is malformed is left to the library.
    """
    times = 1.0
    for number, step in enumerate(_steps(chain, f"{what}s")):
        pattern, new = step.get("pattern"), step.get("content", step.get("prepend"))
        old, new = pattern.get("String") if isinstance(pattern, dict) else "", new if isinstance(new, str) else ""
        if step.get("type") == "Replace":
            times *= max(1.0, len(new) / len(old) if isinstance(old, str) and old else len(new) + 1.0)
        if step.get("type") == "ByteLevel":  # a letter that is not ASCII becomes two or more
            times *= 2
        if number == MOST_STEPS:
            raise ModelError(
                f"the tokenizer's {what} has more than {MOST_STEPS} steps; use the tokenizer files of a published "
                "checkpoint"
            )
        if times > MOST_GROWTH or len(new) > MOST_INSERTED:
            raise ModelError(
                f"the tokenizer's {what} makes a text more than {MOST_GROWTH} times longer, or adds more than "
                f"{MOST_INSERTED} characters at once; use the tokenizer files of a published checkpoint"
            )
    return times


def _steps(chain: object, inner: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a chain, a Sequence's in its place."""
    left = [chain]
    while left:
        step = left.pop()
        if isinstance(step, dict) and step.get("type") == "Sequence":
            parts = step.get(inner)
            left += reversed(parts) if isinstance(parts, list) else []
        elif isinstance(step, dict):
            yield step
