"""Commands that go on with a context file: what they take from it, what they keep, what they refuse; users' methods."""

import json
from pathlib import Path
from typing import Any

import pytest

import lce
from lce.engine.info import describe
from lce.terminal.reading import continued
from tests.command import PROMPT, assert_error, run
from tests.methods.user_file import TEXT, mine

__all__ = ["mine"]

SETTINGS: list[tuple[str, ...]] = [
    (),
    ("--method", "longheads", "-o", "chunk_size=8", "-o", "chunks=4", "-o", "share=group"),
    ("--method", "dca", "--window", "40"),
    ("--method", "rerope", "--rope", "yarn", "--rope-factor", "4"),
    ("--method", "infllm", "-o", "repr_tokens=2", "--dtype", "bfloat16"),
    ("--rope", "dynamic", "--rope-factor", "3"),
]


def last_json(*args: str | Path) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.stderr
    content: dict[str, Any] = json.loads(result.stdout)
    return content


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_come_from_the_file(setting: tuple[str, ...], tiny_model: Path, tmp_path: Path) -> None:
    """Prefill, append, ask and ask again, without a word of the settings, is one text read with them."""
    first, second, third = (tmp_path / name for name in ("a.lce", "b.lce", "c.lce"))
    last_json("prefill", "-m", tiny_model, "-p", PROMPT * 2, "--out", first, *setting)
    appended = last_json("prefill", "-m", tiny_model, "-c", first, "-p", PROMPT, "--out", second)
    assert appended["stats"]["read_before"] == describe(first).tokens
    assert describe(second).tokens == describe(first).tokens + appended["stats"]["prompt_tokens"]
    asked = last_json("generate", "-m", tiny_model, "-c", second, " dog", "-n", "5", "--save", third)
    again = last_json("generate", "-m", tiny_model, "-c", third, " and", "-n", "5")
    info = describe(first)
    for name in ("method", "window", "rope", "rope_factor", "dtype", "model", "knobs", "announced"):
        assert getattr(describe(third), name) == getattr(info, name)
    engine = lce.load(tiny_model, lce.methods.make(info.method, info.knobs), **continued(info, {}))
    context = engine.open_context(first)
    assert len(context) == info.tokens, "the files of before did not change"
    engine.prefill(PROMPT, context=context)
    assert engine.generate(" dog", context=context, max_tokens=5).token_ids == asked["token_ids"]
    assert engine.generate(" and", context=context, max_tokens=5).token_ids == again["token_ids"]


def test_what_is_given_contradicts_the_file_or_agrees(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.lce"
    last_json("prefill", "-m", tiny_model, "-p", PROMPT, "--out", out, *SETTINGS[1])
    ask = ("generate", "-m", tiny_model, "-c", out, " dog", "-n", "2")
    expected = last_json(*ask)["token_ids"]
    for same in (SETTINGS[1], ("--method", "longheads"), ("-o", "chunks=4"), ("--window", "64"), ("--rope", "none")):
        assert last_json(*ask, *same)["token_ids"] == expected
    for other, words in [
        (("--method", "dca"), "another method"),
        (("-o", "chunks=5"), "chunks"),
        (("--window", "63"), "another window"),
        (("--rope", "linear", "--rope-factor", "2"), "another rope"),
        (("--dtype", "float16"), "another dtype"),
    ]:
        assert_error(run(*ask, *other), 3, words)
    assert_error(run(*ask, "--method", ""), 2, "unknown method ''")
    assert_error(run("generate", "-m", tiny_model, "-c", "", " dog"), 2, "path is ''")
    assert_error(run(*ask, "-o", "sinks=3"), 2, "has no option 'sinks'")


def test_a_text_and_its_answer_are_kept(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.lce"
    asked = last_json("generate", "-m", tiny_model, PROMPT, "-n", "4", "--save", out)
    assert asked["context"] == str(out)
    assert asked["token_ids"] == lce.load(tiny_model).generate(PROMPT, max_tokens=4).token_ids
    kept = lce.load(tiny_model).open_context(out).token_ids
    assert kept[-len(asked["token_ids"]) :] == asked["token_ids"]
    assert len(kept) == asked["stats"]["prompt_tokens"] + len(asked["token_ids"])


def test_a_context_may_be_replaced_by_its_continuation(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.lce"
    last_json("prefill", "-m", tiny_model, "-p", PROMPT, "--out", out)
    before = describe(out).tokens
    command = ("prefill", "-m", tiny_model, "-p", PROMPT, "-c", out, "--out", out)
    other = tmp_path / "b.lce"
    assert_error(run(*command[:-1], other, "--checkpoint-every", "1k"), 2, "--checkpoint-every", "--context")
    other.write_text("precious")
    assert_error(run(*command[:-1], other), 2, "exists", "--force")
    result = run(*command)
    assert result.exit_code == 0
    assert result.stderr.startswith(f"lce: note: {out} exists and will be replaced\n")
    assert f"({before} read before)" in result.stderr
    assert describe(out).tokens > before
    assert run("generate", "-m", tiny_model, "-c", out, " dog", "-n", "3", "--save", out).exit_code == 0
    assert run("generate", "-m", tiny_model, "-c", out, " dog", "-n", "3", "--save", other, "--force").exit_code == 0
    assert describe(other).tokens > describe(out).tokens > before


def test_a_share_of_the_keys_is_kept(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.lce"
    command = ("prefill", "-m", tiny_model, "-p", PROMPT, "--window", "1k", "--out", out)
    found = last_json(*command, "--keep", "0.5")
    assert found["stats"]["evict_s"] > 0
    info = run("info", out)
    evicted = describe(out).cached - describe(out).rows
    assert abs(evicted - describe(out).tokens / 2) <= 0.5
    assert f"evicted     {evicted} tokens in each KV head" in info.stdout
    assert len(last_json("generate", "-m", tiny_model, "-c", out, " dog", "-n", "5")["token_ids"]) <= 5
    assert "| evict " in run(*command, "--force", "--keep", "0.5").stderr
    out.unlink()  # with --force a note tells of the file that is replaced
    assert_error(run(*command, "--keep", "2"), 2, "keep is 2.0; expected a share above 0, at most 1")
    assert_error(run(*command, "--keep", "0.5", "--method", "dca"), 2, "full alone")


def test_a_file_of_the_users_own_runs_only_where_it_is_named(tiny_model: Path, mine: Path, tmp_path: Path) -> None:
    saved, ask = tmp_path / "x.lce", ["generate", "-m", tiny_model, "-p", "the quick brown fox", "-n", 2]
    made = run(*ask, "--method", mine, "-o", "chunk_size=2", "--save", saved)
    assert made.exit_code == 0
    assert f"lce: note: {mine} runs as your own code" in made.stderr
    assert f"method file  {mine}\n" in run("info", saved).stdout
    assert "which is not run here" in run("info", saved, "-m", tiny_model).stderr
    assert_error(run(*ask, "-c", saved), 2, f"method mine of {mine}, which is code and runs only if you name it")
    assert_error(run(*ask, "-c", saved, "--method", "full"), 3, f"give --method {mine}, or")
    assert run(*ask, "-c", saved, "--method", mine).exit_code == 0, "with the knobs of the file"
    mine.write_text(f"{TEXT}# other code may choose other tokens")
    assert "made with other code of the method mine" in run(*ask, "-c", saved, "--method", mine).stderr
    assert "multiplies the mean key" in run("methods", mine).stdout
    mine.write_text(TEXT.replace("self.factor *", "missing *"))
    failed = run(*ask, "--method", mine, "-o", "chunk_size=2").stderr
    assert failed.endswith("name 'missing' is not defined; correct the file, or run with --debug for the traceback\n")
    assert f"lce: error: {mine}, line 12: NameError: " in failed
