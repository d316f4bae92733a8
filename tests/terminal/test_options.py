"""The shared options: what they read, what they refuse, and how groups of them reach a command."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import lce
from lce import cli
from lce.errors import LceError, UsageError
from lce.terminal import options
from lce.terminal.output import Output
from tests.command import assert_error, run

CONTEXT = click.Context(cli.cli)
OPTION = click.Option(["--option"])


def received(args: list[str], *decorators: Any) -> dict[str, Any]:
    """The arguments of a command with these decorators, for a command line."""
    arguments: dict[str, Any] = {}

    def command(**values: Any) -> None:
        arguments.update(values)

    for decorator in reversed(decorators):
        command = decorator(command)
    result = CliRunner().invoke(click.command()(command), args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return arguments


def test_a_group_of_options_is_one_argument() -> None:
    corner = options.packed("corner", complex, click.option("--real", type=int), click.option("--imag", type=int))
    args = ["--imag", "2", "--name", "c", "--real", "1"]
    assert received(args, click.option("--name"), corner) == {"name": "c", "corner": 1 + 2j}
    assert received(args, corner, click.option("--name")) == {"name": "c", "corner": 1 + 2j}


def test_groups_stand_in_the_help_in_their_order() -> None:
    names = [param.name for param in cli.prefill.params]
    assert names[:8] == ["model", "prompt", "prompt_file", "out", "checkpoint_every", "length", "method", "knobs"]
    assert names[-3:] == ["json", "quiet", "debug"]


def test_each_group_packs_what_the_library_takes() -> None:
    sampling = received(["--temperature", "0.5", "--stop", "a", "--stop", "b"], options.sampling_options)["sampling"]
    assert sampling == lce.Sampling(temperature=0.5, stop=("a", "b"))
    method = received(["--method", "longheads", "-o", "chunks=4"], options.method_options)["method"]
    assert method == lce.methods.LongHeads(chunks=4)
    several = received(["--method", "full,streaming", "-o", "streaming.sinks=2"], options.methods_options)["methods"]
    assert several == [lce.methods.Full(), lce.methods.Streaming(sinks=2)]
    loading = received(["--rope", "ntk", "--rope-factor", "2"], options.loading_options)["loading"]
    assert set(loading) == set(inspect.signature(lce.load).parameters) - {"model", "method"}
    planning = received(["--block", "7"], options.planning_options)["planning"]
    assert set(planning) == set(inspect.signature(lce.plan).parameters) - {"model", "method", "tokens"}
    assert received(["--quiet"], options.output_options)["output"] == Output(json=False, quiet=True)
    assert received(["--json"], options.json_options)["output"] == Output(json=True)


def test_a_knob_for_all_methods_and_for_one() -> None:
    knobs = {"window": "8", "dca.window": "9", "dca.parts": "all"}
    assert options.knobs_for("full", knobs, ["full", "dca"]) == {"window": "8"}
    assert options.knobs_for("dca", knobs, ["full", "dca"]) == {"window": "9", "parts": "all"}
    with pytest.raises(UsageError, match="did you mean 'dca'"):
        options.knobs_for("dca", {"dac.parts": "all"}, ["dca"])


@pytest.mark.parametrize(("text", "lengths"), [("512, 2k,1K", [512, 2048, 1024]), ("0", [0]), (" 7 ", [7])])
def test_lengths_in_units_of_1024(text: str, lengths: list[int]) -> None:
    assert options.parse_lengths(CONTEXT, OPTION, text) == lengths


@pytest.mark.parametrize("text", ["", "many", "2k,", "2m", "-1", "1.5k"])
def test_what_is_not_a_length(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a number of tokens, for example 512 or 2k"):
        options.parse_lengths(CONTEXT, OPTION, text)


def test_one_length_alone() -> None:
    assert options.parse_length(CONTEXT, OPTION, "32k") == 32768
    with pytest.raises(click.BadParameter, match="more than one number of tokens"):
        options.parse_length(CONTEXT, OPTION, "1k,2k")


@pytest.mark.parametrize(
    ("args", "stdin", "expected"),
    [
        (["--prompt", "-"], "from stdin\n", "from stdin"),
        ([], "from stdin", "from stdin"),
        (["-f", "-"], "from stdin\r\n", "from stdin"),
        (["-f", "{file}"], None, "a file’s text\n"),
        (["-f", "{file}", "--prompt", "and a question"], None, "a file’s text\n\nand a question"),
        (["-f", "{file}", "--prompt", "-"], "from stdin", "a file’s text\n\nfrom stdin"),
    ],
)
def test_where_the_prompt_comes_from(
    args: list[str], stdin: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("\ufeffa file’s text\n\n".encode())  # as some editors write it; one line break ends the file
    prompts = []

    class Engine:
        """Notes the prompt and ends the command there."""

        def stream(self, prompt: str, **_: object) -> None:
            prompts.append(prompt)
            raise LceError

    monkeypatch.setattr(lce, "load", lambda *_, **__: Engine())
    assert run("generate", "--model", "none", *(arg.format(file=file) for arg in args), stdin=stdin).exit_code == 1
    assert prompts == [expected]


def test_prompts_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    generate = ("generate", "--model", "none")
    assert_error(run(*generate, "-f", tmp_path / "missing.txt"), 3, "missing.txt", "No such file")
    assert_error(run(*generate, "-f", tmp_path), 3, str(tmp_path), "directory")
    assert_error(run(*generate, "-f", tmp_path / "empty.txt"), 3, "empty.txt", "is empty")
    assert_error(run(*generate, "-f", tmp_path / "latin.txt"), 3, "latin.txt", "not UTF-8", "byte 2")
    assert_error(run(*generate, "--prompt", "-", stdin=b"\xff"), 3, "stdin", "not UTF-8")
    assert_error(run(*generate), 3, "stdin is empty")
    assert_error(run(*generate, "--prompt", ""), 2, "--prompt is empty")
    assert_error(run(*generate, "--prompt", "-", "-f", "-"), 2, "both stdin")


def test_no_prompt_on_a_terminal_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(UsageError, match="no prompt"):
        options.read_prompt(None, None)


def test_defaults_are_those_of_the_library() -> None:
    defaults = {parameter.name: parameter.default for parameter in cli.generate.params}
    without = (
        *("model", "prompt", "stop", "block", "window", "rope", "rope_factor", "seed"),
        *("kv_device_budget", "kv_host_budget", "spill_dir"),
    )
    for function in (lce.load, lce.Engine.stream, lce.Sampling):
        for name, parameter in inspect.signature(function).parameters.items():
            if name in defaults and name not in without:
                assert defaults[name] == parameter.default, name
    planning = {parameter.name: parameter.default for parameter in cli.plan.params}
    for name, parameter in inspect.signature(lce.plan).parameters.items():
        if name in planning and name not in (*without, "tokens"):
            assert planning[name] == parameter.default, name
