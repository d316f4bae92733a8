"""A conversation over HTTP reads each token once; a server that was started anew goes on where the last one ended."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest

import lce
from lce_serve.service import Load, Service, Settings
from tests.command import run, within
from tests.lce_serve.conftest import serving

TURNS = 5


@pytest.mark.parametrize("method", ["longheads", *(pytest.param(x, marks=pytest.mark.slow) for x in ("full", "dca"))])
def test_each_token_of_a_conversation_is_read_once(method: str, chat_model: Path, tmp_path: Path) -> None:
    engine = lce.load(chat_model, method, threads=1)
    # Answers are of letters, which are the same tokens when they are read again.
    bias = {str(engine.tokenizer.encode(each, bos=False)[0]): 100 for each in "abcdefgh .\n"}
    messages: list[dict[str, str]] = []
    usages: list[dict[str, Any]] = []
    for turns in (range(TURNS), range(TURNS, TURNS + 2)):
        with engine.batch(cache_dir=tmp_path) as batch, serving(Service(Settings("tiny"), batch)) as address:
            for turn in turns:
                messages.append({"role": "user", "content": f"turn {turn}: the quick fox"})
                body = {"messages": messages, "max_tokens": 7, "temperature": 1, "seed": turn, "logit_bias": bias}
                found = httpx2.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()
                messages.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
                usages.append(found["usage"])
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0
    for (before, _), (_, now) in pairwise(zip(usages, cached, strict=True)):
        assert now == before["total_tokens"] - 1  # the last token of an answer is generated, but was not read yet


def letters(engine: lce.Engine) -> dict[int, float]:
    """Biases for which answers are single letters, which are other tokens when their text is read."""
    tokenizer = engine.tokenizer
    bias = {i: -100.0 for i in range(tokenizer.vocab_size) if tokenizer.bytes_of(i) is None}
    return bias | {tokenizer.encode(letter, bos=False)[0]: 100.0 for letter in "the"}


def test_a_conversation_is_found_though_its_end_is_asked_anew(chat_model: Path) -> None:
    """The method goes back a little."""
    engine, messages, n_read = lce.load(chat_model, lce.methods.SelfExtend(local=4), block=16), list[Any](), list[int]()
    tokenizer, bias = engine.tokenizer, letters(engine)
    with engine.batch() as batch:
        for turn in range(8):
            messages.append({"role": "user", "content": f"turn {turn}: the quick fox and the lazy dog"})
            how: Any = {"max_tokens": 24, "temperature": 1.0, "seed": turn, "logit_bias": bias}
            found = within(batch.chat(messages, **how).finish)
            assert tokenizer.encode(found.text, bos=False) != found.token_ids
            messages.append({"role": "assistant", "content": found.text})
            n_read.append(found.stats.prompt_tokens - found.stats.read_before)
        for changed in (messages[:-1], [*messages[:-2], {"role": "user", "content": "something else"}]):
            found = within(batch.chat(changed, max_tokens=4, temperature=0).finish)
            n_read.append(found.stats.prompt_tokens - found.stats.read_before)
    assert max(n_read) < 50, "of the 510 tokens at the end"


def test_a_repeatable_batch_reads_a_history_as_if_it_were_new(chat_model: Path) -> None:
    """Even where a kept text begins alike in other tokens."""
    engine, messages = lce.load(chat_model, block=16), list[Any]()
    encode = partial(engine.tokenizer.encode, bos=False)
    spelled = [*encode("<|turn|>user\n"), *(i for letter in "turn 0: the quick" for i in encode(letter))]
    with engine.batch(repeatable=True) as batch:
        within(batch.read(spelled).finish)
        for turn in range(4):
            messages.append({"role": "user", "content": f"turn {turn}: the quick fox and the lazy dog"})
            how: Any = {
                "max_tokens": 24,
                "temperature": 1.0,
                "seed": turn,
                "logit_bias": letters(engine),
                "logprobs": 0,
            }
            with engine.batch(repeatable=True) as other:
                streams = [each.chat(messages, **how) for each in (batch, other)]
                found, anew = [within(each.finish) for each in streams]
            assert (found.token_ids, found.logprobs) == (anew.token_ids, anew.logprobs)
            assert streams[0].prompt_ids == streams[1].prompt_ids
            assert (found.stats.read_before > 0, anew.stats.read_before) == (turn > 0, 0)
            messages.append({"role": "assistant", "content": found.text})


def test_the_command_has_repeatable_batches(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(load: Load, named: object) -> None:
        raise lce.UsageError(f"repeatable is {load.batch['repeatable']}")

    monkeypatch.setattr(Load, "begin", begin)
    for flags in ((), ("--repeatable",)):
        assert f"repeatable is {bool(flags)}" in run("serve", "-m", chat_model, "--port", "0", *flags).output
