"""The factor "auto" of RoPE scaling: which length it follows, what is said, and contexts that keep theirs."""

import json
from pathlib import Path
from typing import Any

import pytest

import lce
from lce.engine.info import describe
from tests.checkpoints import save_chat, tokens
from tests.command import assert_error, ran, run

W = 64
KINDS = ["linear", "ntk", "dynamic", "yarn", "llama3"]


def factor_of(context: lce.Context) -> float:
    return float(context.rope.config.factor)


@pytest.mark.parametrize("kind", KINDS)
def test_each_context_has_the_factor_that_its_length_needs(tiny_model: Path, kind: str) -> None:
    """As an engine with that factor has; within the window as without scaling."""
    engine, ids = lce.load(tiny_model, rope=kind), tokens(160)
    fixed = lce.load(tiny_model, rope="ntk" if kind == "dynamic" else kind, rope_factor=2.5)
    assert (engine.logits(ids) - fixed.logits(ids)).abs().max() == 0
    assert (engine.logits(ids[:W]) - lce.load(tiny_model).logits(ids[:W])).abs().max() == 0
    assert engine.generate(ids[:150], max_tokens=10).token_ids == fixed.generate(ids[:150], max_tokens=10).token_ids
    assert [factor_of(engine.new_context(n)) for n in (1, W, 2 * W)] == [1, 1, 2]
    assert factor_of(engine.prefill(ids[:100], length=160)) == 2.5
    assert (engine.setup.readable, engine.setup.limits()["full"]) == (None, None)


def test_contexts_of_several_factors_share_a_batch(tiny_model: Path) -> None:
    engine, texts = lce.load(tiny_model, rope="yarn"), [tokens(n) for n in (30, 100, 150)]
    expected = [engine.generate(ids, max_tokens=6).token_ids for ids in texts]
    with engine.batch(max_lanes=3) as batch:
        streams = [batch.stream(ids, max_tokens=6) for ids in texts]
        assert [each.finish().token_ids for each in streams] == expected


def test_a_length_fixes_the_factor(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = lce.load(tiny_model, rope="yarn", length=161)
    assert (engine.setup.rope.factor, engine.setup.readable, factor_of(engine.new_context(5))) == (
        161 / W,
        161,
        161 / W,
    )
    lce.load(tiny_model, rope="yarn", length=161)
    said = capsys.readouterr().err
    assert said == "lce: rope yarn: factor 2.516, for up to 161 tokens and a window of 64\n", "once"
    lce.load(tiny_model, rope="linear", length=60)
    assert capsys.readouterr().err == "lce: rope linear: not scaled, for up to 60 tokens and a window of 64\n"
    assert lce.load(tiny_model, rope="yarn", window=32, length=64).setup.rope.factor == 2
    assert capsys.readouterr().err == "lce: rope yarn: factor 2, for up to 64 tokens and a window of 32\n"
    assert lce.plan(tiny_model, tokens=161, rope="yarn").readable == 161
    assert capsys.readouterr().err == ""


def test_a_text_beyond_what_was_announced_is_said(tiny_model: Path) -> None:
    engine = lce.load(tiny_model, rope="yarn")
    context = engine.prefill(tokens(100))
    with pytest.warns(lce.WindowWarning, match="101 tokens are more than the 100 .* announce so many tokens when"):
        engine.prefill([7], context=context)
    assert factor_of(context) == 100 / W
    engine.prefill(tokens(101), length=200)


def test_a_conversation_announces_its_answer(tmp_path: Path) -> None:
    engine = lce.load(save_chat(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}"), rope="yarn")
    talk = engine.conversation()
    talk.ask("Why?", max_tokens=90)
    assert talk.context is not None
    assert talk.context.announced == talk.tokens_read + 90


def test_a_file_keeps_its_factor(tiny_model: Path, tmp_path: Path) -> None:
    engine, out = lce.load(tiny_model, rope="yarn"), tmp_path / "text.lce"
    with engine.prefill(tokens(100), length=160) as context:
        context.save(out)
    assert (describe(out).rope, describe(out).rope_factor, describe(out).announced) == ("yarn", "auto", 160)
    assert factor_of(engine.open_context(out)) == 2.5
    with pytest.raises(lce.DataError, match=r"factor=auto; .*factor=2\.5: give --rope yarn --rope-factor auto"):
        lce.load(tiny_model, rope="yarn", rope_factor=2.5).open_context(out)
    assert "yarn, factor auto for 160 tokens" in ran("info", out).stdout
    for options in ((), ("--rope", "yarn"), ("--rope", "yarn", "--rope-factor", "auto")):
        assert run("generate", "-m", tiny_model, "-c", out, "-p", "Hi", "-n", "2", *options).exit_code == 0
    lce.load(tiny_model, rope="ntk")  # says which factor contexts have, once in a process
    assert_error(
        run("generate", "-m", tiny_model, "-c", out, "-p", "Hi", "--rope", "ntk"), 3, "another rope, kind=yarn"
    )


def test_the_commands_take_the_prompt_and_the_answer(tiny_model: Path, tmp_path: Path) -> None:
    model, prompt = ("-m", tiny_model, "--rope", "yarn"), "The old miller took the bread to the village. " * 9
    n_tokens = len(lce.load(tiny_model).tokenizer.encode(prompt))
    said = ran("generate", *model, "-p", prompt, "-n", "7").stderr
    assert f"for up to {n_tokens + 7:,} tokens and a window of 64" in said
    assert "can read of this model" not in said
    out = tmp_path / "text.lce"
    assert f"for up to {n_tokens + 1024:,} tokens" in ran("prefill", *model, "-p", prompt, "--out", out).stderr
    assert describe(out).rope_factor == (n_tokens + 1024) / W
    again = ran("generate", *model, "-c", out, "-p", "Hi", "-n", "3").stderr
    assert "can read of this model" not in again, "--rope yarn continues with the factor of the file"
    planned = json.loads(ran("plan", *model, "--tokens", "200", "--json").stdout)
    found = planned["readable"], planned["warning"], planned["auto"]["method"], planned["rope"]["factor"]
    assert found == (200, None, "full", 200 / W)
    assert ", yarn with factor 3.125" in ran("plan", *model, "--tokens", "200").stdout
    asked: Any = ("eval", "run", *model, "--lengths", "128,256", "--task", "code", "--samples", "1", "--no-ceiling")
    rows = json.loads(ran(*asked, "--json").stdout)
    assert [(row["length"], row["warning"]) for row in rows] == [(128, None), (256, None)]
