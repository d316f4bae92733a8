"""How prompts are cut and put into templates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lce.errors import ModelError, UsageError
from lce.lab.eval.published.asking import Asking
from lce.lab.eval.published.base import Item


class Words:
    """A tokenizer with a token a character and one before them, and perhaps a chat template."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, bos: bool | None = None) -> list[int]:
        return ([] if bos is False else [0]) + [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) for i in ids if i)

    def require_chat(self) -> None:
        if self.chat_template is None:
            raise ModelError("no chat template")

    def chat(self, messages: list[dict[str, str]]) -> str:
        return "".join(f"<{m['role']}>{m['content'].strip()}" for m in messages) + "<assistant>"


ITEM = Item(0, "Read: ", "0123456789", " Ask?", ("x",), "starts", 8, system="Sys", opening=" So")


def asked(item: Item, tokenizer: Any, template: str = "auto", max_length: int | None = None) -> tuple[str, str]:
    sample = Asking(template, max_length).sample(item, tokenizer)
    return sample.document, sample.question


def test_templates() -> None:
    plain, chat = Words(), Words("{{ messages }}")
    assert asked(ITEM, chat) == ("Read: 0123456789", " Ask? So")
    assert asked(ITEM, chat, "chat") == ("<system>Sys<user>Read: 0123456789", " Ask?<assistant> So")
    wrapped = replace(ITEM, template="chat")
    assert asked(wrapped, plain) == ("Read: 0123456789", " Ask? So")
    assert asked(wrapped, chat)[0].startswith("<system>")
    assert asked(ITEM, plain, "[{system}|{prompt}]") == ("[Sys|Read: 0123456789", " Ask?] So")
    assert asked(replace(ITEM, fixed=True), chat, "chat") == ("Read: 0123456789", " Ask? So")
    with pytest.raises(ModelError):
        Asking("chat").check(plain)
    with pytest.raises(UsageError, match="expected auto, chat, none, or a text with"):
        Asking("llama2")


def test_cuts() -> None:
    tokenizer = Words()
    assert asked(ITEM, tokenizer, max_length=22) == (
        "Read: 0123456789",
        " Ask? So",
    )  # 21 characters and the first token
    # three tokens and three; of an odd limit LongBench drops one, LongBench v2 does not
    assert "".join(asked(ITEM, tokenizer, max_length=7)) == "Re" + "sk?" + " So"
    assert "".join(asked(replace(ITEM, cut="middle_joined"), tokenizer, max_length=7)) == "Re" + "Ask?" + " So"
    text = " ".join(f"w{n:03}" for n in range(400))  # 2,000 tokens
    right = replace(ITEM, context=text, cut="words_right")
    # room for 800: 800 words, then 550, then 300, then 50
    assert asked(right, tokenizer, max_length=512 + 800)[0] == "Read: " + text[: 50 * 5 - 1]
    left = replace(right, cut="words_left")
    assert asked(left, tokenizer, max_length=512 + 800)[0] == "Read: " + text[-50 * 5 + 1 :]
    with pytest.raises(UsageError, match="max_length is 600; expected more"):
        asked(right, tokenizer, max_length=600)
    with pytest.raises(UsageError, match="a prompt has 22 tokens, max_length is 20, and this benchmark cuts none"):
        asked(replace(ITEM, cut="none"), tokenizer, max_length=20)
