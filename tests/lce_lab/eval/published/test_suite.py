"""How prompts are cut and put into templates."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lce.errors import ModelError, UsageError
from lce_lab.eval.published import find
from lce_lab.eval.published.suite import PublishedSuite
from lce_lab.eval.sample import Sample
from tests.lce_lab.eval.published.layouts import Letters

SAMPLE = Sample("0123456789", " Ask?", ("x",), before="Read: ", opening=" So", system="Sys")


def suite(**how: Any) -> PublishedSuite:
    return PublishedSuite(find("longbench"), Path("none"), **how)


def asked(sample: Sample, tokenizer: Any, template: str = "auto", max_length: int | None = None) -> tuple[str, str]:
    """The beginning that questions of a document share, and the rest."""
    found = suite(template=template, max_length=max_length).prompted(sample, tokenizer)
    return found.beginning, found.question + found.opening


def test_templates() -> None:
    plain, chat = Letters(), Letters("{{ messages }}")
    assert asked(SAMPLE, chat) == ("Read: 0123456789", " Ask? So")
    assert asked(SAMPLE, chat, "chat") == ("<system>Sys<user>Read: 0123456789", " Ask?<assistant> So")
    wrapped = replace(SAMPLE, template="chat")
    assert asked(wrapped, plain) == ("Read: 0123456789", " Ask? So")
    assert asked(wrapped, chat)[0].startswith("<system>")
    assert asked(SAMPLE, plain, "[{system}|{prompt}]") == ("[Sys|Read: 0123456789", " Ask?] So")
    assert asked(replace(SAMPLE, fixed=True), chat, "chat") == ("Read: 0123456789", " Ask? So")


def test_cuts() -> None:
    tokenizer = Letters()
    assert asked(SAMPLE, tokenizer, max_length=22) == ("Read: 0123456789", " Ask? So")  # 21 letters and the first token
    # three tokens and three; of an odd limit LongBench drops one, LongBench v2 does not
    assert "".join(asked(SAMPLE, tokenizer, max_length=7)) == "Re" + "sk?" + " So"
    assert "".join(asked(replace(SAMPLE, cut="middle_joined"), tokenizer, max_length=7)) == "Re" + "Ask?" + " So"
    text = " ".join(f"w{n:03}" for n in range(400))  # 2,000 tokens
    right = replace(SAMPLE, document=text, cut="words_right")
    # room for 800: 800 words, then 550, then 300, then 50
    assert asked(right, tokenizer, max_length=512 + 800)[0] == "Read: " + text[: 50 * 5 - 1]
    left = replace(right, cut="words_left")
    assert asked(left, tokenizer, max_length=512 + 800)[0] == "Read: " + text[-50 * 5 + 1 :]
    with pytest.raises(UsageError, match="max_length is 600; expected more"):
        asked(right, tokenizer, max_length=600)
    with pytest.raises(UsageError, match="a prompt has 22 tokens, max_length is 20, and this benchmark cuts none"):
        asked(replace(SAMPLE, cut="none"), tokenizer, max_length=20)


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(UsageError, match="max_length is 1; expected 2 or more"):
        suite(max_length=1)
    engine: Any = SimpleNamespace(tokenizer=Letters())
    with pytest.raises(ModelError):
        suite(template="chat").make(engine, find("longbench").tasks[0])
