"""The method `auto`: what it stands for at each length, who takes it, and what is said."""

from pathlib import Path

import pytest

import lce
from lce.methods.auto import CANDIDATES, CHOICES, choice_for
from tests.command import assert_error, run

PROMPT = "The old miller took the bread to the village. " * 30  # more than ten windows


def test_choices_are_methods_with_valid_knobs() -> None:
    for each in (*CHOICES, *CANDIDATES):
        assert each.make().resolve(8192).name == each.method


def test_choices_cover_every_length_in_order() -> None:
    lengths = [choice.windows for choice in CHOICES]
    assert lengths[-1] is None
    assert lengths[:-1] == sorted(filter(None, lengths))
    assert choice_for(100, 100).method == "full"
    assert choice_for(101, 100).method != "full"
    assert choice_for(None, 100) == choice_for(10**9, 100) == CHOICES[-1]


def test_no_choice_is_beyond_what_its_method_reads() -> None:
    """Each method reads the longest text of its row without a warning."""
    for choice in CHOICES:
        limit = choice.make().resolve(8192).limit(8192)
        assert limit is None or (choice.windows is not None and limit >= choice.windows * 8192)


def test_an_engine_has_the_chosen_method(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    window = lce.load(tiny_model).window
    for length in (window, window + 1, None):
        expected = choice_for(length, window)
        assert lce.load(tiny_model, "auto", length=length).method == expected.make().resolve(window)
        assert expected.reason in capsys.readouterr().err
    assert lce.plan(tiny_model, "auto", tokens=window).method == "full"
    assert capsys.readouterr().err == ""


def test_scaling_widens_the_window(tiny_model: Path) -> None:
    window = lce.load(tiny_model).window
    assert lce.load(tiny_model, "auto", length=2 * window, rope="linear", rope_factor=2).method.name == "full"


def test_the_command_counts_the_prompt(tiny_model: Path, tmp_path: Path) -> None:
    model = ("--model", str(tiny_model), "--method", "auto")
    short = run("generate", *model, "--prompt", "Hello", "-n", "2")
    assert "method auto is full for" in short.stderr
    long = run("generate", *model, "--prompt", PROMPT, "-n", "2")
    assert f"method auto is {CHOICES[-1].spelled} for" in long.stderr
    saved = tmp_path / "text.lce"
    assert run("prefill", *model, "--prompt", PROMPT, "--out", str(saved)).exit_code == 0
    again = run("generate", *model, "--context", str(saved), "--prompt", "Hello", "-n", "2")
    assert again.exit_code == 0, "auto takes the method of a context file"
    assert "tokens, read by full" in run("plan", *model, "--tokens", "20").stdout


def test_a_prefill_is_for_the_longer_of_prompt_and_length(tiny_model: Path, tmp_path: Path) -> None:
    window, out = lce.load(tiny_model).window, str(tmp_path / "text.lce")
    for prompt, length in (("Hello", window), ("Hello", 2 * window), (PROMPT, window)):
        n_tokens = len(lce.load(tiny_model).tokenizer.encode(prompt))
        expected = choice_for(max(length, n_tokens), window).spelled
        asked = ("--model", tiny_model, "--method", "auto", "--length", str(length), "--prompt", prompt)
        result = run("prefill", *asked, "--out", out, "--force")
        assert f"method auto is {expected} for up to {max(length, n_tokens):,} tokens" in result.stderr


def test_where_auto_means_nothing(tiny_model: Path) -> None:
    with pytest.raises(lce.UsageError, match="where one model is loaded or planned"):
        lce.methods.make("auto")
    model = ("--model", str(tiny_model), "--method", "auto")
    assert_error(run("eval", "run", *model, "--lengths", "64"), 2, "auto stands for a method where one model")
    assert_error(run("generate", *model, "-o", "chunk_size=8", "Hello"), 2, "-o chunk_size is a knob of one method")
    with pytest.raises(lce.UsageError, match="registered as 'auto'"):
        lce.methods.register("auto")(lce.methods.find("full"))
    with pytest.raises(lce.UsageError, match="length is"):
        lce.load(tiny_model, "auto", length=-1)
