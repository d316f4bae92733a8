"""`Handover`: prefill by one method's definition, decode by another's, over one cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lce
from lce.errors import DataError, UsageError
from lce.methods.wrapped import Handover
from tests import oracle
from tests.command import assert_error
from tests.command import run as run_command
from tests.depth import pairs
from tests.running import vectors

WINDOW, N, PROMPT = 32, 130, 117
PREFILL = ("full", "dca", "rerope", "self_extend", "streaming", "lm_infinite")
AFTER = ("full", "longheads", "rerope", "self_extend", "dca", "quest")
SCALED = lce.methods.RopeConfig("yarn", factor=4.0)


@pytest.mark.parametrize(("before", "after", "block"), pairs(PREFILL, AFTER, [39, 7, 117]), ids=str)
@pytest.mark.covering
def test_each_row_is_that_of_its_own_method(before: str, after: str, block: int) -> None:
    q, k, v = vectors(3, 4, 2, N, 8)
    sizes = [min(block, PROMPT - start) for start in range(0, PROMPT, block)] + [1] * (N - PROMPT)
    method = Handover(lce.methods.make(after), lce.methods.make(before))
    out = lce.methods.run(method, q, k, v, window=WINDOW, blocks=sizes, prompt=PROMPT)
    first = getattr(oracle, before)(q, k, v, oracle.Setting(WINDOW))
    truth = oracle.attention(q, k, v, first, oracle.Setting(WINDOW))
    decode = lce.methods.run(after, q, k, v, window=WINDOW, blocks=sizes)
    assert (out[:, :PROMPT] - truth[:, :PROMPT]).abs().max() <= 1e-4
    assert torch.equal(out[:, PROMPT:], decode[:, PROMPT:])  # which tests/methods/test_matrix.py holds to its oracle


@pytest.mark.parametrize("after", ["full", "longheads", "self_extend"])
@pytest.mark.parametrize(("before", "knobs"), [*((name, {}) for name in PREFILL), ("self_extend", {"group": "auto"})])
def test_the_factor_of_yarn_is_neither_lost_nor_doubled(before: str, knobs: dict[str, str], after: str) -> None:
    q, k, v = vectors(3, 4, 2, N, 8)
    rope = lce.methods.Rope(SCALED, 8, WINDOW, N)
    first = lce.methods.make(before, knobs)
    out = lce.methods.run(Handover(lce.methods.make(after), first), q, k, v, window=WINDOW, blocks=26, rope=rope)
    assert (out - lce.methods.run(first, q, k, v, window=WINDOW, blocks=26, rope=rope)).abs().max() <= 1e-4


@pytest.mark.parametrize("before", ["longheads", "esa", "quest", "infllm"])
def test_methods_that_choose_are_refused_for_prefill(before: str) -> None:
    with pytest.raises(UsageError, match="expected full, dca"):
        lce.load("demo", "full", prefill_method=before)


def test_a_method_that_keeps_what_its_attention_finds_is_refused() -> None:
    with pytest.raises(UsageError, match="keeps what its own attention to a prompt finds"):
        lce.load("demo", "infllm", prefill_method="dca")
    lce.load("demo", "infllm", prefill_method="infllm")


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int8-device"])
@pytest.mark.slow
def test_tiers_and_files_change_nothing(tmp_path: Path, kv_dtype: str) -> None:
    ids = torch.randint(2, 200, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    method, found = lce.methods.make("pages", {"page": 16, "budget": 128}), []
    for budgets in ({}, {"kv_host_budget": "8MiB", "spill_dir": str(tmp_path)}):
        how: Any = {"prefill_method": "dca", "block": 64, "kv_dtype": kv_dtype, **budgets}
        engine = lce.load("demo", method, **how)
        context = engine.prefill(ids[:690])
        context.save(tmp_path / "text.lce", force=True)
        for each in (engine.open_context(tmp_path / "text.lce"), context):
            found.append(engine.generate(ids[690:], context=each, max_tokens=4).token_ids)
    assert found[1:] == found[:1] * 3


@pytest.mark.slow
def test_contexts_saved_between_prefill_and_decode_go_on_as_if_never_stopped(tmp_path: Path) -> None:
    ids = torch.randint(2, 200, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    engine = lce.load("demo", "longheads", prefill_method="full", block=64)
    whole = engine.generate(ids, max_tokens=12).token_ids
    other = lce.load("demo", "longheads", prefill_method="full", block=63)
    assert other.generate(ids, max_tokens=12).token_ids == whole
    context = engine.prefill(ids[:600])
    context.save(tmp_path / "half.lce")
    opened = engine.open_context(tmp_path / "half.lce")
    assert engine.generate(ids[600:], context=opened, max_tokens=12).token_ids == whole
    with pytest.raises(DataError, match="give --method"):
        lce.load("demo", "longheads").open_context(tmp_path / "half.lce")


def test_a_method_handed_over_to_itself_is_that_method() -> None:
    ids = list(range(2, 202)) * 3
    both = [lce.load("demo", "longheads", prefill_method=before) for before in (None, "longheads")]
    first, second = (engine.generate(ids, max_tokens=8).token_ids for engine in both)
    assert first == second


def test_on_the_command_line(tiny_model: Path, tmp_path: Path) -> None:
    prompt, saved = "The old miller took the bread to the village. " * 10, str(tmp_path / "text.lce")
    model = ("--model", str(tiny_model), "--quiet", "-n", "8")
    both = ("--method", "longheads", "--prefill-method", "rerope")
    expected = lce.load(tiny_model, "longheads", prefill_method="rerope").generate(prompt, max_tokens=8).text
    result = run_command("generate", *model, *both, "--prompt", prompt, "--save", saved)
    assert result.stdout == expected + "\n", result.stderr
    refused = run_command("generate", *model, "--context", saved, "--prefill-method", "full", "--prompt", "And then")
    assert_error(refused, 3, "give --method longheads --prefill-method rerope")


def test_a_context_file_gives_back_the_knobs_of_both_methods(tiny_model: Path, tmp_path: Path) -> None:
    prompt, saved = "The old miller took the bread to the village. " * 10, str(tmp_path / "text.lce")
    model = ("--model", tiny_model, "--quiet")
    knobs = ("--method", "pages", "-o", "budget=64", "--prefill-method", "dca", "-o", "prefill_method.chunk_size=48")
    result = run_command("prefill", *model, *knobs, "--prompt", prompt, "--out", saved)
    assert result.exit_code == 0, result.stderr
    found = lce.info(saved)
    assert isinstance(found, lce.ContextInfo)
    assert found.method == "pages --prefill-method dca"
    assert (found.knobs["budget"], found.knobs["prefill_method.chunk_size"]) == (64, 48)
    more = ("generate", *model, "--context", saved, "--prompt", "And then", "-n", "4")
    again = run_command(*more)
    assert again.exit_code == 0, again.stderr
    assert again.stdout == run_command(*more, *knobs).stdout
    assert run_command(*more, "--method", "pages", "--prefill-method", "dca").stdout == again.stdout
    assert_error(run_command(*more, "-o", "budget=96"), 3, "budget=64", "give -o budget=64")
    other = run_command(*more, "-o", "prefill_method.chunk_size=32")
    assert_error(other, 3, "give -o prefill_method.chunk_size=48")


def test_plans_and_other_commands(tiny_model: Path) -> None:
    model, more = ("--model", tiny_model), ("--prefill-method", "full")
    planned = run_command("plan", *model, "--method", "longheads", *more, "--tokens", "200")
    assert "read by longheads --prefill-method full" in planned.stdout, planned.stderr
    assert "longheads --prefill-method full can read 64 tokens" in planned.stdout
    refused = run_command("plan", *model, "--prefill-method", "quest", "--tokens", "200")
    assert_error(refused, 2, "prefill_method is quest")
    refused = run_command("explain", "longheads", *more)
    assert_error(refused, 2, "No such option '--prefill-method'", "It is for lce generate, chat, prefill and plan.")
    refused = run_command("plan", *model, "-o", "prefill_method.local=4", "--tokens", "200")
    assert_error(refused, 2, "-o prefill_method.local is a knob of the method of prefill; give --prefill-method")
