"""Requests of a harness: arguments, likelihoods as the logits give them, and texts up to their stops."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lce
from lce.errors import UsageError
from lce_lab.eval import requests
from lce_lab.eval.requests import Generating, cut, generating, generations, likelihoods, longest, model_arguments
from tests.checkpoints import tokens

TEXT = tokens(60)


def test_model_arguments_are_options_knobs_and_our_own() -> None:
    given = {"pretrained": "demo", "method": "longheads", "chunk_size": 16, "chunks": None, "share": "group"}
    loading, own = model_arguments({**given, "rope": None, "block": "1k", "dtype": None, "max_length": "4k"})
    method = lce.methods.LongHeads(chunk_size=16, chunks=None, share="group")
    assert loading == {"model": "demo", "method": method, "block": "1k", "rope": "none"}
    assert own == requests.ModelArguments(max_length=4096)
    loading, _ = model_arguments({"pretrained": 7, "method": "esa", "compress": None})
    assert (loading["model"], loading["method"]) == ("7", lce.methods.ESA(compress="none"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pretrained": None}, "no pretrained=PATH"),
        ({"method": "longhead"}, "unknown method 'longhead'; did you mean 'longheads'"),
        ({"method": "longheads", "chunk_siz": 1}, "'chunk_siz' with .*; did you mean 'chunk_size'"),
        ({"chunk_size": 1}, "unknown model argument 'chunk_size' with method 'full'"),
        ({"method": "longheads", "chunk_size": "x"}, "chunk_size=x is not a whole number"),
        ({"max_length": 1}, "max_length is 1; expected 2 or more"),
        ({"add_bos_token": 1}, "add_bos_token is 1; expected True or False"),
    ],
)
def test_model_arguments_that_cannot_be_used(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        model_arguments({"pretrained": "demo", **given})


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 64), ({"rope": "linear", "rope_factor": 2.0}, 128), ({"window": 100}, 100), ({"method": "longheads"}, None)],
)
def test_the_longest_text_that_can_be_read(tiny_model: Path, options: dict[str, Any], expected: int | None) -> None:
    engine = lce.load(tiny_model, **options)
    assert longest(engine) == expected
    if expected:
        assert engine.setup.beyond(expected) is None
        assert engine.setup.beyond(expected + 1) is not None


@pytest.mark.parametrize("method", ["full", lce.methods.LongHeads(chunk_size=4, chunks=8)], ids=["full", "longheads"])
def test_likelihoods_are_those_of_the_logits(tiny_model: Path, method: lce.Method) -> None:
    engine = lce.load(tiny_model, method, block=8)
    likely = int(engine.logits(TEXT)[-1].argmax())
    asked = [(TEXT, [likely]), (TEXT[:9], TEXT[9:12]), (TEXT, [likely, 7, 8])]
    asked += [(TEXT, [3]), ([5], TEXT), (TEXT[:20], [9, 9])]
    found = dict(likelihoods(engine, asked))
    for number, (context, continuation) in enumerate(asked):
        ids = [*context, *continuation]
        logits = engine.logits(ids)[len(context) - 1 : -1].double()
        each = logits.log_softmax(-1)[range(len(continuation)), continuation]
        greedy = logits.argmax(-1).tolist() == continuation
        assert found[number] == (pytest.approx(float(each.sum()), abs=1e-4), greedy)
    assert found[0][1]


def test_contexts_lose_their_beginning(tiny_model: Path) -> None:
    engine = lce.load(tiny_model)
    (found,) = likelihoods(engine, [(TEXT[:20], TEXT[20:26])], max_length=15)
    assert [found] == list(likelihoods(engine, [(TEXT[10:20], TEXT[20:26])]))
    assert requests.text_likelihood(engine, [(TEXT[10:20], TEXT[20:26])]) == pytest.approx(found[1][0], abs=1e-4)
    with pytest.raises(UsageError, match="a max_length of 6 or more"):
        next(likelihoods(engine, [(TEXT[:20], TEXT[20:26])], max_length=5))


def test_a_text_in_windows(tiny_model: Path) -> None:
    engine = lce.load(tiny_model, block=8)
    logits = [engine.logits([0, *TEXT[:30]]), engine.logits(TEXT[20:50])]
    scored = [(TEXT[:30], logits[0][:-1]), (TEXT[30:50], logits[1][9:-1])]
    expected = sum(float(x.log_softmax(-1)[range(len(ids)), ids].sum()) for ids, x in scored)
    windows = [([0], TEXT[:30]), (TEXT[20:30], TEXT[30:50])]
    assert requests.text_likelihood(engine, windows) == pytest.approx(expected, abs=1e-4)
    assert requests.text_likelihood(engine, []) == 0


def test_generation_arguments() -> None:
    given = {"until": ["", "\n"], "max_gen_toks": 5, "do_sample": False, "temperature": 0.0, "num_beams": 1}
    assert generating(given) == Generating(("\n",), 5, {"temperature": 0.0})
    given = {"until": [], "max_gen_toks": 5, "do_sample": True, "top_p": 0.9, "seed": 3}
    assert generating(given) == Generating((), 5, {"temperature": 1.0, "top_p": 0.9, "seed": 3})
    for wrong in ({"num_beams": 4}, {"stop": ["x"]}, {"top_kk": 1}):
        with pytest.raises(UsageError, match=f"unknown generation argument {next(iter(wrong))}=.*valid: .*until"):
            generating({**given, **wrong})


def test_generations_end_before_the_first_stop(tiny_model: Path) -> None:
    engine = lce.load(tiny_model)
    whole = [engine.generate(prompt, max_tokens=20).text for prompt in (TEXT, TEXT[:40], TEXT)]
    until = (whole[0][9:11], whole[1][5:6], "not in the text")
    asked = [(TEXT, Generating(until, 20)), (TEXT[:40], Generating(until, 20)), (TEXT, Generating((), 20))]
    found = dict(generations(engine, asked))
    assert [found[number] for number in range(3)] == [cut(whole[0], until), cut(whole[1], until), whole[2]]
    assert len(found[0]) <= 9
    assert len(found[1]) <= 5
    (shorter,) = generations(engine, [(TEXT, Generating((), 20))], max_length=50)
    assert shorter == (0, engine.generate(TEXT[30:], max_tokens=20).text)
    with pytest.raises(UsageError, match="a max_gen_toks below the max_length of 20"):
        next(generations(engine, asked, max_length=20))


def test_a_stop_may_be_a_special_token(tiny_model: Path) -> None:
    engine = lce.load(tiny_model)
    engine.setup.model.head = torch.zeros_like(engine.setup.model.head)  # so the likeliest token is the first, <s>
    for until, n_written in ((("x",), 9), (("x", "<s>"), 0)):
        context = engine.prefill(TEXT)
        assert requests._written(engine, context, Generating(until, 9)) == ""
        assert context.token_ids == [*TEXT, *[0] * n_written]


def test_the_cut_is_before_the_first_stop() -> None:
    assert cut("abcabd", ["d", "bc", "c"]) == "a"
    assert cut("abc", ["x", "y"]) == cut("abc", []) == "abc"


def test_without_the_harness_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lce_lab.eval.harness", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'lce\[harness\]'"):
        importlib.import_module("lce_lab.eval.harness")
