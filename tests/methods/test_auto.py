"""The method `auto`: what it stands for at each length and on each model, who takes it, and what is said."""

from dataclasses import replace
from pathlib import Path

import pytest

import lce
from lce.methods.auto import choice_for
from lce.methods.choices import ANY, CANDIDATES, LAST_QUARTER, QWEN, SMOLLM2, TABLES, Table, table_for
from tests.advising import advised, asked
from tests.checkpoints import save_tiny
from tests.command import assert_error, run

PROMPT = "The old miller took the bread to the village. " * 30  # more than ten windows


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as one of the family of Qwen2, of which a table has RoPE scaling."""
    own = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    return save_tiny(tmp_path_factory.mktemp("qwen"), **own)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.architecture)
def test_choices_are_methods_with_valid_knobs(table: Table) -> None:
    for each in (*table.own, *table.choices, *CANDIDATES):
        assert each.make().resolve(8192).name == each.method


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.architecture)
def test_choices_cover_every_length_in_order(table: Table) -> None:
    """With or without those that scale RoPE, which a user's own scaling rules out."""
    for choices in (table.choices, [each for each in table.choices if each.rope is None]):
        lengths = [each.windows for each in choices if each.rope is None]
        assert lengths[-1] is None
        assert lengths[:-1] == sorted(filter(None, lengths))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.architecture)
def test_no_choice_is_beyond_what_its_method_reads(table: Table) -> None:
    """Each method reads the longest text of its row without a warning."""
    for choice in table.choices:
        limit = choice.make().resolve(8192).limit(8192)
        fits = limit is None or choice.rope or (choice.windows is not None and limit >= choice.windows * 8192)
        assert fits, choice


def test_a_table_is_of_the_family_else_of_the_nearest_model(tiny_model: Path, qwen: Path) -> None:
    """The nearest window and hidden size, by the sum of the ratios' logarithms."""
    llama, qwen2 = asked(tiny_model).config, asked(qwen).config
    assert (table_for(llama), table_for(replace(llama, window=131_072))) == (SMOLLM2, SMOLLM2)
    assert (table_for(qwen2), table_for(replace(qwen2, window=4096))) == (QWEN, QWEN)
    smollm2 = replace(llama, window=8192, hidden_size=576)
    assert table_for(smollm2) == (*LAST_QUARTER, *SMOLLM2)
    model = replace(asked(tiny_model), config=smollm2, window=8192)
    assert [choice_for(n, model).method for n in (6144, 6145, 8192)] == ["full", "rerope", "rerope"]
    assert choice_for(8192, replace(model, named=frozenset({"window"}))).method == "full", "as the user wants it"
    other = replace(llama, architecture="MistralForCausalLM")
    assert table_for(replace(other, window=8192, hidden_size=576)) == SMOLLM2
    assert table_for(replace(other, window=32_768, hidden_size=4096)) == QWEN
    assert table_for(replace(other, window=8192, hidden_size=4096)) == SMOLLM2


def test_what_a_user_named_is_kept(qwen: Path) -> None:
    assert advised(128, qwen).spelled == "full --rope yarn"
    assert advised(None, qwen).spelled == "full --rope yarn"
    assert advised(200, qwen, rope="linear", rope_factor=2).spelled == "self_extend"
    assert advised(128, qwen, rope="linear", rope_factor=2).spelled == "full"
    assert advised(9999, qwen, rope="ntk").spelled == "full", "the factor follows the length"
    assert advised(128, qwen, window=32).spelled == "full --rope yarn"
    model = asked(qwen)
    scaled = replace(model, config=replace(model.config, rope=replace(model.rope, kind="llama3", factor=4.0)))
    assert choice_for(128, scaled).spelled == "self_extend", "a checkpoint's scaling of another kind stays"


def test_a_choice_with_a_scaling_is_loaded_and_saved(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = lce.load(qwen, "auto", length=200)
    assert (engine.method.name, engine.setup.rope.kind, engine.setup.rope.factor) == ("full", "yarn", 200 / 64)
    assert (engine.setup.readable, engine.setup.choice(200).spelled) == (200, "full --rope yarn")
    assert "method auto is full --rope yarn for up to 200 tokens" in capsys.readouterr().err
    engine.prefill(list(range(150)), length=200).save(tmp_path / "text.lce")
    with pytest.warns(lce.WindowWarning, match="--method auto, which takes full --rope yarn for this length"):
        lce.load(qwen).prefill(list(range(150)))
    assert lce.plan(qwen, "auto", tokens=200).readable == 200
    answer = run("generate", "-m", qwen, "-c", tmp_path / "text.lce", "-p", "Hello", "-n", "2")
    assert answer.exit_code == 0, answer.stderr


def test_an_engine_has_the_chosen_method(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    window = lce.load(tiny_model).window
    for length in (window, window + 1, None):
        expected = advised(length, tiny_model)
        assert lce.load(tiny_model, "auto", length=length).method == expected.make().resolve(window)
        assert expected.reason in capsys.readouterr().err
    assert advised(None, tiny_model) == advised(10**9, tiny_model) == ANY
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
    assert f"method auto is {ANY.spelled} for" in long.stderr
    saved = tmp_path / "text.lce"
    assert run("prefill", *model, "--prompt", PROMPT, "--out", str(saved)).exit_code == 0
    again = run("generate", *model, "--context", str(saved), "--prompt", "Hello", "-n", "2")
    assert again.exit_code == 0, "auto takes the method of a context file"
    assert "tokens, read by full" in run("plan", *model, "--tokens", "20").stdout


def test_a_prefill_is_for_the_longer_of_prompt_and_length(tiny_model: Path, tmp_path: Path) -> None:
    window, out = lce.load(tiny_model).window, str(tmp_path / "text.lce")
    for prompt, length in (("Hello", window), ("Hello", 2 * window), (PROMPT, window)):
        n_tokens = len(lce.load(tiny_model).tokenizer.encode(prompt))
        expected = advised(max(length, n_tokens), tiny_model).spelled
        command = ("--model", tiny_model, "--method", "auto", "--length", str(length), "--prompt", prompt)
        result = run("prefill", *command, "--out", out, "--force")
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
