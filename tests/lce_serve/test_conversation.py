"""A conversation over HTTP reads each token once; a server that was started anew goes on where the last one ended."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import lce
from lce_serve.service import Service, Settings
from tests.lce_serve.conftest import serving

TURNS = 8


@dataclass
class Talk:
    """One client's conversation: what was said, and the counts of tokens of each turn."""

    model: str
    bias: dict[str, int]
    messages: list[dict[str, str]] = field(default_factory=list)
    usages: list[tuple[int, int, int]] = field(default_factory=list)  # tokens of the prompt, cached, and generated

    def say(self, address: str, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        body = {"model": self.model, "messages": self.messages, "logit_bias": self.bias}
        body |= {"max_tokens": 7, "temperature": 1, "seed": len(self.messages)}
        request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.load(answer)
        self.messages.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
        usage = found["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.usages.append((usage["prompt_tokens"], cached, usage["completion_tokens"]))

    def read_again(self) -> list[int]:
        """Return for each turn but the first how many tokens of the turns before were read once more."""
        pairs = zip(self.usages, self.usages[1:], strict=False)
        return [prompt + said - cached for (prompt, _, said), (_, cached, _) in pairs]


def letters(engine: lce.Engine) -> dict[str, int]:
    """A bias by which answers are of letters, which are the same tokens when they are read again."""
    return {str(engine.tokenizer.encode(each, bos=False)[0]): 100 for each in "abcdefgh .\n"}


@contextmanager
def server(engine: lce.Engine, folder: Path) -> Iterator[tuple[str, Any]]:
    with engine.batch(cache_dir=folder) as batch, serving(Service(Settings("tiny"), batch)) as address:
        yield address, batch


@pytest.mark.parametrize(
    "method", ["longheads", *(pytest.param(name, marks=pytest.mark.slow) for name in ("full", "dca"))]
)
def test_each_token_of_a_conversation_is_read_once(method: str, chat_model: Path, tmp_path: Path) -> None:
    engine = lce.load(chat_model, method, threads=1)
    talk = Talk("tiny", letters(engine))
    with server(engine, tmp_path) as (address, _):
        for turn in range(TURNS):
            talk.say(address, f"turn {turn}: the quick fox")
    with server(engine, tmp_path) as (address, _):
        for turn in range(TURNS, TURNS + 3):
            talk.say(address, f"turn {turn}: the quick fox")
    # The last token of an answer is generated, but was not read yet.
    assert talk.read_again() == [1] * (TURNS + 2)
    assert talk.usages[0][1] == 0


def test_turns_on_a_document_are_read_once(chat_model: Path, tmp_path: Path) -> None:
    engine = lce.load(chat_model, threads=1)
    talk = Talk("tiny@book", letters(engine))
    with server(engine, tmp_path) as (address, batch):
        batch.make_context("book", "It was a bright cold day in April. " * 30).finish()
        for turn in range(6):
            talk.say(address, f"turn {turn}: the quick fox")
    assert talk.read_again() == [1] * 5
