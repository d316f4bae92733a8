"""Answers on scripted tokens, and stop strings however the text is cut."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lce.engine.answer import Answer, Options, StopWatch, logprobs_of
from lce.engine.arguments import Sampling
from lce.engine.stream import Generation
from lce.tokenizer.tokenizer import Tokenizer
from lce.weights.source import Source

EOS = 1

SHORT = st.text("abc", max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple)


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the text is cut: at the start of the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return min(complete)
    return None


def could_begin(text: str, stops: Sequence[str]) -> str:
    """The longest end of the text that a stop string begins with."""
    ends = (text[at:] for at in range(len(text)))
    return next((end for end in ends if any(stop.startswith(end) for stop in stops)), "")


@given(pieces=st.lists(SHORT, max_size=8), stops=STOPS)
@settings(max_examples=400, deadline=None)
def test_the_text_before_the_first_stop_string_however_it_is_cut(pieces: list[str], stops: tuple[str, ...]) -> None:
    text, watch = "".join(pieces), StopWatch(stops)
    cut = first_stop(text, stops)
    said = "".join([*map(watch.push, pieces), watch.finish()])
    assert (said, watch.stopped is None) == (text if cut is None else text[:cut], cut is None)


@given(text=SHORT, stops=STOPS)
@settings(max_examples=200, deadline=None)
def test_text_is_said_as_soon_as_it_is_certain(text: str, stops: tuple[str, ...]) -> None:
    """After every character: all that no stop string can take back any more, and nothing else."""
    watch, said = StopWatch(stops), ""
    for end in range(1, len(text) + 1):
        said += watch.push(text[end - 1])
        if watch.stopped:
            break
        assert said + could_begin(text[:end], stops) == text[:end]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Source(tiny_model).tokenizer()


class Script:
    """Stands for the model: its greedy tokens are `tokens`, one after another."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.calls = tokens, 0

    def logits(self) -> Tensor:
        self.calls += 1
        return torch.nn.functional.one_hot(torch.tensor(self.tokens[self.calls - 1]), 300).float()

    def run(self, tokenizer: Tokenizer, stop: Sequence[str] = (), limit: int = 999) -> tuple[list[str], Generation]:
        options, pieces = Options(limit, sampling=Sampling(stop=tuple(stop))), []
        answer = Answer(options, {EOS, 299}, tokenizer, Generation())
        while not answer.done:
            pieces.append(answer.take(self.logits()))
        result = answer.result
        assert (result.text, result.stats.generated_tokens) == ("".join(pieces), len(result.token_ids))
        return [piece for piece in pieces if piece], result


TEXT = "The quick brown fox jumps over the 日本 dog 😀, and then over the moon."


def test_an_end_token_ends_the_text_and_is_not_in_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, bos=False)
    for end in (EOS, 299):
        pieces, result = Script([*ids, end, *ids]).run(tokenizer)
        assert (result.text, result.token_ids, result.finish_reason) == (TEXT, ids, "stop")
        assert len(pieces) > 10


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_stop_strings_lie_across_tokens_as_they_like(data: st.DataObject, tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode(TEXT, bos=False), EOS]
    low = data.draw(st.integers(0, len(TEXT) - 1))
    stop = TEXT[low : data.draw(st.integers(low + 1, min(len(TEXT), low + 12)))]
    also = data.draw(st.lists(st.text("the foxz", min_size=1, max_size=4), max_size=2))
    script = Script(ids)
    _, result = script.run(tokenizer, [*also, stop])
    cut = first_stop(TEXT, [*also, stop])
    assert (result.text, result.finish_reason) == (TEXT[:cut], "stop")
    assert script.calls == len(result.token_ids), "not a token is drawn beyond the stop string"
    assert first_stop(tokenizer.decode(result.token_ids[:-1]), [*also, stop]) is None


def test_a_stop_string_that_never_ends_is_said_after_all(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, bos=False)
    for tokens, limit, reason in (([*ids, EOS], 999, "stop"), (ids, len(ids), "length")):
        _, result = Script(tokens).run(tokenizer, [". And", "moon.x"], limit)
        assert (result.text, result.finish_reason) == (TEXT, reason)


def test_a_call_that_fails_takes_nothing(tokenizer: Tokenizer) -> None:
    ids, fails = tokenizer.encode(TEXT, bos=False), [False]

    def stop(text: str) -> bool:
        if fails[0]:
            raise KeyboardInterrupt
        return False

    result = Generation(logprobs=[])
    script, answer = Script(ids), Answer(Options(9, sampling=Sampling(stop=stop), logprobs=1), set(), tokenizer, result)
    for _ in range(3):
        answer.take(script.logits())
    before, fails[0] = deepcopy(result), True
    with pytest.raises(KeyboardInterrupt):
        answer.take(script.logits())
    assert (result.text, result.token_ids, result.logprobs) == (before.text, before.token_ids, before.logprobs)
    assert result.finish_reason == ""
    assert result.stats.generated_tokens == len(result.token_ids) == 3


@pytest.mark.parametrize("n", [0, 1, 2, 3, 300, 999])
def test_candidates_are_listed_as_greedy_sampling_draws_them(n: int) -> None:
    """Equal logits by id; logits that differ by less than their logarithms can tell, by the logits."""
    logits = torch.zeros(300)
    logits[[7, 40, 200]] = torch.tensor([5.0, 5.0, 5.0000005])
    drawn, rest = [], logits.clone()
    for _ in range(min(n, 300)):
        drawn.append(int(rest.argmax()))
        rest[drawn[-1]] = -torch.inf
    entry = logprobs_of(logits, 200, n)
    assert ([token for token, _ in entry.top], drawn[:3]) == (drawn, [200, 7, 40][:n])
    assert entry.top == [(token, float(logits.log_softmax(-1)[token])) for token in drawn]
