"""The passkey task: what a sample holds, and that a score means what it says."""

from __future__ import annotations

from itertools import cycle
from random import Random

import pytest

import lce
from lce.lab.eval.needles import NEEDLES
from lce.lab.eval.passkey import NOISE, evaluate, make_sample, samples
from lce.lab.eval.scores import wilson
from tests.command import assert_error, run


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("filler", ["prose", "noise"])
@pytest.mark.parametrize("task", NEEDLES)
def test_a_sample_hides_its_answer_once_and_asks_for_it_last(task: str, filler: str) -> None:
    for sample in samples(task, filler, 300, 10, 4, words):
        question = sample.prompt[-100:].partition("What")[2] or sample.prompt[-100:].partition("Where")[2]
        assert question
        assert sample.answer in sample.prompt
        assert sample.answer not in question
        assert 270 <= words(sample.prompt) <= 300


def test_depths_are_spread_over_the_text() -> None:
    made = list(samples("passkey", "prose", 400, 8, 1, words))
    assert [int(sample.depth * 8) for sample in made] == list(range(8))
    for sample in made:
        assert sample.prompt.index(sample.answer) / len(sample.prompt) == pytest.approx(sample.depth, abs=0.1)


def test_a_seed_says_which_samples() -> None:
    def made(seed: int) -> list[str]:
        return [sample.prompt for sample in samples("code", "prose", 100, 5, seed, words)]

    assert made(1) == made(1)
    assert not set(made(1)) & set(made(2))


def test_a_needle_that_does_not_fit_is_refused() -> None:
    with pytest.raises(lce.UsageError, match="length is 5; expected at least"):
        make_sample(NEEDLES["passkey"](Random(0)), 5, 0.5, cycle(NOISE), words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "passky"}, "did you mean 'passkey'"),
        ({"filler": "prse"}, "did you mean 'prose'"),
        ({"n": 0}, "samples"),
    ],
)
def test_wrong_arguments_are_explained(arguments: dict[str, object], message: str) -> None:
    engine = lce.load("demo")
    with pytest.raises(lce.UsageError, match=message):
        evaluate(engine, length=100, **arguments)  # type: ignore[arg-type]


def test_wilson_interval() -> None:
    assert wilson(50, 50) == pytest.approx((0.9287, 1.0), abs=1e-4)
    assert wilson(0, 50) == pytest.approx((0.0, 0.0713), abs=1e-4)
    assert wilson(25, 50) == pytest.approx((0.3664, 0.6336), abs=1e-4)


def test_a_knob_may_be_for_one_of_the_methods() -> None:
    passkey = ("eval", "passkey", "--model", "demo", "--lengths", "60,70", "--samples", "1")
    both = ("--method", "streaming,longheads", "-o", "longheads.chunks=5", "-o", "streaming.sinks=2")
    shown = run(*passkey, *both)
    assert shown.exit_code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[-4:-2] == ["| method | 60 | 70 |", "| --- | ---: | ---: |"]
    assert [line.split()[1] for line in lines[-2:]] == ["`streaming`", "`longheads`"]
    assert_error(run(*passkey, *both, "-o", "streming.sinks=3", "--json"), 2, "did you mean 'streaming'")
    assert_error(run(*passkey, *both, "-o", "streaming.chunks=3", "--json"), 2, "has no option 'chunks'")
